"""The forms in which a draft step can run, made ready to be timed: random weights, for times do not depend on their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from eagle.decode.cache import CachedAttention, KeyValueStore
from eagle.decode.drafting import EagleDrafter
from eagle.draft.model import DraftModel
from eagle.draft.spec import FLOATS, DraftSpec
from kernels import dispatch
from kernels.graphs import Capture

Form = Literal["eager torch", "torch.compile", "engine without kernels", "direct calls", "fused", "fused + graph"]
CONTEXT = 64  # positions known before the draft
Loop = Callable[[int], Any]  # a draft of so many tokens


def random_network(spec: DraftSpec, dtype: str, device: str | torch.device) -> DraftModel:
    """Return a draft of `spec` with random weights in `dtype`, without gradients."""
    with torch.device(device):
        embed = None if spec.own_embedding else 0.02 * torch.randn(spec.vocab_size, spec.hidden_size)
        return DraftModel(spec, embed).to(FLOATS[dtype]).eval().requires_grad_(False)


def embedding(network: DraftModel) -> torch.Tensor:
    """Return the embedding [V, H] of a draft, its own or the shared one."""
    weight = network.embed_tokens.weight
    assert isinstance(weight, torch.Tensor)  # noqa: S101 -- for the type checker
    return weight


@contextmanager
def draft_loop(
    form: Form, network: DraftModel, batch: int, length: int, *, kernels: dispatch.Backend = "auto",
    capture: Capture | Literal["auto"] = "auto",
) -> Iterator[Loop]:  # fmt: skip
    """Yield a function that drafts a chain of n <= `length` tokens for `batch` rows of 64 known positions, in `form`.

    `kernels` and `capture`: the dispatch and the capture of the fused forms. Runs in inference mode with the dispatch set for the
    form, both until the context ends.
    """
    fused = form.startswith("fused")
    backend: dispatch.Backend = kernels if fused else "auto" if form == "direct calls" else "reference"
    with torch.inference_mode(), dispatch.using(backend=backend):
        if form == "eager torch":
            yield _eager(network, batch, length)
            return
        embed = embedding(network)
        drafter = EagleDrafter(
            network, embed, batch=batch, max_length=CONTEXT + length, compiled=form == "torch.compile",
            direct=form == "direct calls", capture=capture if form == "fused + graph" else None,
        )  # fmt: skip
        rows, spec = list(range(batch)), network.spec
        aux = torch.randn(batch, CONTEXT, len(spec.aux_layers) * spec.target_hidden_size, device=embed.device).to(embed.dtype)
        tokens = torch.randint(spec.vocab_size, (batch, CONTEXT), device=embed.device)
        drafter.extend(rows, tokens, aux, [0] * batch, [CONTEXT] * batch)
        yield lambda count: drafter.draft(rows, count, None)


def _eager(network: DraftModel, batch: int, length: int) -> Loop:
    """The network as it is written, over a KV cache; the first token's states are random."""
    spec, weight = network.spec, embedding(network)
    room, dtype = CONTEXT + length, weight.dtype
    store = KeyValueStore(spec.num_layers, batch, room, spec.num_kv_heads, spec.head_dim, dtype, weight.device)
    attention = CachedAttention(store, spec.num_heads // spec.num_kv_heads, dtype)
    hidden = torch.randn(batch, 1, spec.hidden_size, device=weight.device).to(dtype)
    network.rotary.reserve(room)

    def loop(count: int) -> torch.Tensor:
        normed = feedback = hidden
        tokens = network.to_target(network.logits(normed[:, 0]).argmax(-1))
        for step in range(1, count):
            positions = store.plan([CONTEXT + step - 1] * batch, 1)
            normed, feedback = network.step(tokens[:, None], feedback, positions, attention)
            tokens = network.to_target(network.logits(normed[:, 0]).argmax(-1))
        return tokens

    return loop
