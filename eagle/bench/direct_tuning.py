"""Up to how many tokens the draft's direct calls on CPU (`kernels.native`) beat torch's operations, measured.

A pass of n tokens through the draft, behind 64 known positions, is timed in three forms, in turns: torch's operations, direct
calls with torch's attention, and direct calls throughout. Torch spreads its operations over the threads and so wins where there
is much to do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from eagle import manifest
from eagle.bench.draft_forms import CONTEXT, embedding, random_network
from eagle.decode.drafting import EagleDrafter
from eagle.draft.spec import DraftSpec
from kernels import dispatch
from kernels.native import native
from kernels.tuned import Tuned, source_hash

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FORMS = {"torch": Tuned(direct_tokens=0), "direct": Tuned(direct_tokens=4096, direct_attention=0),
         "attend": Tuned(direct_tokens=4096, direct_attention=4096)}  # fmt: skip
TURNS = 5
TIE = 1.02
Pass = Callable[[str, int], float]  # form, tokens -> seconds


def key_of(spec: DraftSpec, dtype: str, threads: int) -> str:
    """Return the hash of what the limits depend on beside processor and versions."""
    return manifest.hash_json([spec.as_json(), dtype, threads, source_hash("native.cpp", "native.py")])[:16]


def tune_direct(spec: DraftSpec, dtype: str, threads: int, deadline: float) -> dict[str, Any] | None:
    """Return {key, dtype, threads, direct_tokens, direct_attention, passes}, None where there are no direct calls."""
    if native(torch.bfloat16 if dtype == "bfloat16" else torch.float32, torch.device("cpu")) is None:
        return None
    passes = timed_passes(_passes(spec, dtype), TOKENS, deadline)
    return {"key": key_of(spec, dtype, threads), "dtype": dtype, "threads": threads, **limits(passes), "passes": passes}


def _passes(spec: DraftSpec, dtype: str) -> Pass:
    network = random_network(spec, dtype, "cpu")
    embed, drafters = embedding(network), {}
    for form, tuned in FORMS.items():
        with dispatch.using(tuned=tuned), torch.inference_mode():
            drafters[form] = EagleDrafter(network, embed, batch=1, max_length=CONTEXT + max(TOKENS))
    hidden, tokens = torch.randn(1, max(TOKENS), spec.hidden_size).to(embed.dtype), torch.zeros(1, max(TOKENS), dtype=torch.int64)

    def run(form: str, count: int) -> float:
        with torch.inference_mode():
            began = time.perf_counter()
            drafters[form].forward([0], tokens[:, :count], hidden[:, :count], [CONTEXT])
            return time.perf_counter() - began

    return run


def timed_passes(
    run: Pass, tokens: Iterable[int], deadline: float, clock: Callable[[], float] = time.monotonic
) -> list[dict[str, float]]:
    """Return {tokens, torch_ms, direct_ms, attend_ms}, medians, for as many token counts as there is time for (one at least)."""
    found: list[dict[str, float]] = []
    for count in tokens:
        if found and clock() > deadline:
            break
        taken: dict[str, list[float]] = {form: [] for form in FORMS}
        for form in FORMS:
            run(form, count)
        for turn in range(TURNS):
            for form in list(FORMS)[:: -1 if turn % 2 else 1]:
                taken[form].append(run(form, count))
        found.append({"tokens": count, **{f"{form}_ms": round(1e3 * statistics.median(taken[form]), 4) for form in FORMS}})
    return found


def limits(passes: list[dict[str, float]]) -> dict[str, int]:
    """Return {direct_tokens, direct_attention}: the largest counts up to which the direct form nowhere lost by over 2 %."""
    direct = attention = 0
    for row in passes:
        if min(row["direct_ms"], row["attend_ms"]) > TIE * row["torch_ms"]:
            break
        direct = int(row["tokens"])
    for row in passes:
        if row["attend_ms"] > TIE * row["direct_ms"]:
            break
        attention = int(row["tokens"])
    return {"direct_tokens": direct, "direct_attention": min(attention, direct)}
