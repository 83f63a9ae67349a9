"""Drafting: what a drafter is to the engine, and the Eagle 3.1 drafter.

The Eagle drafter holds an inference view of a `DraftModel`: q, k and v in one matrix product, gate and up in one, rope
from a table, keys and values in a `KeyValueStore`. It computes the same function as `DraftModel.step`.

Alignment as in vLLM (v1/spec_decode/llm_base_proposer.py): the input at position t is the embedding of token t + 1
with the target's hidden states at t, and the output there predicts token t + 2. After a verification the draft runs
again over all newly accepted positions with the target's true hidden states; this overwrites what its own steps
left there. From the second step on the hidden state is the draft's own, one position further each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.decode.cache import KeyValueStore, attend
from eagle.decode.verify import draw
from eagle.draft.model import DraftModel
from kernels.dispatch import add_rms_norm


@dataclass(frozen=True)
class Sampling:
    """How a round's draft tokens are drawn: `temperature` > 0 and `uniforms` [n, K] in [0, 1), float64."""

    temperature: float
    uniforms: Tensor


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one round.

    `tokens` [n, K]: target ids (int64). For verification at temperature > 0: `chosen` [n, K], the probability each was
    drawn with, and `probabilities` [n, K, Vd] over the draft's vocabulary, whose target ids are `ids` [Vd] (None = the
    target's vocabulary). `probabilities` None means a deterministic draft.
    """

    tokens: Tensor
    chosen: Tensor | None = None
    probabilities: Tensor | None = None
    ids: Tensor | None = None


class Drafter(Protocol):
    """What the engine asks of a drafter. Rows are the engine's batch slots."""

    aux_layers: tuple[int, ...]

    def propose(
        self, tokens: Tensor, aux: Tensor, starts: list[int], counts: list[int], length: int, sampling: Sampling | None
    ) -> Proposal:
        """Take in new positions and draft `length` tokens per row.

        Row i has `counts[i]` new positions from `starts[i]` on. tokens [n, T]: the token after each position; aux
        [n, T, A*H]: the target's hidden states there; what lies beyond a row's count is to be ignored.
        """
        ...

    def move(self, source: int, destination: int, length: int) -> None:
        """Row `source` (of `length` positions) takes the place of row `destination`."""
        ...


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    hidden_norm: Tensor | None
    post_norm: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


def _fused_layers(state: dict[str, Tensor], count: int) -> list[_Layer]:
    layers = []
    for i in range(count):
        name = f"layers.{i}."
        layers.append(
            _Layer(
                state[name + "input_layernorm.weight"],
                state[name + "hidden_norm.weight"] if i == 0 else None,
                state[name + "post_attention_layernorm.weight"],
                torch.cat([state[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"]),
                state[name + "self_attn.o_proj.weight"],
                torch.cat([state[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")]),
                state[name + "mlp.down_proj.weight"],
            )
        )
    return layers


def _rope_tables(draft: DraftModel, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return fp32 cos and sin [length, 1, head_dim], the first half of sin negated: rope(x) = x cos + roll(x, d/2) sin."""
    draft.rotary.reserve(length)
    cos, sin = draft.rotary.cos[:length].to(device), draft.rotary.sin[:length].to(device)
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


class EagleDrafter:
    """The Eagle 3.1 draft with its KV cache, in the dtype and on the device of the target (as in vLLM).

    `embed` [V, H] is the target's embedding, used unless the draft has its own. `compiled` runs the parts between
    attentions through torch.compile (the first calls take tens of seconds).
    """

    def __init__(self, draft: DraftModel, embed: Tensor, *, batch: int, max_length: int, compiled: bool = False) -> None:
        spec = self.spec = draft.spec
        self.aux_layers = spec.aux_layers
        dtype, device = embed.dtype, embed.device
        state = {
            name: tensor.detach().to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in draft.state_dict().items()
        }
        self._layers = _fused_layers(state, spec.num_layers)
        self._fc, self._norm, self._head = state["fc.weight"], state["norm.weight"], state["lm_head.weight"]
        self._fc_norms = [state[f"fc_norm.{i}.weight"] for i in range(len(spec.aux_layers))] if spec.fc_norm else []
        self._embed = state["embed_tokens.weight"] if spec.own_embedding else embed.detach()
        offsets = state.get("d2t")
        self.ids = None if offsets is None else offsets + torch.arange(len(offsets), device=device)
        self._cos, self._sin = _rope_tables(draft, max_length, device)
        self.store = KeyValueStore(spec.num_layers, batch, max_length, spec.num_kv_heads, spec.head_dim, dtype, device)
        self.weight_bytes = sum(t.numel() * t.element_size() for t in state.values() if t.is_floating_point())
        self._before: Callable[..., Tensor] = self._attention_input
        self._after: Callable[..., tuple[Tensor, Tensor]] = self._attention_output
        if compiled:
            self._before = torch.compile(self._attention_input, dynamic=True)
            self._after = torch.compile(self._attention_output, dynamic=True)

    def fuse(self, aux: Tensor) -> Tensor:
        """Return the hidden state [n, T, H] of the target's tapped states [n, T, A*Ht]: one norm per state, then fc."""
        if self._fc_norms:
            parts = aux.chunk(len(self._fc_norms), dim=-1)
            normed = [add_rms_norm(x, None, w, self.spec.rms_norm_eps)[0] for x, w in zip(parts, self._fc_norms, strict=True)]
            aux = torch.cat(normed, dim=-1)
        return F.linear(aux, self._fc)

    def forward(self, tokens: Tensor, hidden: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        """One pass over tokens [n, T] and hidden states [n, T, H] from positions `starts` on.

        Returns (normed, feedback), both [n, T, H], as `DraftModel.step` does.
        """
        spec, eps = self.spec, self.spec.rms_norm_eps
        positions = self.store.plan(starts, tokens.shape[1])
        mask = self.store.mask(spec.num_heads // spec.num_kv_heads, hidden.dtype)
        cos, sin = self._cos[positions], self._sin[positions]
        first = self._layers[0]
        assert first.hidden_norm is not None  # noqa: S101 -- for the type checker
        embedded = add_rms_norm(F.embedding(tokens, self._embed), None, first.input_norm, eps)[0]
        state = add_rms_norm(hidden, None, first.hidden_norm, eps)[0]
        residual = state if spec.norm_before_residual else hidden
        state = torch.cat([embedded, state], dim=-1)
        for index, layer in enumerate(self._layers):
            if index:
                state, residual = add_rms_norm(state, residual, layer.input_norm, eps)
            rotated = self._before(state, cos, sin, layer.qkv)
            self.store.write(index, rotated[:, :, spec.num_heads : -spec.num_kv_heads], rotated[:, :, -spec.num_kv_heads :])
            context = attend(rotated[:, :, : spec.num_heads].transpose(1, 2), *self.store.view(index), mask)
            state, residual = self._after(context, residual, layer.out, layer.post_norm, layer.gate_up, layer.down)
        normed, residual = add_rms_norm(state, residual, self._norm, eps)
        return normed, (normed if spec.norm_output else residual)

    def _attention_input(self, state: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
        """Return q, k (rotated) and v side by side: [n, T, heads + 2 * kv_heads, d]."""
        spec = self.spec
        joined = F.linear(state, weight).view(*state.shape[:2], -1, spec.head_dim)
        turned = joined[:, :, : -spec.num_kv_heads]
        turned.copy_(turned * cos + turned.roll(spec.head_dim // 2, -1) * sin)
        return joined

    def _attention_output(
        self, context: Tensor, residual: Tensor, out: Tensor, post_norm: Tensor, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        state, residual = add_rms_norm(F.linear(context.flatten(2), out), residual, post_norm, self.spec.rms_norm_eps)
        gate, up = F.linear(state, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down), residual

    def propose(
        self, tokens: Tensor, aux: Tensor, starts: list[int], counts: list[int], length: int, sampling: Sampling | None
    ) -> Proposal:
        """See `Drafter.propose`. Greedy when `sampling` is None: the arg max needs no probabilities."""
        normed, feedback = self.forward(tokens, self.fuse(aux), starts)
        rows = torch.arange(len(counts), device=tokens.device)
        last = torch.tensor(counts, device=tokens.device) - 1
        normed, feedback = normed[rows, last], feedback[rows, last][:, None]
        drafted: list[Tensor] = []
        chosen: list[Tensor] = []
        distributions: list[Tensor] = []
        following = [s + c for s, c in zip(starts, counts, strict=True)]
        for step in range(length):
            if step:
                normed, feedback = self.forward(drafted[-1][:, None], feedback, [p + step - 1 for p in following])
                normed = normed[:, 0]
            logits = F.linear(normed, self._head)
            if sampling is None:
                index = logits.argmax(dim=-1)
            else:
                q = torch.softmax(logits.float() / sampling.temperature, dim=-1)
                index = draw(q, sampling.uniforms[:, step])
                distributions.append(q)
                chosen.append(q.gather(1, index[:, None])[:, 0])
            drafted.append(index if self.ids is None else self.ids[index])
        if not length:
            return Proposal(tokens[:, :0])
        stacked = torch.stack(drafted, dim=1)
        if sampling is None:
            return Proposal(stacked)
        return Proposal(stacked, torch.stack(chosen, dim=1), torch.stack(distributions, dim=1), self.ids)

    def move(self, source: int, destination: int, length: int) -> None:
        """See `Drafter.move`."""
        self.store.move(source, destination, length)
