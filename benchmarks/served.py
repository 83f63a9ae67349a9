"""Figures F5.1 to F5.5, F5.7, F5.8: speculation through vLLM's own server, by `eagle bench --engine vllm`'s measurement.

The run is what `benchmarks/decoding_run.py` finds (FIGURES_RUN, FIGURES_PROFILE); its bundle is served. Five sessions, each made
when the first figure that reads it is asked for: the user's own kind of traffic (GSM8K's evaluation file) and MT-bench's first
turns at concurrency 1, both again in fp32 for their tokens, and the former at concurrency 1 to 32.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.decoding_run import find_run
from benchmarks.figures import ROOT, Figure, Measured
from benchmarks.quality import GSM8K
from benchmarks.spine import MT_BENCH
from eagle import manifest
from eagle.servebench.session import bench_served

ROUNDS, PROMPTS, TOKENS = 5, 20, 96
EQUAL_ROUNDS = 2
LEVELS, LEVEL_TOKENS = (1, 2, 4, 8, 16, 32), 48
GAP = 1e-4  # a difference of the target's two highest logits that is rounding
ALL, PAIR, EQUAL = "none,ngram,eagle31,eagle31-pid", "none,eagle31-pid", "none,eagle31,eagle31-pid"


@cache
def _session(name: str) -> tuple[dict[str, Any], str]:
    """Measure one session; returns served.json and the run's profile. Those whose tokens are compared are in fp32."""
    run = find_run()
    path, methods, levels, tokens, rounds = {
        "own": (GSM8K, ALL, [1], TOKENS, ROUNDS),
        "mt": (MT_BENCH, ALL, [1], TOKENS, ROUNDS),
        "levels": (GSM8K, PAIR, list(LEVELS), LEVEL_TOKENS, ROUNDS),
        "own-equal": (GSM8K, EQUAL, [1], TOKENS, EQUAL_ROUNDS),
        "mt-equal": (MT_BENCH, EQUAL, [1], TOKENS, EQUAL_ROUNDS),
    }[name]
    bench = run.config.bench.model_copy(update={"batch_sizes": levels, "rounds": rounds, "max_new_tokens": tokens})
    target = run.config.target.model_copy(update={"dtype": "float32"}) if methods == EQUAL else run.config.target
    config = run.config.model_copy(update={"bench": bench, "target": target})
    out = ROOT / "build" / "figures-served" / f"{run.profile}-{name}"
    done = bench_served(config, run.root, run.base, str(path), PROMPTS if name != "levels" else 2 * max(LEVELS), out, methods)
    return manifest.read_json(done / "served.json"), run.profile


def _row(found: dict[str, Any], method: str, level: int = 1) -> dict[str, Any]:
    return next(row for row in found["rows"] if (row["method"], row["concurrency"]) == (method, level))


def _setting(found: dict[str, Any]) -> dict[str, Any]:
    names = ("engine", "dtype", "prompts", "max_new_tokens", "turns", "busy_percent")
    return {name: found[name] for name in names} | {"client": found["client"]}


def _made(name: str, value: Callable[[dict[str, Any]], float], file: Path) -> Measured:
    if not file.is_file():
        return Measured(None, [], f"{file.name} is not at hand")
    found, profile = _session(name)
    return Measured(round(value(found), 4), [_setting(found), *found["rows"]], profile=profile)


def speedup(name: str, file: Path, against: str = "none") -> Measured:
    """Output tokens/s with the controller over those of `against`, median of the turns' ratios."""

    def value(found: dict[str, Any]) -> float:
        mine, other = (_row(found, method)["tokens_per_second"]["runs"] for method in ("eagle31-pid", against))
        return statistics.median([a / b for a, b in zip(mine, other, strict=True)])

    return _made(name, value, file)


def worst_level() -> Measured:
    """The smallest of the median ratios over the concurrencies."""
    return _made(
        "levels", lambda found: min(_row(found, "eagle31-pid", level)["speedup"]["median"] for level in LEVELS), GSM8K
    )


def acceptance_gap() -> Measured:
    """Relative gap of acceptance lengths, vLLM's count against the reference engine's, from the bundle step's validation."""
    run = find_run()
    found = manifest.read_json(run.base / "bundle" / "validation.json")
    if not found["validated"]:
        return Measured(None, [found], "the bundle was not validated in vLLM", profile=run.profile)
    return run.measured(round(100 * found["relative_gap"], 3), [found])


def equality() -> Measured:
    """Percent of greedy tokens that are as without speculation, both kinds of traffic; rounding counts as equal and is listed."""
    runs, wrong, total = [], 0, 0
    for name, file in (("own-equal", GSM8K), ("mt-equal", MT_BENCH)):
        if file.is_file():
            equal = _session(name)[0]["equality"]
            total += equal["tokens"] * len(equal["equal"])
            wrong += sum(TOKENS - miss["position"] for miss in equal["mismatches"] if miss["logit_gap"] >= GAP)
            runs.append({"file": file.name, **equal})
    if not total:
        return Measured(None, [], "no prompt file is at hand")
    listed = sum(len(run["mismatches"]) for run in runs)
    rounding = f"{listed} answers differ from some token on, where the top-2 logit gap is below {GAP:g}"
    why = rounding if listed and not wrong else None
    return Measured(100.0 * (1.0 - wrong / total), runs, why, profile=find_run().profile)


FIGURES = (
    Figure(
        "F5.1a", "vLLM server, Eagle 3.1 + PID against no speculation, tokens/s, 1 at once: own traffic (GSM8K)", "x", ">=", 1.3,
        lambda: speedup("own", GSM8K),
    ),
    Figure("F5.1b", "the same on MT-bench first turns", "x", ">=", 1.1, lambda: speedup("mt", MT_BENCH)),
    Figure("F5.2", "the same against vLLM's own ngram, own traffic", "x", ">=", 1.15, lambda: speedup("own", GSM8K, "ngram")),
    Figure("F5.3", "concurrency 1 to 32, PID on, against none: the worst", "x", ">=", 0.95, worst_level),
    Figure("F5.4", "acceptance length, vLLM against the reference engine, same prompts and K", "%", "<=", 3.0, acceptance_gap),
    Figure("F5.5", "greedy text through the server with and without speculation, fp32", "%", "==", 100.0, equality),
    Figure(
        "F5.7", "TTFT with speculation over that without, concurrency 1", "x", "<=", 1.10,
        lambda: _made("own", lambda found: _row(found, "eagle31-pid")["ttft_ratio"]["median"], GSM8K),
    ),
    Figure(
        "F5.8", "memory of the server's processes, with the draft over without", "%", "<=", 15.0,
        lambda: _made("own", lambda found: 100 * _row(found, "eagle31-pid")["memory_overhead"], GSM8K),
    ),
)  # fmt: skip
