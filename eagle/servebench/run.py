"""Speculation through vLLM's server, arm against arm on the same prompts: served.json, served.csv and table.txt.

- `rows`: one per (method, concurrency): tokens_per_second, speedup and ttft_ratio (turn by turn against `none`), TTFT and ITL in
  milliseconds (ITL: a request's mean), acceptance from vLLM's counters over the timed turns, memory_bytes, memory_overhead.
- `equality`: each method's greedy tokens against those of `none` in the same turns at the smallest concurrency, with every first
  difference and the gap between the target's two highest logits there.
- `client`: the same servers asked by vLLM's own client (`vllm bench serve`), in turns.
- the suite `load`: rows per (method, rate) under Poisson arrivals instead, see `eagle.bench.arrivals`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.bench.arrivals import Limits, LoadPoint, LoadResult, load_point, poisson_arrivals
from eagle.bench.measure import busy_percent, common_prefix, logit_gap, quantile, spread
from eagle.bench.workload import Workload, window_size
from eagle.bundle.record import BundleRecord
from eagle.config import Config
from eagle.errors import StepFailed
from eagle.progress import Track
from eagle.serve.launch import Wanted
from eagle.servebench import peer
from eagle.servebench.arms import ServedMethod, describe
from eagle.servebench.client import Answered, closed_loop, open_loop
from eagle.servebench.pool import Pool, Running
from eagle.target.load import load_target
from eagle.watch.counts import Counts, between
from eagle.watch.scrape import EngineCounters, NoCounters, fetch, metrics_url, parse

WARM_TOKENS = 24
CLIENT_TURNS = 2
SCRAPE_SECONDS = 30.0


@dataclass(frozen=True)
class ServedSession:
    """What is measured. `config.bench` gives batch_sizes (concurrency), rounds, max_new_tokens and the load suite's settings."""

    config: Config
    wanted: Wanted
    record: BundleRecord
    methods: Sequence[ServedMethod]
    work: Workload


@dataclass
class Visits:
    """The timed turns of one method at one concurrency."""

    answers: list[list[Answered]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    @property
    def speeds(self) -> list[float]:
        """Output tokens per second of each turn."""
        return [_tokens_per_second(turn) for turn in self.answers]

    @property
    def ttft_ms(self) -> list[float]:
        """Median time to first token of each turn."""
        return [statistics.median(1e3 * one.times.ttft for one in turn) for turn in self.answers]


Table = dict[tuple[ServedMethod, int], Visits]


def run_closed(session: ServedSession, work: Path) -> dict[str, Any]:
    """Measure all methods at all concurrencies in turns; `work` is a folder for passing files."""
    bench, methods = session.config.bench, session.methods
    busy = busy_percent("bench")
    levels, table = sorted(set(bench.batch_sizes)), Table()
    memory: dict[ServedMethod, int] = {}
    names: dict[ServedMethod, str] = {}
    warm: set[tuple[str, int]] = set()
    with Pool(session.wanted, session.record, together=session.wanted.build.cpu) as pool:
        if pool.together:
            for method in methods:  # every start is over before the first timed turn
                pool.get(method)
        with Track("bench", bench.rounds * len(levels) * len(methods), "runs") as track:
            for turn, level, method in _order(session, levels, together=pool.together):
                running = pool.get(method)
                names[method] = describe(method, running.wanted.speculation)
                visits = table.setdefault((method, level), Visits())
                if (running.where.url, level) not in warm:  # a server that was started anew is cold again
                    _warm(running, session, level)
                    warm.add((running.where.url, level))
                size = window_size(len(session.work.prompts), level, bench.rounds)
                track.begin(f"{names[method]} at {level}, turn {turn + 1} of {bench.rounds}")
                before = _counters(running)
                visits.answers.append(
                    closed_loop(running.where, session.work.window(turn, size), level, bench.max_new_tokens, lambda: None)
                )
                counted, _ = between(before, _counters(running))
                visits.counts += counted
                memory[method] = max(memory.get(method, 0), running.memory_bytes())
                track.advance(1, f"{names[method]} at {level}: {visits.speeds[-1]:.1f} tokens/s")
        client = _client(session, pool, names, work) if pool.together else []
    return {
        **_about(session, busy),
        "rows": [_row(names[method], method, level, table, memory) for level in levels for method in methods],
        "equality": _equality(session, table, levels[0]),
        "client": client,
    }


def _order(session: ServedSession, levels: list[int], *, together: bool) -> Iterator[tuple[int, int, ServedMethod]]:
    """Yield (turn, concurrency, method): A B C, B C A, ...; a method's concurrencies in a row where servers take turns."""
    methods = list(session.methods)
    for turn in range(session.config.bench.rounds):
        first = turn % len(methods)
        rotated = methods[first:] + methods[:first]
        if together:
            yield from ((turn, level, method) for level in levels for method in rotated)
        else:
            yield from ((turn, level, method) for method in rotated for level in levels)


def _warm(running: Running, session: ServedSession, level: int) -> None:
    """First requests allocate, and let the controller time its first rounds; they are not counted."""
    tokens = min(WARM_TOKENS, session.config.bench.max_new_tokens)
    closed_loop(running.where, session.work.window(0, level), level, tokens, lambda: None)


def _counters(running: Running) -> dict[str, EngineCounters]:
    """Return vLLM's speculation counters; none of a server that does not speculate."""
    url = metrics_url(running.where.url)
    try:
        return parse(fetch(url, SCRAPE_SECONDS), url)
    except NoCounters:
        return {}


def _tokens_per_second(answers: Sequence[Answered]) -> float:
    began = min(one.times.arrived for one in answers)
    return sum(one.times.tokens for one in answers) / (max(one.times.finished for one in answers) - began)


def _row(name: str, method: ServedMethod, level: int, table: Table, memory: dict[ServedMethod, int]) -> dict[str, Any]:
    mine, base = table[method, level], table["none", level]
    answers = [one for turn in mine.answers for one in turn]
    ttft = [1e3 * one.times.ttft for one in answers]
    itl = [1e3 * one.times.itl for one in answers if one.times.itl is not None]
    drafted = method != "none"
    counts = mine.counts
    return {
        "method": method, "name": name, "concurrency": level,
        "tokens_per_second": spread(mine.speeds, 2),
        "speedup": spread([a / b for a, b in zip(mine.speeds, base.speeds, strict=True)]) if drafted else None,
        "ttft_ms": {"p50": round(quantile(ttft, 0.5), 2), "p95": round(quantile(ttft, 0.95), 2)},
        "ttft_ratio": spread([a / b for a, b in zip(mine.ttft_ms, base.ttft_ms, strict=True)]) if drafted else None,
        "itl_ms": {"p50": round(quantile(itl, 0.5), 3), "p95": round(quantile(itl, 0.95), 3)},
        "acceptance_length": round(counts.acceptance_length, 4) if counts.drafts else None,
        "acceptance_by_position": [round(share, 4) for share in counts.acceptance_by_position],
        "drafts": counts.drafts,
        "mean_draft_tokens": round(counts.draft_tokens / counts.drafts, 3) if counts.drafts else None,
        "tokens": sum(one.times.tokens for one in answers),
        "memory_bytes": memory[method],
        "memory_overhead": round(memory[method] / memory["none"] - 1.0, 4) if drafted else None,
    }  # fmt: skip


def _equality(session: ServedSession, table: Table, level: int) -> dict[str, Any]:
    """Compare every method's tokens with those of `none`, turn by turn at one concurrency."""
    bench, work = session.config.bench, session.work
    size = window_size(len(work.prompts), level, bench.rounds)
    plain = table["none", level].answers
    total = sum(len(one.tokens) for turn in plain for one in turn)
    shares: dict[str, float] = {}
    misses: list[dict[str, Any]] = []
    for method in session.methods:
        if method == "none":
            continue
        equal = 0
        for turn, (wanted, got) in enumerate(zip(plain, table[method, level].answers, strict=True)):
            for prompt, one, other in zip(work.window(turn, size), wanted, got, strict=True):
                same = common_prefix(list(one.tokens), list(other.tokens))
                equal += same
                if same < len(one.tokens):
                    misses.append({"method": method, "turn": turn, "position": same, "context": [*prompt, *one.tokens[:same]]})
        shares[method] = equal / total
    if misses:
        target = load_target(
            session.wanted.target, "float32", "cpu", trust_remote_code=session.config.target.trust_remote_code
        )
        for miss in misses:
            miss["logit_gap"] = logit_gap(target, miss.pop("context"))
    return {"concurrency": level, "tokens": total, "dtype": session.config.target.dtype, "equal": shares, "mismatches": misses}


def _client(session: ServedSession, pool: Pool, names: dict[ServedMethod, str], work: Path) -> list[dict[str, Any]]:
    """Ask each server by vLLM's own client at the smallest concurrency, in turns; returns a row per method."""
    bench = session.config.bench
    level = min(bench.batch_sizes)
    prompts = session.work.window(0, window_size(len(session.work.prompts), level, bench.rounds))
    file = work / "prompts.json"
    found: dict[ServedMethod, list[dict[str, Any]]] = {method: [] for method in session.methods}
    with Track("bench: vLLM's own client", CLIENT_TURNS * len(found), "runs") as track:
        for turn in range(CLIENT_TURNS):
            for method in session.methods if turn % 2 == 0 else reversed(session.methods):
                running = pool.get(method)
                if not file.exists():
                    peer.write_prompts(file, prompts, running)
                found[method].append(peer.run_client(running, file, len(prompts), level, bench.max_new_tokens, work))
                track.advance(1, f"{names[method]}: {found[method][-1]['tokens_per_second']:.1f} tokens/s")
    base = [run["tokens_per_second"] for run in found["none"]]
    rows = []
    for method, runs in found.items():
        speeds = [run["tokens_per_second"] for run in runs]
        rows.append({
            "method": method, "name": names[method], "concurrency": level, "tokens_per_second": spread(speeds, 2),
            "speedup": None if method == "none" else spread([a / b for a, b in zip(speeds, base, strict=True)]),
            "ttft_ms": spread([run["ttft_ms"] for run in runs], 2), "tpot_ms": spread([run["tpot_ms"] for run in runs], 3),
            "requests": sum(run["requests"] for run in runs),
        })  # fmt: skip
    return rows


def run_load(session: ServedSession) -> dict[str, Any]:
    """Answer the prompts under Poisson arrivals at each of bench.load_rates, method by method in turns."""
    config, bench = session.config, session.config.bench
    limits = Limits(bench.load_ttft_ms / 1e3, bench.load_itl_ms / 1e3)
    busy = busy_percent("bench")
    points: dict[ServedMethod, list[LoadPoint]] = {method: [] for method in session.methods}
    names: dict[ServedMethod, str] = {}
    with Pool(session.wanted, session.record, together=session.wanted.build.cpu) as pool:
        if not pool.together:
            raise StepFailed("bench: the suite 'load' needs all servers at once, which a GPU does not hold; use another suite")
        for method in session.methods:
            _warm(pool.get(method), session, min(8, bench.load_requests))
        with Track("bench: load", len(points) * len(bench.load_rates) * bench.load_requests, "requests") as track:
            for turn, rate in enumerate(bench.load_rates):
                arrivals = poisson_arrivals(rate, bench.load_requests, config.runtime.seed)
                for method in session.methods if turn % 2 == 0 else reversed(session.methods):
                    running = pool.get(method)
                    names[method] = describe(method, running.wanted.speculation)
                    prompts = session.work.window(0, bench.load_requests)
                    track.begin(f"{rate:g} requests/s: {names[method]}")
                    answers = open_loop(running.where, prompts, arrivals, bench.max_new_tokens, track.advance)
                    points[method].append(load_point(rate, [one.times for one in answers], limits))
    results = {method: LoadResult(names[method], limits, tuple(points[method])) for method in session.methods}
    by_method = {m: result.rows(None if m == "none" else results["none"]) for m, result in results.items()}
    rows = [row for at in range(len(bench.load_rates)) for row in (by_method[method][at] for method in session.methods)]
    about = {"requests": bench.load_requests, "batch": config.vllm.max_num_seqs}
    return {**_about(session, busy), **about, "limits_ms": [bench.load_ttft_ms, bench.load_itl_ms], "rows": rows}


def _about(session: ServedSession, busy: float) -> dict[str, Any]:
    config, build = session.config, session.wanted.build
    return {
        "engine": f"vLLM {build.version}", "cpu_build": build.cpu, "dtype": config.target.dtype,
        "prompts": len(session.work.prompts), "prompt_ids": session.work.ids, "max_new_tokens": config.bench.max_new_tokens,
        "turns": config.bench.rounds, "threads": config.runtime.threads, "busy_percent": busy, "versions": manifest.versions(),
    }  # fmt: skip
