"""Draft steps and whole speculative rounds in the reference engine, on the real small target and on random large ones.

Random weights accept nothing, so only times are measured with them; what acceptance makes of the times is replayed: from a
recorded trace of a bench (`trace-b1.jsonl`), or, where none is given, with an assumed acceptance of each token, and the row says
which. Of the 70B model a few layers are measured, and only they are in the row's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.figures import ROOT
from benchmarks.gpu.lab import Lab, Target
from eagle.bench.draft_forms import random_network
from eagle.decode.drafting import EagleDrafter
from eagle.decode.engine import DecodeResult, Engine
from eagle.decode.replay import load_trace
from eagle.draft.io import load_draft
from eagle.draft.model import DraftModel
from eagle.draft.spec import FLOATS
from eagle.target.load import load_target
from eagle.target.resolve import demo_folder
from kernels.graphs import Capture

ASSUMED = 0.7  # of a draft token, given that those before it were accepted: about EAGLE-3's on chat (methods: 4.4 tokens a round)
PROMPT, ROUNDS = 64, 12
TRACE = ROOT / "runs" / "default" / "bench" / "trace-b1.jsonl"
Capturing = Capture | Literal["auto"] | None


def measure_rounds(lab: Lab) -> Iterator[dict[str, Any]]:
    """Yield a row a target, batch size and form of the draft: milliseconds of a draft step, a verification, a target step and a
    round, and tokens/s against no speculation with replayed acceptance. A target that does not fit in memory is said to."""
    yield from _real(lab)
    for target in lab.targets:
        try:
            model, network = _random_target(lab, target), random_network(target.draft, lab.dtype, lab.device)
            about = {"target": target.name, "target_layers": target.layers, "full_layers": target.full_layers}
            yield from ({**about, **row} for row in _measured(lab, model, network))
        except torch.OutOfMemoryError:
            yield {"target": target.name, "why": "does not fit into this device's memory"}
        if lab.late:
            return


def _real(lab: Lab) -> Iterator[dict[str, Any]]:
    """The demo target with the draft of runs/default, where both are there."""
    folder, draft = demo_folder(ROOT / ".cache"), ROOT / "runs" / "default" / "policy" / "draft"
    if lab.dry or not (folder / "config.json").is_file() or not (draft / "config.json").is_file():
        yield {"target": "SmolLM2-135M-Instruct", "why": "not measured: no converted target or no draft in runs/default"}
        return
    model = load_target(folder, lab.dtype, lab.device)
    network = load_draft(draft, folder, device=lab.device, dtype=lab.dtype).eval()
    layers = model.config.num_hidden_layers
    about = {"target": "SmolLM2-135M-Instruct", "target_layers": layers, "full_layers": layers}
    yield from ({**about, **row} for row in _measured(lab, model, network))


def _random_target(lab: Lab, target: Target) -> PreTrainedModel:
    spec = target.draft
    config = LlamaConfig(
        hidden_size=spec.target_hidden_size, num_hidden_layers=target.layers, num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim, intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size, max_position_embeddings=spec.max_position_embeddings, tie_word_embeddings=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(FLOATS[lab.dtype])
    try:
        with torch.device(lab.device):
            model: PreTrainedModel = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    return model


def _measured(lab: Lab, model: PreTrainedModel, network: DraftModel) -> Iterator[dict[str, Any]]:
    forms: dict[str, Capturing] = {"fused": None, "fused + graph": lab.capture}
    k, count = lab.draft_tokens, 3 if lab.dry else ROUNDS
    for batch in lab.batches:
        random = torch.Generator().manual_seed(0)
        prompts = torch.randint(network.spec.vocab_size, (batch, 8 if lab.dry else PROMPT), generator=random).tolist()
        for form, capture in forms.items():
            room = len(prompts[0]) + count * (k + 1)
            drafter = EagleDrafter.beside(model, network, batch=batch, max_length=room, capture=capture)
            engine = Engine(model, drafter, max_length=room, batch=batch)
            for _ in range(2):  # the first time compiles and captures
                plain, spec = (_generate(engine, prompts, count, length) for length in (0, k))
            yield {"form": form, "batch": batch, "draft_tokens": k, **_row(plain, spec, k)}
            if lab.late:
                return


def _generate(engine: Engine, prompts: list[list[int]], count: int, length: int) -> DecodeResult:
    return engine.generate(prompts, max_new_tokens=count, draft_tokens=length, ignore_eos=True)


def _row(plain: DecodeResult, drafted: DecodeResult, k: int) -> dict[str, Any]:
    step, verify = plain.stats.target_step_seconds, drafted.stats.target_step_seconds
    draft = drafted.stats.draft_step_seconds
    whole = verify + k * draft
    emitted, source = replayed(TRACE, k)
    return {
        "draft_step_ms": 1e3 * draft, "verify_ms": 1e3 * verify, "target_step_ms": 1e3 * step, "round_ms": 1e3 * whole,
        "acceptance_length": emitted, "acceptance": source, "speedup": emitted * step / whole if whole else None,
    }  # fmt: skip


def replayed(trace: Path, k: int) -> tuple[float, str]:
    """Return (tokens a round with `k` drafts, bonus token included, where the acceptance is from)."""
    if trace.is_file():
        counts: Sequence[int] = [count for now in load_trace(trace) for count in now.accepted]
        return 1.0 + fmean(min(count, k) for count in counts), "recorded: runs/default, the demo target"
    return sum(ASSUMED**i for i in range(k + 1)), f"assumed: each token with probability {ASSUMED}"
