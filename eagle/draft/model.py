"""The EAGLE 3.1 draft network. Its state dict has vLLM's names and shapes, so exporting is copying.

What vLLM does at each draft step (v1/spec_decode/llm_base_proposer.py, model_executor/models/llama_eagle3.py), and so
does this module:
- Step 0, at position t: token = x[t+1] (the input ids are shifted by one, the last one is the token just sampled by
  the target), hidden = fc(fc_norm(aux[t])), rotary position t. Its logits predict x[t+2].
- Step j >= 1: token = the draft's own token of step j-1, hidden = the feedback of step j-1 (post-norm with
  `norm_output`, else the residual sum), position t+j. It attends to the step-0 keys at 0..t and the keys of steps 1..j.
- Layer 0 takes cat(input_layernorm(embedding), hidden_norm(hidden)); its residual is the un-normed hidden, or the
  normed one with `norm_before_residual`. Layers >= 1 are plain Llama layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle.draft import ops
from eagle.draft.spec import DraftSpec
from eagle.draft.vocab import to_maps
from kernels import dispatch

# attend(layer index, q [B, n, T, d], k [B, kv, T, d], v [B, kv, T, d]) -> [B, n, T, d]; q and k carry their positions
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
_FIRST_POSITIONS = 4096


class Linear(nn.Linear):
    """A bias-free linear layer that can hold a converted copy of its weight for a while (`DraftModel.half_precision`)."""

    prepared: Tensor | None = None

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def prepare(self, dtype: torch.dtype) -> None:
        """Hold the weight in `dtype`."""
        self.prepared = self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        if self.prepared is not None:
            return ops.linear(x.to(self.prepared.dtype), self.prepared)
        return F.linear(x, self.weight)


def _joined(parts: Sequence[Linear], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.weight.to(dtype) for part in parts])


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products with `weight` run: autocast's where it is on, else the weight's."""
    kind = weight.device.type
    known = torch.amp.is_autocast_available(kind)  # not for tensors of the meta device
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else weight.dtype


class RMSNorm(nn.Module):
    """RMS norm with the residual add in front (vLLM's `fused_add_rms_norm`), through the kernels' dispatch."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (normed, x + residual) [..., H]; without a residual the second is x itself."""
        return dispatch.add_rms_norm(x, residual, self.weight, self.eps)


class RotaryTable(nn.Module):
    """cos and sin [positions, d/2] in fp32, made by transformers' LlamaRotaryEmbedding once and looked up afterwards."""

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=spec.hidden_size, num_attention_heads=spec.num_heads, head_dim=spec.head_dim,
            max_position_embeddings=spec.max_position_embeddings, rope_parameters=dict(spec.rope_parameters),
        )
        self._rotary = [LlamaRotaryEmbedding(config)]  # in a list: no submodule, `to(bfloat16)` must not round its frequencies
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reserve(min(_FIRST_POSITIONS, spec.max_position_embeddings))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        """Move with the module, but stay fp32: rounding cos and sin to bf16 loses the position at long contexts."""
        device = fn(torch.empty(0, device=self.cos.device)).device
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self

    def reserve(self, length: int) -> None:
        """Make the table hold positions 0..length-1 at least."""
        if length <= len(self.cos):
            return
        length = max(length, 2 * len(self.cos))
        device = self.cos.device
        with torch.inference_mode(False):  # the table may grow while decoding and be used in training later
            cos, sin = self._rotary[0](torch.empty(1, dtype=torch.float32), torch.arange(length)[None])
            half = cos.shape[-1] // 2
            self.cos, self.sin = cos[0, :, :half].contiguous().to(device), sin[0, :, :half].contiguous().to(device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) [B, 1, T, d/2] of positions [B, T]. On CUDA call `reserve` first beyond 4096 positions."""
        if positions.device.type == "cpu" and positions.numel():
            self.reserve(int(positions.max()) + 1)
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


class Attention(nn.Module):
    """Projections of one attention layer; layer 0 reads 2H-wide input."""

    def __init__(self, spec: DraftSpec, width: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
        self.q_proj, self.k_proj, self.v_proj = (Linear(width, size) for size in self.sizes)
        self.o_proj = Linear(spec.num_heads * spec.head_dim, spec.hidden_size)
        self.prepared: Tensor | None = None

    def prepare(self, dtype: torch.dtype) -> None:
        """Hold q, k and v as one matrix in `dtype`."""
        self.prepared = _joined([self.q_proj, self.k_proj, self.v_proj], dtype)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return q, k, v [B, T, heads*d]."""
        if self.prepared is not None:
            return ops.linear(x.to(self.prepared.dtype), self.prepared).split(self.sizes, dim=-1)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Attend and project back: x [B, T, width] -> [B, T, H]."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.project(x))
        out = attend(ops.rotate(q, cos, sin), ops.rotate(k, cos, sin), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)
        self.prepared: Tensor | None = None

    def prepare(self, dtype: torch.dtype) -> None:
        """Hold gate and up as one matrix in `dtype`."""
        self.prepared = _joined([self.gate_proj, self.up_proj], dtype)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return gate and up [B, T, I]."""
        if self.prepared is not None:
            return ops.linear(x.to(self.prepared.dtype), self.prepared).chunk(2, dim=-1)
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        if self.prepared is not None and dispatch.takes_kernels(x):
            return self.down_proj(dispatch.silu_mul(ops.linear(x.to(self.prepared.dtype), self.prepared)))
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)


class DraftLayer(nn.Module):
    """One decoder layer; layer 0 also takes the token embedding."""

    def __init__(self, spec: DraftSpec, index: int) -> None:
        super().__init__()
        self.index, self.norm_before_residual = index, spec.norm_before_residual
        size, eps = spec.hidden_size, spec.rms_norm_eps
        if index == 0:
            self.hidden_norm = RMSNorm(size, eps)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(spec, 2 * size if index == 0 else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(spec)

    def forward(
        self, embedding: Tensor, hidden: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return (hidden, residual) [B, T, H], whose sum is the residual stream after this layer."""
        dtype = compute_dtype(self.self_attn.o_proj.weight)
        if self.index == 0:
            normed, residual = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else residual
            x = torch.cat((self.input_layernorm(embedding)[0].to(dtype), normed.to(dtype)), dim=-1)
        else:
            x, residual = self.input_layernorm(hidden, residual)
            x = x.to(dtype)
        x = self.self_attn(x, cos, sin, lambda q, k, v: attend(self.index, q, k, v))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x.to(dtype)), residual


class SharedEmbedding(nn.Module):
    """The target's embedding: looked up, never trained, never in the state dict."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [..., H]."""
        return F.embedding(tokens, self.weight)


class DraftModel(nn.Module):
    """The whole draft. `state_dict()` holds exactly `expected_tensors(spec)`.

    `embed` [V, H] is the target's embedding: shared, frozen, never in the state dict. It must be given when the widths
    agree and None when they differ (the draft then owns a trainable embed_tokens.weight).
    `draft_ids` [Vd] int64, ascending target ids, is the draft vocabulary; needed iff Vd < V (zero maps otherwise stay
    until a checkpoint is loaded). Raises ValueError when one of these does not fit the spec.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, spec: DraftSpec, embed: Tensor | None, draft_ids: NDArray[Any] | None = None) -> None:
        super().__init__()
        self.spec = spec
        if spec.own_embedding:
            if embed is not None:
                raise ValueError(f"the target is {spec.target_hidden_size} wide, the draft {spec.hidden_size}: embed must be None")
            self.embed_tokens: nn.Embedding | SharedEmbedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        else:
            if embed is None or tuple(embed.shape) != (spec.vocab_size, spec.hidden_size):
                got = None if embed is None else tuple(embed.shape)
                raise ValueError(f"embed must be the target's embedding {(spec.vocab_size, spec.hidden_size)}, got {got}")
            self.embed_tokens = SharedEmbedding(embed)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(spec.target_hidden_size, spec.rms_norm_eps) for _ in spec.aux_layers)
        self.fc = Linear(spec.num_aux * spec.target_hidden_size, spec.hidden_size)
        self.layers = nn.ModuleList(DraftLayer(spec, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = Linear(spec.hidden_size, spec.draft_vocab_size)
        self.rotary = RotaryTable(spec)
        if spec.reduced_vocab:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(spec.vocab_size, dtype=torch.bool))
        if draft_ids is not None:
            self.set_vocab(draft_ids)

    def set_vocab(self, draft_ids: NDArray[Any]) -> None:
        """Fix the draft vocabulary: ascending target ids [Vd]. ValueError when the number or order is wrong."""
        if len(draft_ids) != self.spec.draft_vocab_size:
            raise ValueError(f"{len(draft_ids)} draft vocabulary ids for draft_vocab_size {self.spec.draft_vocab_size}")
        d2t, t2d = to_maps(draft_ids, self.spec.vocab_size)
        if self.spec.reduced_vocab:
            self.d2t.copy_(d2t)
            self.t2d.copy_(t2d)

    def draft_ids(self) -> Tensor:
        """Return the target id of every draft id, [Vd] int64, ascending."""
        ids = torch.arange(self.spec.draft_vocab_size, device=self.lm_head.weight.device)
        return ids + self.d2t if self.spec.reduced_vocab else ids

    def to_target(self, ids: Tensor) -> Tensor:
        """Map draft ids (any shape, int64) to target ids."""
        return ids + self.d2t[ids] if self.spec.reduced_vocab else ids

    def target_to_draft(self) -> Tensor:
        """Return the draft id of every target id, [V] int64, -1 where the draft has none."""
        table = torch.full((self.spec.vocab_size,), -1, dtype=torch.int64, device=self.lm_head.weight.device)
        ids = self.draft_ids()
        table[ids] = torch.arange(len(ids), device=table.device)
        return table

    def fuse(self, aux: Tensor) -> Tensor:
        """Join tapped states aux [B, T, A*Ht] (any float dtype) into the step-0 hidden state [B, T, H].

        The result has the weights' dtype, so that under autocast the residual stream and the norms stay fp32.
        """
        dtype, held = compute_dtype(self.fc.weight), self.fc.weight.dtype
        if self.spec.fc_norm:
            chunks = aux.chunk(self.spec.num_aux, dim=-1)
            parts = [norm(chunk.to(held))[0].to(dtype) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            return self.fc(torch.cat(parts, dim=-1)).to(held)
        return self.fc(aux.to(dtype)).to(held)

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One draft step: tokens [B, T] int64 target ids, hidden [B, T, H], positions [B, T] int64.

        Returns (normed [B, T, H] for `logits`, feedback [B, T, H], the hidden input of the next step).
        """
        cos, sin = self.rotary(positions)
        embedding = self.embed_tokens(tokens)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(embedding, hidden, residual, cos, sin, attend)
        normed, total = self.norm(hidden, residual)
        return normed, normed if self.spec.norm_output else total

    def logits(self, normed: Tensor, fp32: bool = False) -> Tensor:
        """Logits over the draft vocabulary, [B, T, Vd], of normed [B, T, H]; in fp32 if asked, else in the compute dtype."""
        logits = self.lm_head(normed.to(compute_dtype(self.lm_head.weight)))
        return logits.float() if fp32 else logits

    def head(self) -> Callable[[Tensor], Tensor]:
        """Return `logits` as a function that goes on with the weights of now after `half_precision` has ended."""
        prepared = self.lm_head.prepared
        if prepared is None:
            return self.logits
        return lambda normed: ops.linear(normed.to(prepared.dtype), prepared)

    @contextmanager
    def half_precision(self, enabled: bool = True) -> Iterator[None]:
        """Run matrix products in bf16 inside the context, as autocast does, with norms and the residual stream in fp32.

        Beside autocast, which stays on for everything else, the bf16 weights are made once for all steps inside (q, k, v
        and gate, up each joined into one matrix), so a training-time test does not convert them again at every step.
        Enter it anew after every optimiser step. Gradients reach the fp32 parameters.
        """
        if not enabled:
            yield
            return
        modules = [m for m in self.modules() if isinstance(m, Attention | MLP | Linear)]
        try:
            with torch.autocast(self.lm_head.weight.device.type, dtype=torch.bfloat16):
                for module in modules:
                    module.prepare(torch.bfloat16)
                yield
        finally:
            for module in modules:
                module.prepared = None

    def num_parameters(self) -> int:
        """Number of weights in the checkpoint (the shared embedding and the vocabulary maps not counted)."""
        return sum(p.numel() for p in self.parameters())
