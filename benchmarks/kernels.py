"""Figures F4.x of the kernels that need no GPU: launches of a draft step, spills on sm_90, time of the interpreter tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figures import Figure, Measured
from eagle.bench.launches import count
from eagle.draft.spec import DraftSpec
from kernels import aot

ROOT = Path(__file__).resolve().parent.parent
LLAMA_8B = DraftSpec(
    hidden_size=4096, target_hidden_size=4096, intermediate_size=14336, num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, draft_vocab_size=32000, aux_layers=(2, 16, 29), rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, max_position_embeddings=8192,
)  # fmt: skip
CASES = ((1, 512), (1, 4096), (32, 4096))  # batch, positions of the cache


def launches() -> Measured:
    """F4.1: the worst ratio over the cases; the runs hold every kernel's name and count."""
    runs, ratios = list[dict[str, object]](), list[tuple[float, float]]()
    for batch, context in CASES:
        found = count(LLAMA_8B, batch, context)
        runs += [{"batch": batch, "context": context, **row} for row in found.table()]
        if found.fused is None:
            return Measured(None, runs, "triton is not installed")
        ratios.append((found.fused.total() / found.eager.total(), found.fused.total() / found.engine.total()))
    worst, engine = max(ratios)
    why = (
        "counted on the meta device, not on a GPU: torch's operations (a split product would be two) and Triton launches; "
        f"against the engine's own form without kernels (joined q, k, v and gate-up products) it is {engine:.2f}x"
    )
    return Measured(worst, runs, why)


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
