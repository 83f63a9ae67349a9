"""The fused draft step: an EAGLE draft's layers and its head as few launches, and the loop of K steps without a host wait.

A step of L layers launches 1 (embedding gather, both norms, concatenation) + L x 8 (q, k, v product; rope and cache write;
attention; output product; add + norm; gate-up product; SiLU * up; down product) + L (add + norm between layers and at the end)
+ 2 (head with the draw inside, merge) = 9 L + 3; one more a layer where attention is split. `kernels.launches` counts them.

Positions stay on the device and move by a number that the host knows, a drawn token is written where the next step reads it,
and rows whose position is outside of their table write nothing: nothing in the loop asks the device. On CPU, or with kernels
switched off, the same functions run the oracle (`dispatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch
from kernels.packed import linear


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: norms [H], qkv [(heads + 2 kv) d, H or 2H], out [H, heads d], gate_up [2I, H], down [H, I]."""

    input_norm: Tensor
    hidden_norm: Tensor | None
    post_norm: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class DraftWeights:
    """A whole draft. `hidden_norm` is the first layer's only; `ids` [Vd] are target ids or None; cos, sin float32 [L, d/2]."""

    layers: Sequence[LayerWeights]
    embed: Tensor
    norm: Tensor
    head: Tensor
    ids: Tensor | None
    cos: Tensor
    sin: Tensor
    heads: int
    head_dim: int
    eps: float
    norm_before_residual: bool
    norm_output: bool


@dataclass(frozen=True)
class DraftCache:
    """Keys and values [layers, pages, page, kv, d], and the pages of each row, int32 [n, m] (see `reference.cache_slots`)."""

    keys: Tensor
    values: Tensor
    table: Tensor

    @property
    def capacity(self) -> int:
        """Positions a row."""
        return self.table.shape[1] * self.keys.shape[2]


def takes(embed: Tensor, heads: int, kv: int, head_dim: int) -> bool:
    """Whether a draft of these heads, on the device and in the dtype of `embed`, should run as a fused step.

    Its attention must be a kernel: the oracle reads the whole cache of a row, whatever its position.
    """
    query, keys = embed.new_empty(1, heads, head_dim), embed.new_empty(1, 1, kv, head_dim)
    return dispatch.kernel_for("cached_attention", embed, lambda module: module.supports(query, keys)) is not None


def forward(
    weights: DraftWeights, cache: DraftCache, tokens: Tensor, hidden: Tensor, positions: Tensor, step: int = 0
) -> tuple[Tensor, Tensor]:
    """One draft step of one token a row: tokens int64 [n] (target ids), hidden [n, H], at positions + step (int64 [n]).

    Writes the keys and values of that position and attends to 0..position. Returns (normed [n, H] for the head,
    feedback [n, H], the hidden input of the next step). No gradient.
    """
    first, eps = weights.layers[0], weights.eps
    assert first.hidden_norm is not None  # noqa: S101 -- for the type checker
    state, residual = dispatch.input_norm(
        tokens, weights.embed, hidden, first.input_norm, first.hidden_norm, eps, weights.norm_before_residual
    )
    for index, layer in enumerate(weights.layers):
        if index:
            state, residual = dispatch.add_rms_norm(state, residual, layer.input_norm, eps)
        keys, values = cache.keys[index], cache.values[index]
        query = dispatch.rope_cache(
            linear(state, layer.qkv), weights.cos, weights.sin, positions, keys, values, cache.table, weights.heads, step
        )
        context = dispatch.cached_attention(query, keys, values, cache.table, positions, weights.head_dim**-0.5, step)
        state, residual = dispatch.add_rms_norm(linear(context.flatten(1), layer.out), residual, layer.post_norm, eps)
        state = linear(dispatch.silu_mul(linear(state, layer.gate_up)), layer.down)
    normed, total = dispatch.add_rms_norm(state, residual, weights.norm, eps)
    return normed, (normed if weights.norm_output else total)


def draft(
    weights: DraftWeights, cache: DraftCache, normed: Tensor, feedback: Tensor, positions: Tensor, length: int,
    temperature: Tensor | None = None, seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Draft `length` tokens a row. normed and feedback [n, H] are the last known position's; positions int64 [n]: the next one.

    Greedy, or with temperatures [n] (0 = greedy) and seeds int64 [n] drawn with the random numbers of positions + step. Returns
    (target ids int64 [n, length], log q float32 [n, length] or None). ValueError when `length` is below 1.
    """
    if length < 1:
        raise ValueError(f"a draft of {length} tokens; 1 at least")
    tokens = torch.empty(len(normed), length, dtype=torch.int64, device=normed.device)
    log_q = None if temperature is None else torch.empty(len(normed), length, dtype=torch.float32, device=normed.device)
    for step in range(length):
        if step:
            normed, feedback = forward(weights, cache, tokens[:, step - 1], feedback, positions, step - 1)
        _, drawn = dispatch.sample_head(
            normed, weights.head, weights.ids, temperature, seeds, positions, step, out=tokens[:, step]
        )
        if log_q is not None and drawn is not None:
            log_q[:, step] = drawn
    return tokens, log_q
