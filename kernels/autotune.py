"""Choose the launch of a Triton kernel: the search space, pruned by what the compiled kernels take, then timed on the device.

    python -m kernels.autotune --target 90 [--op silu_mul] [--json OUT]

shows, without a GPU, what the pruning leaves of each space for the shapes of a Llama-3-8B draft. Timing needs the device
(`eagle step tune`). `triton.autotune` is not used: it measures at the first call, inside whatever runs then (a captured
graph, a timed benchmark), keeps its choice for one process only, and fails in the interpreter. Here the choice is made once and
written down as a row of plain JSON (`spaces.write_row`, `kernels.tuned`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.aot import Report, Specimen, compile_specimen
from kernels.occupancy import Limits, limits_of, resident_warps, why_not
from kernels.spaces import SPACES, Problem, write_row
from kernels.tuned import Stamp

Timer = Callable[[Callable[[], Any]], float]
Reader = Callable[[Specimen], Report]
GAIN = 0.98  # a launch must take less than this share of the default's time to replace it
EXAMPLES = (
    Problem("add_rms_norm", (4096,), "bfloat16", 1), Problem("input_norm", (4096,), "bfloat16", 1),
    Problem("feature_norms", (4096, 3), "bfloat16", 5), Problem("rope_cache", (32, 8, 128), "bfloat16", 1),
    Problem("cached_attention", (32, 8, 128), "bfloat16", 1), Problem("silu_mul", (14336,), "bfloat16", 1),
    Problem("sample_head", (4096, 32000), "bfloat16", 1), Problem("rejection", (128256, 32000), "float32", 1),
    Problem("dense_terms", (32000,), "bfloat16", 1024),
)  # fmt: skip


def cuda_timer(call: Callable[[], Any]) -> float:
    """Return the median milliseconds of a call on the current CUDA device, caches of the device flushed between calls."""
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median"))


def compiler(target: int) -> Reader:
    """Return what compiles a specimen ahead of time for `target` and says what it takes; the same one is compiled once."""
    known: dict[tuple[Any, ...], Report] = {}

    def read(specimen: Specimen) -> Report:
        key = (
            specimen.kernel.__name__, specimen.hidden, specimen.dtype, specimen.num_warps, specimen.num_stages,
            tuple(sorted(specimen.constants.items())),
        )  # fmt: skip
        if key not in known:
            known[key] = compile_specimen(specimen.kernel.__name__, specimen, target)
        return known[key]

    return read


def survey(problem: Problem, read: Reader, limits: Limits) -> dict[str, Any]:
    """Return how many launches of the space are left after pruning, and why the others are not; nothing is timed."""
    space = SPACES[problem.op]
    dropped: Counter[str] = Counter()
    launches = space.launches(problem)
    for launch in launches:
        dropped[why_not((read(specimen) for specimen in space.specimens(problem, launch)), limits) or "kept"] += 1
    kept = dropped.pop("kept", 0)
    return {"op": problem.op, "problem": str(problem), "launches": len(launches), "kept": kept, "dropped": dict(dropped)}


def tune(
    problem: Problem, stamp: Stamp, device: torch.device, read: Reader, limits: Limits, *, timer: Timer = cuda_timer,
    deadline: float = math.inf, clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any] | None:
    """Time the launches of a problem's space that are worth it and return the row of the fastest, None where none can run.

    The default is timed first and kept unless another takes less than 98 % of its time. After `deadline` no further launch is
    tried. The row: `spaces.write_row`, the stamp, median_ms, default_ms, launches, timed, dropped {why: number}, left (not
    tried for lack of time), resident_warps. A launch that the device refuses counts as dropped.
    """
    from triton.runtime.errors import OutOfResources

    space = SPACES[problem.op]
    call = space.prepare(problem, device)
    default, *others = space.launches(problem)
    random.Random(0).shuffle(others)  # noqa: S311 -- what there is time for is spread over the space
    launches = [default, *others]
    times: dict[Any, float] = {}
    warps: dict[Any, int] = {}
    dropped: Counter[str] = Counter()
    left = 0
    for launch in launches:
        if times and clock() > deadline:
            left += 1
            continue
        reports = [read(specimen) for specimen in space.specimens(problem, launch)]
        reason = why_not(reports, limits)
        if reason is not None and (launch != default or reason in ("error", "shared memory")):
            dropped[reason] += 1
            continue
        try:
            with torch.no_grad():
                times[launch] = timer(partial(call, launch))
        except OutOfResources:
            dropped["refused"] += 1
            continue
        warps[launch] = min(resident_warps(report, limits) for report in reports)
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    usual = times.get(default)
    if usual is not None and times[best] >= GAIN * usual:
        best = default
    return {
        **write_row(problem, best), **asdict(stamp), "median_ms": times[best], "default_ms": usual, "launches": len(launches),
        "timed": len(times), "dropped": dict(dropped), "left": left, "resident_warps": warps[best],
    }  # fmt: skip


def examples(ops: Iterable[str]) -> list[Problem]:
    """Return the problems that the command shows, of these operations (none: of all)."""
    wanted = set(ops) or set(SPACES)
    return [problem for problem in EXAMPLES if problem.op in wanted]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m kernels.autotune", description="what pruning leaves of the search spaces")
    parser.add_argument("--target", type=int, default=90, metavar="CC", help="compute capability, 90 = sm_90")
    parser.add_argument("--op", action="append", default=[], choices=sorted(SPACES), help="only this operation; repeatable")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there too")
    options = parser.parse_args(arguments)
    if "TRITON_INTERPRET" in os.environ:
        parser.error("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    try:
        limits = limits_of(options.target)
    except ValueError as error:
        parser.error(f"--target: {error}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for problem in examples(options.op):
            row = survey(problem, compiler(options.target), limits)
            why = ", ".join(f"{name} {count}" for name, count in sorted(row["dropped"].items())) or "none"
            sys.stdout.write(f"{row['problem']}: {row['kept']} of {row['launches']} launches kept; dropped: {why}\n")
            sys.stdout.flush()
            rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"target": options.target, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
