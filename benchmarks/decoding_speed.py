"""F3.4 to F3.6 and F3.9 to F3.12: speed ratios, c and memory. All are medians of interleaved turns; nothing else may compute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.decoding_run import FIXED_K, K_MAX, Run, join
from benchmarks.figures import Measured
from eagle.bench import measure
from eagle.bench.measure import Spread, Timed, spread
from eagle.bench.methods import Lab
from eagle.bench.suites import SUITES
from eagle.bench.workload import Arm, Workload
from eagle.progress import Track, say

LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens, the value of transformers' documentation
Player = Callable[[int], float]  # turn -> seconds of its work


def _race(run: Run, lab: Lab, work: Workload, arms: list[Arm], *, size: int, tokens: int | list[int]) -> list[Timed]:
    """Time arms against each other on `size` prompts a turn, `tokens` an answer, or one number each (stop tokens are ignored)."""
    pairs = run.effort.pairs
    with Track(f"figures: batch {arms[0].batch}", pairs * len(arms), "runs") as track:
        return measure.race(lab, work, arms, max_new_tokens=tokens, size=size, rounds=pairs, seed=run.seed, done=track.advance)


def _row(one: Timed, base: Timed, **about: Any) -> dict[str, Any]:
    """Return the ratio of tokens/s to `base`, turn by turn, and what it came from."""
    row = one.row(base)
    kept = ("speedup", "acceptance_length", "mean_draft_tokens", "lengths", "peak_logits_mib")
    rates = {arm.arm.name: spread([s.tokens_per_second for s in arm.stats], 2) for arm in (base, one)}
    return {**about, "batch": one.arm.batch, **{key: row[key] for key in kept}, "tokens_per_second": rates}


def _pid(batch: int) -> list[Arm]:
    return [Arm(batch, 0.0, 0, "none"), Arm(batch, 0.0, K_MAX, "eagle31-pid")]


def pid_gain(run: Run, suite: str) -> Measured:
    """F3.4: Eagle 3.1 + PID against none, batch 1, one engine."""
    effort = run.effort
    work = run.suite(suite, effort.pairs * effort.turn_prompts)
    lab = run.lab(work, batch=1, new_tokens=effort.new_tokens)
    none, pid = _race(run, lab, work, _pid(1), size=effort.turn_prompts, tokens=effort.new_tokens)
    row = _row(pid, none, suite=Path(suite).stem, prompts=len(work.prompts))
    about = run.setting(lab, new_tokens=effort.new_tokens, prompts_a_turn=effort.turn_prompts)
    return run.measured(row["speedup"]["median"], [about, row])


def pid_gain_mt_bench(run: Run) -> Measured:
    """F3.4b: on first turns of MT-bench, where the file is at hand."""
    if not run.mt_bench.is_file():
        return run.measured(None, [], f"MT-bench's {run.mt_bench.name} is not at hand")
    return pid_gain(run, str(run.mt_bench))


@contextmanager
def _without_stops(target: PreTrainedModel) -> Iterator[None]:
    """Let transformers' generate run to its length limit, as the timed engine does."""
    settings: Any = target.generation_config
    stops, settings.eos_token_id = settings.eos_token_id, None
    try:
        yield
    finally:
        settings.eos_token_id = stops


def _transformers(target: PreTrainedModel, prompts: list[list[int]], tokens: int, **options: Any) -> float:
    """Return the seconds of transformers' greedy generate on one batch (padded on the left) of `tokens` an answer."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    generate: Any = target.generate  # transformers types it as a module attribute
    with _without_stops(target), torch.inference_mode():
        began = time.perf_counter()
        made = generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)
        seconds = time.perf_counter() - began
    if made.shape != (len(prompts), longest + tokens):
        raise RuntimeError(f"generate made {tuple(made.shape)}, not {len(prompts)} answers of {tokens} tokens")
    return seconds


def _engine(lab: Lab, arm: Arm, prompts: list[list[int]], tokens: int, seed: int) -> float:
    """Return the seconds of the engine on the same work."""
    began = time.perf_counter()
    result = lab.engine(arm.method).generate(
        prompts, max_new_tokens=tokens, draft_tokens=lab.policy(arm), seed=seed, ignore_eos=True, batch=arm.batch
    )
    seconds = time.perf_counter() - began
    if result.stats.tokens != len(prompts) * tokens:
        raise RuntimeError(f"the engine made {result.stats.tokens} tokens, not {len(prompts) * tokens}")
    return seconds


def in_turns(players: dict[str, Player], turns: int) -> dict[str, list[float]]:
    """Return each player's seconds; each turn begins with another one."""
    names, found = list(players), {name: list[float]() for name in players}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(players[name](turn))
    return found


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    return spread([a / b for a, b in zip(slow, fast, strict=True)])


def transformers_gain(run: Run, **rival: int) -> Measured:
    """F3.5: Eagle 3.1 + PID against transformers' generate with the options `rival`, batch 1."""
    effort = run.effort
    work = run.suite("heldout", effort.pairs * effort.turn_prompts)
    lab = run.lab(work, batch=1, new_tokens=effort.new_tokens)
    arm, target, tokens = _pid(1)[1], run.transformers(lab), effort.new_tokens

    def pid(turn: int) -> float:
        return _engine(lab, arm, work.window(turn, effort.turn_prompts), tokens, run.seed + turn)

    def generate(turn: int) -> float:
        return sum(_transformers(target, [p], tokens, **rival) for p in work.window(turn, effort.turn_prompts))

    short = work.window(0, 1)
    _transformers(target, short, min(8, tokens), **rival)
    _engine(lab, arm, short, min(8, tokens), run.seed)
    lab.prepare(arm, work)
    times = in_turns({"eagle31-pid": pid, "generate": generate}, effort.pairs)
    about = run.setting(
        lab, suite="heldout", prompts=len(work.prompts), prompts_a_turn=effort.turn_prompts, new_tokens=tokens, generate=rival
    )
    rates = {name: spread([effort.turn_prompts * tokens / s for s in seconds], 2) for name, seconds in times.items()}
    speedup = _ratio(times["generate"], times["eagle31-pid"])
    return run.measured(speedup["median"], [about, {"speedup": speedup, "tokens_per_second": rates}])


def prompt_lookup_gain(run: Run) -> Measured:
    """F3.5b: against transformers' prompt-lookup assisted decoding."""
    return transformers_gain(run, prompt_lookup_num_tokens=LOOKUP_TOKENS)


def never_loses(run: Run) -> Measured:
    """F3.6: the worst median ratio of Eagle 3.1 + PID to none over batch sizes and suites.

    The controllers live on from suite to suite, as a server's do. Answers have different lengths, the same ones in both arms,
    and more requests wait than the batch has places: with equal lengths the batches of `none` alone would end all at once, and
    with one batch's worth the time would be that of its slowest request. A cell whose median is below 1 is timed a second time
    in as many turns, and the median of all its turns counts.
    """
    effort = run.effort
    largest = max(effort.batches)
    suites = [run.suite(name, max(2 * largest, effort.turn_prompts * effort.pairs)) for name in SUITES]
    longest = effort.batch_tokens * 5 // 3
    lab = run.lab(join(suites), batch=largest, new_tokens=longest)
    cells: list[dict[str, Any]] = []
    for batch in effort.batches:
        for work in suites:
            say(f"figures: F3.6: batch {batch}, suite {work.name}")
            size = max(effort.turn_prompts, min(4 * batch, 2 * largest))
            tokens = answer_lengths(effort.batch_tokens, size)
            none, pid = _race(run, lab, work, _pid(batch), size=size, tokens=tokens)
            if _row(pid, none)["speedup"]["median"] < 1.0:
                more = _race(run, lab, work, _pid(batch), size=size, tokens=tokens)
                none.stats += more[0].stats
                pid.stats += more[1].stats
            cells.append(_row(pid, none, suite=work.name, prompts_a_turn=size))
    about = run.setting(
        lab, new_tokens=[effort.batch_tokens // 3, longest], prompts={work.name: len(work.prompts) for work in suites}
    )
    return run.measured(min(cell["speedup"]["median"] for cell in cells), [about, *cells])


def answer_lengths(mean: int, count: int) -> list[int]:
    """Return `count` answer lengths between a third and five thirds of `mean`, in an order without a pattern; always the same."""
    shortest, steps = mean // 3, mean * 5 // 3 - mean // 3 + 1
    stride = next(n for n in range(int(0.38 * steps) + 1, 2 * steps) if math.gcd(n, steps) == 1)  # visits every length
    return [shortest + stride * at % steps for at in range(count)]


def draft_cost(run: Run) -> Measured:
    """F3.9: seconds of a draft step over those of a target step without speculation, batch 1; at K=3, and K=8 beside it."""
    effort = run.effort
    size, tokens = max(effort.turn_prompts // 2, 1), min(64, effort.new_tokens)
    work = run.suite("heldout", effort.pairs * size)
    lab = run.lab(work, batch=1, new_tokens=effort.new_tokens)
    arms = [Arm(1, 0.0, 0, "none"), Arm(1, 0.0, FIXED_K, "eagle31"), Arm(1, 0.0, K_MAX, "eagle31")]
    none, *drafted = _race(run, lab, work, arms, size=size, tokens=tokens)
    rows = [measure.cost_ratio(none, one) for one in drafted]
    about = run.setting(
        lab, suite="heldout", new_tokens=tokens, prompts_a_turn=size, draft_layers=run.draft_layers,
        target_step_ms=spread([1e3 * s.target_step_seconds for s in none.stats], 3),
        draft_step_ms={str(d.arm.draft_tokens): spread([1e3 * s.draft_step_seconds for s in d.stats], 3) for d in drafted},
    )  # fmt: skip
    return run.measured(rows[0]["median"], [about, *rows])


def plain_speed(run: Run) -> Measured:
    """F3.10: the engine without speculation against transformers' generate, same prompts; the worse of batch 1 and the largest."""
    effort, largest = run.effort, max(run.effort.batches)
    work = run.suite("heldout", max(largest, effort.pairs * effort.turn_prompts))
    lab = run.lab(work, batch=largest, new_tokens=effort.new_tokens)
    target, tokens = run.transformers(lab), min(48, effort.new_tokens)
    rows: list[dict[str, Any]] = []
    for batch, size in ((1, effort.turn_prompts), (largest, largest)):
        arm = Arm(batch, 0.0, 0, "none")

        def engine(turn: int, arm: Arm = arm, size: int = size) -> float:
            return _engine(lab, arm, work.window(turn, size), tokens, run.seed)

        def generate(turn: int, batch: int = batch, size: int = size) -> float:
            prompts = work.window(turn, size)
            return sum(_transformers(target, prompts[i : i + batch], tokens) for i in range(0, size, batch))

        _engine(lab, arm, work.window(0, batch), 2, run.seed)
        _transformers(target, work.window(0, batch), 2)
        times = in_turns({"engine": engine, "generate": generate}, effort.pairs)
        rates = {name: spread([size * tokens / s for s in seconds], 2) for name, seconds in times.items()}
        ratio = _ratio(times["generate"], times["engine"])
        rows.append({"batch": batch, "prompts_a_turn": size, "ratio": ratio, "tokens_per_second": rates})
    about = run.setting(lab, suite="heldout", prompts=len(work.prompts), new_tokens=tokens)
    return run.measured(min(row["ratio"]["median"] for row in rows), [about, *rows])


def memory_overhead(run: Run) -> Measured:
    """F3.11: % of the target's weights and KV memory that the draft's take; the larger of batch 1 and the largest batch."""
    effort, rows = run.effort, list[dict[str, Any]]()
    work = run.suite("heldout", max(effort.batches))
    about: dict[str, Any] = {}
    for batch in (1, max(effort.batches)):
        lab = run.lab(work, batch=batch, new_tokens=effort.new_tokens)
        about = run.setting(lab, suite="heldout", prompts=len(work.prompts), new_tokens=effort.new_tokens)
        rows.append(measure.memory(lab.engine("eagle31")))
    return run.measured(round(100.0 * max(row["overhead"] for row in rows), 3), [about, *rows])


def chooser_gain(run: Run) -> Measured:
    """F3.12: the chooser of K and chunks against K=8 in one pass, at the largest batch."""
    effort, batch = run.effort, max(run.effort.batches)
    work = run.suite("default", batch)
    lab = run.lab(work, batch=batch, new_tokens=effort.batch_tokens)
    arms = [Arm(batch, 0.0, K_MAX, "eagle31"), Arm(batch, 0.0, K_MAX, "eagle31-chunks")]
    fixed, chooser = _race(run, lab, work, arms, size=batch, tokens=effort.batch_tokens)
    row = _row(chooser, fixed, suite=work.name, prompts_a_turn=batch)
    row["peak_logits_mib_one_pass"] = fixed.row(fixed)["peak_logits_mib"]
    about = run.setting(lab, new_tokens=effort.batch_tokens, prompts=len(work.prompts))
    return run.measured(row["speedup"]["median"], [about, row])
