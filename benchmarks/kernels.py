"""Figures F4.x of the kernels: launches of a draft step, spills on sm_90, the CPU's step, test time; a GPU's are read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import gpu_figures
from benchmarks.decoding_run import find_run
from benchmarks.figures import Figure, Measured
from eagle.bench.launches import count
from eagle.bench.measure import spread
from eagle.decode.drafting import EagleDrafter
from eagle.draft.io import load_draft
from eagle.draft.spec import DraftSpec
from kernels import aot

ROOT = Path(__file__).resolve().parent.parent
LLAMA_8B = DraftSpec(
    hidden_size=4096, target_hidden_size=4096, intermediate_size=14336, num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, draft_vocab_size=32000, aux_layers=(2, 16, 29), rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, max_position_embeddings=8192,
)  # fmt: skip
CONTEXT, LENGTH, REPEATS, TURNS = 64, 4, 40, 9  # of F4.6: positions known, draft tokens, drafts a turn, turns
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


def direct_draft_step() -> Measured:
    """F4.6: seconds of a draft through torch's operations over those through direct calls, batch 1, turn by turn, one process.

    Both with the weights laid out for oneDNN; the draft and the tuned threads and dtype are a finished run's (`find_run`).
    """
    run = find_run()
    work = run.suite("heldout", 1)
    lab = run.lab(work, batch=1, new_tokens=32)
    target = lab.plain.target
    dtype = str(target.dtype).removeprefix("torch.")
    network = load_draft(run.sources.policy / "draft", run.target, device=str(target.device), dtype=dtype).eval()
    room = CONTEXT + REPEATS
    forms = {"torch": False, "direct": True}
    drafters = {name: EagleDrafter.beside(target, network, batch=1, max_length=room, direct=form) for name, form in forms.items()}
    random = torch.Generator().manual_seed(run.seed)
    tokens = torch.randint(network.spec.vocab_size, (1, CONTEXT), generator=random)
    aux = torch.randn(1, CONTEXT, len(network.spec.aux_layers) * network.spec.target_hidden_size, generator=random).to(target.dtype)
    seconds: dict[str, list[float]] = {name: [] for name in drafters}
    with torch.inference_mode():
        for drafter in drafters.values():
            drafter.extend([0], tokens, aux, [0], [CONTEXT])
            drafter.draft([0], LENGTH, None)
        for turn in range(TURNS):
            for name in sorted(drafters, reverse=bool(turn % 2)):
                began = time.perf_counter()
                for _ in range(REPEATS):
                    drafters[name].draft([0], LENGTH, None)
                seconds[name].append((time.perf_counter() - began) / REPEATS / LENGTH)
    ratio = spread([a / b for a, b in zip(seconds["torch"], seconds["direct"], strict=True)])
    times = {f"{name}_ms_a_token": spread([1e3 * s for s in values], 4) for name, values in seconds.items()}
    about = run.setting(lab, context=CONTEXT, draft_tokens=LENGTH, repeats=REPEATS, draft_layers=run.draft_layers)
    return run.measured(ratio["median"], [about, {"ratio": ratio, **times}])


FIGURES = [
    Figure("F4.1", "kernel launches per 4-layer draft step, fused against eager torch", "x", "<=", 0.60, launches),
    *gpu_figures.FIGURES,
    Figure("F4.5", "spills of all kernels compiled for sm_90", "bytes", "<=", 0, spills),
    Figure(
        "F4.6", "CPU: draft step by direct calls against torch's operations, batch 1", "x", ">=", 1.5, direct_draft_step,
        "tried: torch.compile of the parts between attentions (slower: its bf16 products read the weights as they are stored); "
        "weights laid out for oneDNN (in both forms here); direct calls for all small operations (this figure): what is left is "
        "reading 34 MB of weights a token",
    ),
    Figure("F4.7", "interpreter tests of the kernels", "min", "<=", 3, interpreter_minutes),
]  # fmt: skip
