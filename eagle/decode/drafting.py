"""The Eagle 3.1 drafter: an inference view of a `DraftModel` with its KV cache, drafting chains.

q, k and v are one matrix product, gate and up one, rope comes from a table, keys and values lie in a `KeyValueStore`.
It computes the same function as `DraftModel.step`.

Alignment as in vLLM (v1/spec_decode/llm_base_proposer.py): the input at position t is the embedding of token t + 1
with the target's hidden states at t, and the output there predicts token t + 2. After a verification the draft runs
again over all newly accepted positions with the target's true hidden states; this overwrites what its own steps
left there. From the second step on the hidden state is the draft's own, one position further each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from eagle.decode.cache import Branches, KeyValueStore, attend
from eagle.decode.proposal import MAX_DRAFT_TOKENS, Drafter, Draws, Proposal
from eagle.decode.sampling import distribution
from eagle.decode.verify import draw
from eagle.draft.model import DraftModel
from kernels import draft_step
from kernels.dispatch import add_rms_norm, feature_norms, takes_kernels, tuned
from kernels.draft_step import DraftCache, DraftWeights, LayerWeights
from kernels.graphs import Capture, GraphedDraft, cuda_capture
from kernels.native import LARGEST_HEAD, Native, native
from kernels.packed import linear, packed


def _fused_layers(state: dict[str, Tensor], count: int, lay_out: Callable[[Tensor], Tensor]) -> list[LayerWeights]:
    layers = []
    for i in range(count):
        name = f"layers.{i}."
        layers.append(
            LayerWeights(
                state[name + "input_layernorm.weight"],
                state[name + "hidden_norm.weight"] if i == 0 else None,
                state[name + "post_attention_layernorm.weight"],
                lay_out(torch.cat([state[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"])),
                lay_out(state[name + "self_attn.o_proj.weight"]),
                lay_out(torch.cat([state[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")])),
                lay_out(state[name + "mlp.down_proj.weight"]),
            )
        )
    return layers


def _rope_tables(draft: DraftModel, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return fp32 cos and sin [length, 1, head_dim], the first half of sin negated: rope(x) = x cos + roll(x, d/2) sin."""
    draft.rotary.reserve(length)
    cos, sin = draft.rotary.cos[:length].to(device), draft.rotary.sin[:length].to(device)
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


class EagleDrafter(Drafter):
    """The Eagle 3.1 draft with its KV cache, in the dtype and on the device of the target (as in vLLM).

    `embed` [V, H] is the target's embedding, used unless the draft has its own. `batch` rows of `max_length` tokens,
    as the engine's; a draft may write `reach` positions beyond. `compiled` runs the parts between attentions through
    torch.compile (the first calls take tens of seconds); else, with `direct`, on CPU by direct calls (`kernels.native`), for as
    many tokens as `dispatch.using(tuned=...)` says now. `capture`: how the fused loop becomes a graph, None = never; "auto": as a
    CUDA graph where the device is CUDA.
    """

    def __init__(
        self,
        draft: DraftModel,
        embed: Tensor,
        *,
        batch: int,
        max_length: int,
        compiled: bool = False,
        direct: bool = True,
        reach: int = MAX_DRAFT_TOKENS + 1,
        capture: Capture | Literal["auto"] | None = "auto",
    ) -> None:
        max_length += reach
        spec = self.spec = draft.spec
        self.aux_layers = spec.aux_layers
        dtype, device = embed.dtype, embed.device
        state = {
            name: tensor.detach().to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in draft.state_dict().items()
        }
        self._fusable = not compiled and draft_step.takes(embed, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        plain = compiled or self._fusable  # inductor and Triton want plain weights
        lay_out: Callable[[Tensor], Tensor] = (lambda weight: weight) if plain else packed
        self._layers = _fused_layers(state, spec.num_layers, lay_out)
        self._fc, self._norm, self._head = lay_out(state["fc.weight"]), state["norm.weight"], lay_out(state["lm_head.weight"])
        norms = [state[f"fc_norm.{i}.weight"] for i in range(len(spec.aux_layers))] if spec.fc_norm else []
        self._fc_norms = torch.stack(norms) if norms else None
        self._embed = state["embed_tokens.weight"] if spec.own_embedding else embed.detach()
        offsets = state.get("d2t")
        self.ids = None if offsets is None else offsets + torch.arange(len(offsets), device=device)
        self._cos, self._sin = _rope_tables(draft, max_length, device)
        self.store = KeyValueStore(spec.num_layers, batch, max_length, spec.num_kv_heads, spec.head_dim, dtype, device)
        self._bytes = sum(t.numel() * t.element_size() for t in state.values() if t.is_floating_point())
        # Of each row: what the last known position gives to the first draft token, and the position after it.
        self._normed = torch.zeros(batch, spec.hidden_size, dtype=dtype, device=device)
        self._feedback = torch.zeros_like(self._normed)
        self._next = [0] * batch
        self._tuned = tuned()
        self._capture = cuda_capture(device) if capture == "auto" else capture
        self._native: Native | None = native(dtype, device) if direct and not compiled and spec.head_dim <= LARGEST_HEAD else None
        self._before: Callable[..., Tensor] = self._attention_input
        self._after: Callable[..., tuple[Tensor, Tensor]] = self._attention_output
        if compiled:
            self._before = torch.compile(self._attention_input, dynamic=True)
            self._after = torch.compile(self._attention_output, dynamic=True)

    @classmethod
    def beside(cls, target: PreTrainedModel, draft: DraftModel, **options: Any) -> Self:
        """Return the drafter of `draft` that shares `target`'s embedding; `options` as for the class."""
        embed = target.get_input_embeddings().weight
        assert isinstance(embed, Tensor)  # noqa: S101 -- for the type checker
        return cls(draft, embed, **options)

    @property
    def weight_bytes(self) -> int:
        """See `Drafter.weight_bytes`; the shared embedding is the target's."""
        return self._bytes

    @property
    def state_bytes(self) -> int:
        """See `Drafter.state_bytes`: the KV cache."""
        return self.store.bytes

    def fuse(self, aux: Tensor) -> Tensor:
        """Return the hidden state [n, T, H] of the target's tapped states [n, T, A*Ht]: one norm per state, then fc."""
        eps = self.spec.rms_norm_eps
        if self._fc_norms is not None and takes_kernels(aux):
            aux = feature_norms(aux, self._fc_norms, eps)
        elif self._fc_norms is not None and self._native and aux.shape[0] * aux.shape[1] <= self._tuned.direct_tokens:
            aux = self._side_by_side(aux.chunk(len(self._fc_norms), dim=-1), list(self._fc_norms))
        elif self._fc_norms is not None:
            parts = aux.chunk(len(self._fc_norms), dim=-1)
            aux = torch.cat([add_rms_norm(x, None, w, eps)[0] for x, w in zip(parts, self._fc_norms, strict=True)], dim=-1)
        return linear(aux, self._fc)

    def forward(
        self, rows: list[int], tokens: Tensor, hidden: Tensor, starts: list[int], branches: Branches | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass over tokens [n, T] and hidden states [n, T, H] of batch slots `rows` from positions `starts` on.

        Returns (normed, feedback), both [n, T, H], as `DraftModel.step` does.
        """
        spec, eps = self.spec, self.spec.rms_norm_eps
        positions = self.store.plan(starts, tokens.shape[1], rows, branches)
        if self._native and branches is None and positions.numel() <= self._tuned.direct_tokens:
            return self._direct(self._native, tokens, hidden, positions.contiguous())
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

    def _side_by_side(self, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Return the norms of `parts` [n, T, H] in one tensor [n, T, len(parts) * H]."""
        assert self._native is not None  # noqa: S101 -- for the type checker
        size = parts[0].shape[-1]
        out = parts[0].new_empty(*parts[0].shape[:2], size * len(parts))
        for part, weight, place in zip(parts, weights, out.split(size, dim=-1), strict=True):
            self._native.add_rms_norm(part, None, weight, self.spec.rms_norm_eps, place)
        return out

    def _direct(self, ops: Native, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` of a planned pass over few tokens: all but the matrix products by direct calls."""
        spec, eps, store, kv = self.spec, self.spec.rms_norm_eps, self.store, self.spec.num_kv_heads
        n, width = tokens.shape
        at, small = store.planned, tokens.numel() <= self._tuned.direct_attention
        mask = None if small else store.mask(spec.num_heads // kv, hidden.dtype)
        first, hidden = self._layers[0], hidden.contiguous()
        assert first.hidden_norm is not None  # noqa: S101 -- for the type checker
        state = self._side_by_side([F.embedding(tokens, self._embed), hidden], [first.input_norm, first.hidden_norm])
        residual = state[..., spec.hidden_size :].contiguous() if spec.norm_before_residual else hidden
        for number, layer in enumerate(self._layers):
            if number:
                state, residual = ops.add_rms_norm(state, residual, layer.input_norm, eps)
            joined = linear(state, layer.qkv).view(n, width, -1, spec.head_dim)
            keys, values = store.lines(number)
            ops.rope_write(
                joined, self._cos, self._sin, positions, keys, values, at.index, kv, at.first, at.start, store.max_length
            )
            if small:
                context = ops.attend(joined, keys, values, positions, at.rows, kv, at.first, store.max_length)
            else:
                context = attend(joined[:, :, : spec.num_heads].transpose(1, 2), *store.view(number), mask)
            state, residual = ops.add_rms_norm(linear(context.flatten(2), layer.out), residual, layer.post_norm, eps)
            state = linear(ops.silu_mul(linear(state, layer.gate_up)), layer.down)
        normed, residual = ops.add_rms_norm(state, residual, self._norm, eps)
        return normed, (normed if spec.norm_output else residual)

    def _best(self, logits: Tensor) -> Tensor:
        """Return the index of the largest logit of each row [n, V]."""
        return self._native.argmax(logits) if self._native and len(logits) <= self._tuned.direct_tokens else logits.argmax(dim=-1)

    def _attention_input(self, state: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
        """Return q, k (rotated) and v side by side: [n, T, heads + 2 * kv_heads, d]."""
        spec = self.spec
        joined = linear(state, weight).view(*state.shape[:2], -1, spec.head_dim)
        turned = joined[:, :, : -spec.num_kv_heads]
        turned.copy_(turned * cos + turned.roll(spec.head_dim // 2, -1) * sin)
        return joined

    def _attention_output(
        self, context: Tensor, residual: Tensor, out: Tensor, post_norm: Tensor, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        state, residual = add_rms_norm(linear(context.flatten(2), out), residual, post_norm, self.spec.rms_norm_eps)
        gate, up = linear(state, gate_up).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, down), residual

    def extend(self, rows: list[int], tokens: Tensor, aux: Tensor | None, starts: list[int], counts: list[int]) -> None:
        """See `Drafter.extend`."""
        assert aux is not None  # noqa: S101 -- for the type checker
        normed, feedback = self.forward(rows, tokens, self.fuse(aux), starts)
        at = torch.arange(len(rows), device=tokens.device), torch.tensor(counts, device=tokens.device) - 1
        self._normed[rows], self._feedback[rows] = normed[at], feedback[at]
        for row, start, count in zip(rows, starts, counts, strict=True):
            self._next[row] = start + count

    def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
        """See `Drafter.draft`. Greedy when `draws` is None: the arg max needs no probabilities."""
        normed, feedback = self._normed[rows], self._feedback[rows]
        fused = self._fusable and takes_kernels(normed)
        cache, positions = self._places(rows, length) if fused else (None, None)
        if cache is not None and positions is not None and draws is None:
            return Proposal(self._graphs.draft(cache, normed, feedback, positions, length))
        drafted: list[Tensor] = []
        chosen: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(length):
            if step and cache is not None and positions is not None:
                normed, feedback = draft_step.forward(self._weights, cache, drafted[-1], feedback, positions, step - 1)
            elif step:
                starts = [self._next[row] + step - 1 for row in rows]
                hidden, further = self.forward(rows, drafted[-1][:, None], feedback[:, None], starts)
                normed, feedback = hidden[:, 0], further[:, 0]
            logits = linear(normed, self._head)
            if draws is None:
                index = self._best(logits)
            else:
                q = distribution(logits, draws.warp)
                index = draw(q, draws.uniforms[:, step])
                distributions.append(q)
                chosen.append(q.gather(1, index[:, None])[:, 0])
            drafted.append(index if self.ids is None else self.ids[index])
        stacked = torch.stack(drafted, dim=1)
        if draws is None:
            return Proposal(stacked)
        return Proposal(stacked, chosen=torch.stack(chosen, dim=1), probabilities=torch.stack(distributions, dim=1), ids=self.ids)

    @cached_property
    def _weights(self) -> DraftWeights:
        """The weights in the form of the fused step, whose rope tables hold half a head."""
        spec, half = self.spec, self.spec.head_dim // 2
        return DraftWeights(
            layers=self._layers, embed=self._embed, norm=self._norm, head=self._head, ids=self.ids,
            cos=self._cos[:, 0, :half].contiguous(), sin=self._sin[:, 0, half:].contiguous(), heads=spec.num_heads,
            head_dim=spec.head_dim, eps=spec.rms_norm_eps, norm_before_residual=spec.norm_before_residual,
            norm_output=spec.norm_output,
        )  # fmt: skip

    @cached_property
    def _graphs(self) -> GraphedDraft:
        """The fused greedy loop, captured once for each number of rows and K where that can be done."""
        return GraphedDraft(self._weights, self.store.batch, self._capture)

    def _places(self, rows: list[int], length: int) -> tuple[DraftCache, Tensor]:
        """Return the store as a cache of a page a row for slots `rows`, and the position [n] that each writes first."""
        furthest = max(self._next[row] for row in rows) + length - 1
        if furthest > self.store.max_length:
            raise ValueError(f"a draft up to position {furthest} does not fit rows of {self.store.max_length}")
        device = self._normed.device
        table = torch.tensor(rows, dtype=torch.int32, device=device)[:, None]
        return DraftCache(*self.store.memory, table), torch.tensor([self._next[row] for row in rows], device=device)

    def move(self, source: int, destination: int) -> None:
        """See `Drafter.move`."""
        self.store.move(source, destination, self._next[source])
        self._normed[destination], self._feedback[destination] = self._normed[source], self._feedback[source]
        self._next[destination] = self._next[source]
