"""Figures F4.x of the kernels that need no GPU: launches of a draft step, spills on sm_90, time of the interpreter tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.draft_launches import count
from benchmarks.figures import Figure, Measured
from kernels import aot

ROOT = Path(__file__).resolve().parent.parent
CASES = ((1, 512), (1, 4096), (32, 4096))  # batch, positions of the cache


def launches() -> Measured:
    """F4.1: the worst ratio over the cases; the runs hold every kernel's name and count."""
    found = {case: count(batch=case[0], context=case[1]) for case in CASES}
    runs = [{"batch": batch, "context": context, **row} for (batch, context), steps in found.items() for row in steps.table()]
    worst = max(found.values(), key=lambda steps: steps.ratio)
    engine = worst.fused.total() / worst.engine.total()
    why = (
        "counted on the meta device, not on a GPU: torch's operations (a split product would be two) and Triton launches; "
        f"against the engine's own form without kernels (joined q, k, v and gate-up products) it is {engine:.2f}x"
    )
    return Measured(worst.ratio, runs, why)


def spills() -> Measured:
    """F4.5: bytes of local memory a thread, summed over every kernel, dtype and size that is compiled for sm_90."""
    rows = aot.compile_apart(90)
    failed = [row for row in rows if row.error]
    keys = ("op", "kernel", "hidden", "dtype", "num_warps", "registers", "shared_bytes", "spills")
    runs = [{key: getattr(row, key) for key in keys} for row in rows]
    if failed:
        return Measured(None, runs, f"{failed[0].op}: {failed[0].error}")
    return Measured(sum(row.spills or 0 for row in rows), runs, f"{len(rows)} kernels compiled")


def interpreter_minutes() -> Measured:
    """F4.7: processor minutes of the tests that run kernels in Triton's interpreter, one thread, children included."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", "-k", "interpreted"]
    began, before = time.perf_counter(), os.times()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=3600
    )
    after, wall = os.times(), time.perf_counter() - began
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    runs = [{"processor_seconds": round(seconds, 1), "wall_seconds": round(wall, 1), "tests": last}]
    if done.returncode:
        return Measured(None, runs, f"the tests failed: {last}")
    return Measured(seconds / 60, runs, "processor time, which is the wall time on one free core")


FIGURES = [
    Figure("F4.1", "kernel launches per 4-layer draft step, fused against eager torch", "x", "<=", 0.60, launches),
    Figure("F4.5", "spills of all kernels compiled for sm_90", "bytes", "<=", 0, spills),
    Figure("F4.7", "interpreter tests of the kernels", "min", "<=", 3, interpreter_minutes),
]
