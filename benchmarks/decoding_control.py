"""F3.7 and F3.8: the controller of the draft length, judged on recorded acceptance with measured costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain, permutations
from typing import Any

import numpy as np

from benchmarks.decoding_run import K_MAX, Run, join
from benchmarks.figures import Measured
from eagle.bench import replays
from eagle.bench.methods import Lab
from eagle.bench.workload import Arm, Workload
from eagle.config import Method
from eagle.decode.control import ControlSettings, PidController
from eagle.decode.cost import CostTable
from eagle.decode.replay import Round, best_fixed, good_lengths, replay, settle_rounds
from eagle.progress import say

METHOD: Method = "eagle31-pid"
SYNTHETIC = ((0.9, 0.3), (0.3, 0.9), (0.8, 0.5), (0.5, 0.8))  # per-token acceptance before and after a made-up switch
SYNTHETIC_ROUNDS = 150
SEEDS = 7


def _costs(lab: Lab, work: Workload, batch: int, seed: int) -> CostTable:
    arm = Arm(batch, 0.0, K_MAX, METHOD)
    lab.prepare(arm, work)
    return lab.cost_table(arm)


def regret(run: Run) -> Measured:
    """F3.7: the largest regret of the controller to the best fixed K, in %, over recorded streams; the oracle's beside it."""
    effort = run.effort
    works = {name: run.suite(name, max(n for s, _, n in effort.traces if s == name)) for name, _, _ in effort.traces}
    batch = max(b for _, b, _ in effort.traces)
    lab = run.lab(join(list(works.values())), batch=batch, new_tokens=effort.trace_tokens)
    rows: list[dict[str, Any]] = []
    for suite, size, prompts in effort.traces:
        say(f"figures: F3.7: recording suite {suite} at batch {size}")
        work = works[suite]
        costs = _costs(lab, work, size, run.seed)
        stream = replays.record(lab.engine(METHOD), work.window(0, prompts), size, K_MAX, effort.trace_tokens)
        rows.append({"suite": suite, "prompts": prompts, **replays.judge(stream, costs, lab.control, K_MAX, size)})
    about = run.setting(lab, new_tokens=effort.trace_tokens, max_draft_tokens=K_MAX)
    worst = max(rows, key=lambda row: row["regret_to_best_fixed"])
    oracle = max(row["regret_to_oracle"] for row in rows)
    told = f"worst stream: {worst['suite']}, batch {worst['batch']}; regret to the per-round oracle at most {100 * oracle:.1f} %"
    return run.measured(round(100.0 * worst["regret_to_best_fixed"], 3), [about, *rows], told)


def settling(run: Run) -> Measured:
    """F3.8: rounds after a task switch until K stays where throughput is within 5 % of the best fixed K's; the slowest switch.

    Recorded: the two kinds of the default suite that differ most (best fixed K, then acceptance), one after the other in both
    orders, batch 1; the median over SEEDS orders of the prompts, for what a single order gives is chance (all are listed).
    Synthetic: independent acceptances at given rates, the median over SEEDS streams.
    """
    effort = run.effort
    work = run.suite("default")
    lab = run.lab(work, batch=1, new_tokens=effort.trace_tokens)
    costs = _costs(lab, work, 1, run.seed)
    streams: dict[str, list[list[Round]]] = {}  # a stream for each prompt
    for kind in dict.fromkeys(work.kinds):
        say(f"figures: F3.8: recording {kind}")
        prompts = [p for p, other in zip(work.prompts, work.kinds, strict=True) if other == kind][: effort.kind_prompts]
        streams[kind] = [replays.record(lab.engine(METHOD), [prompt], 1, K_MAX, effort.trace_tokens) for prompt in prompts]
    kinds = {kind: _about(list(chain(*found)), costs) for kind, found in streams.items()}
    rows = [_recorded(streams[a], streams[b], a, b, costs, lab.control) for a, b in _most_different(kinds)]
    rows += [_synthetic(before, after, costs, lab.control) for before, after in SYNTHETIC]
    about = run.setting(lab, suite="default", prompts_a_kind=effort.kind_prompts, new_tokens=effort.trace_tokens, kinds=kinds)
    never = [row["switch"] for row in rows if not row["settled"]]
    return run.measured(
        max(row["rounds"] for row in rows), [about, *rows],
        f"never settled, counted with all rounds after the switch: {', '.join(never)}" if never else None,
        None if len({kind["best_fixed_k"] for kind in kinds.values()}) > 1 else "all recorded kinds have the same best fixed K",
    )  # fmt: skip


def _about(stream: Sequence[Round], costs: CostTable) -> dict[str, Any]:
    return {
        "rounds": len(stream),
        "best_fixed_k": best_fixed(stream, costs, K_MAX).lengths[0],
        "accepted_of_8": round(statistics.fmean(count for now in stream for count in now.accepted), 4),
    }


def _most_different(kinds: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the two kinds that differ most, in both orders; none where there is one kind only."""

    def difference(pair: tuple[str, ...]) -> tuple[float, float]:
        one, other = (kinds[kind] for kind in pair)
        return abs(one["best_fixed_k"] - other["best_fixed_k"]), abs(one["accepted_of_8"] - other["accepted_of_8"])

    pairs = list(permutations(kinds, 2))
    if not pairs:
        return []
    first, second = max(pairs, key=difference)
    return [(first, second), (second, first)]


def _settled(
    before: Sequence[Round], after: Sequence[Round], costs: CostTable, settings: ControlSettings
) -> tuple[int | None, list[int]]:
    """Return the rounds that the controller takes after the switch (None: never), and the lengths K that count as settled."""
    good = good_lengths(after, costs, K_MAX)
    lengths = replay([*before, *after], PidController(costs, settings), costs, K_MAX).lengths
    return settle_rounds(lengths, len(before), good), sorted(good)


def _recorded(
    before: Sequence[list[Round]], after: Sequence[list[Round]], first: str, second: str, costs: CostTable,
    settings: ControlSettings,
) -> dict[str, Any]:  # fmt: skip
    def shuffled(streams: Sequence[list[Round]], seed: int) -> list[Round]:
        order = np.random.default_rng(seed).permutation(len(streams))
        return [now for at in order for now in streams[at]]

    pairs = [(shuffled(before, seed), shuffled(after, 1000 + seed)) for seed in range(SEEDS)]
    about = {"source": f"recorded, median of {SEEDS} orders", "switch": f"{first} -> {second}"}
    return about | {"best_k_before": best_fixed(pairs[0][0], costs, K_MAX).lengths[0]} | _medians(pairs, costs, settings)


def _synthetic(before: float, after: float, costs: CostTable, settings: ControlSettings) -> dict[str, Any]:
    pairs = [(_drawn(before, seed), _drawn(after, 1000 + seed)) for seed in range(SEEDS)]
    about = {"source": f"synthetic, median of {SEEDS} seeds", "switch": f"acceptance {before:g} -> {after:g}"}
    return about | _medians(pairs, costs, settings)


def _medians(pairs: Sequence[tuple[list[Round], list[Round]]], costs: CostTable, settings: ControlSettings) -> dict[str, Any]:
    """Return how many rounds the controller takes after each switch, the median, and the K it had to reach each time (any)."""
    found, targets, longest = list[int](), list[list[int]](), max(len(after) for _, after in pairs)
    for before, after in pairs:
        rounds, good = _settled(before, after, costs, settings)
        found.append(longest if rounds is None else rounds)
        targets.append(good)
    median = int(statistics.median(found))
    return {"good_k_after": targets, "settled": median < longest, "rounds": median, "rounds_by_seed": found}


def _drawn(rate: float, seed: int) -> list[Round]:
    """Rounds of one request whose draft tokens are accepted independently at `rate` each, given all before."""
    passed = np.random.default_rng(seed).random((SYNTHETIC_ROUNDS, K_MAX)) < rate
    return [Round(1, (int(count),)) for count in np.cumprod(passed, axis=1).sum(axis=1)]
