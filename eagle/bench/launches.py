"""The launches of a draft step, counted on the meta device: eager torch (the draft network itself), the engine's form, fused.

A greedy step and its head, from one draft token to the next, in a batch of equal rows. Eager torch is `DraftModel.step` over a
KV cache, with `torch.nn.functional`'s RMS norm and attention as one kernel each.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle.decode.cache import CachedAttention, KeyValueStore
from eagle.decode.drafting import EagleDrafter
from eagle.decode.proposal import MAX_DRAFT_TOKENS
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from kernels import dispatch
from kernels.launches import launched


@dataclass(frozen=True)
class StepLaunches:
    """What one draft step launches, {kernel: times}: as the network is written, as the engine runs it without kernels, fused.

    `fused` is None where triton is not installed.
    """

    eager: Counter[str]
    engine: Counter[str]
    fused: Counter[str] | None

    def table(self) -> list[dict[str, Any]]:
        """Return a row a form: {form, launches, kernels}."""
        forms = {"eager": self.eager, "engine without kernels": self.engine, "fused": self.fused}
        return [
            {"form": form, "launches": names.total(), "kernels": dict(names)} for form, names in forms.items() if names is not None
        ]


def count(spec: DraftSpec, batch: int, context: int) -> StepLaunches:
    """Count a step of `batch` rows in a cache of `context` positions, in bfloat16. No weight takes memory, nothing is computed."""
    with torch.device("meta"):
        embed = None if spec.own_embedding else torch.empty(spec.vocab_size, spec.hidden_size)
        network = DraftModel(spec, embed).to(torch.bfloat16).eval().requires_grad_(False)
        network.rotary.reserve(context + 2 * MAX_DRAFT_TOKENS)
        attention = _attention(spec, batch, context)
        tokens = torch.zeros(batch, dtype=torch.int64)
        hidden = torch.empty(batch, spec.hidden_size, dtype=torch.bfloat16)
    eager = launched(partial(_network_step, network, tokens, hidden, attention), fused=False)
    fused = _engine_step(network, batch, context, True) if importlib.util.find_spec("triton") else None
    return StepLaunches(Counter(eager), _engine_step(network, batch, context, False), fused)


def _attention(spec: DraftSpec, batch: int, context: int) -> CachedAttention:
    store = KeyValueStore(spec.num_layers, batch, context, spec.num_kv_heads, spec.head_dim, torch.bfloat16, "meta")
    return CachedAttention(store, spec.num_heads // spec.num_kv_heads, torch.bfloat16)


def _network_step(network: DraftModel, tokens: Tensor, hidden: Tensor, attention: CachedAttention) -> Tensor:
    positions = attention.store.plan([attention.store.max_length - 1] * len(tokens), 1)
    normed, _ = network.step(tokens[:, None], hidden[:, None], positions, attention)
    return network.to_target(network.logits(normed[:, 0]).argmax(-1))


def _engine_step(network: DraftModel, batch: int, context: int, fused: bool) -> Counter[str]:
    """What a draft of two tokens launches beyond one of one token: a step and its head."""
    embed = network.embed_tokens.weight
    assert isinstance(embed, Tensor)  # noqa: S101 -- for the type checker
    with dispatch.using(backend="triton" if fused else "reference"):
        drafter = EagleDrafter(network, embed.bfloat16(), batch=batch, max_length=context)
    rows = list(range(batch))
    drafter.draft(rows, 1, None)  # what is prepared once
    one, two = (Counter(launched(partial(drafter.draft, rows, length, None), fused=fused)) for length in (1, 2))
    return two - one
