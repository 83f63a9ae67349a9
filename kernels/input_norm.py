"""The norms in front of an EAGLE draft in one launch each: the input norm with its embedding gather, and the feature norms.

    input_norm       y = cat(norm(embed[token]) * we, norm(hidden) * wh) (and the second half apart)
    feature_norms    y = norm(feature a) * w_a for each of A tapped states side by side, the input of `fc`

A program holds one part of a row (the embedding or the hidden half; one feature) in registers: grid (rows, parts). Memory
traffic for N rows, e bytes a number, about 6 flops a number:

    input_norm       4 N H e + 2 H e + 8 N  (+ N H e for the half apart), against 10 N H e of four operations
    feature_norms    2 A N H e + A H e, against 4 A N H e of A norms and a concatenation

A matrix product with the norm inside would read each row once per tile of outputs and save one launch; `fc` reads
A H^2 weights for A N H activations, so at the few rows of a draft the norms are noise beside it: the product stays torch's.
Decoding only: training keeps `add_rms_norm`, which has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launching
from kernels.aot import Specimen

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HIDDEN = 16384


@dataclass(frozen=True)
class Launch:
    """Warps a program."""

    num_warps: int


def default_launch(hidden: int) -> Launch:
    """Return the launch used where nothing was tuned: 16 numbers a thread, 64 at the widest."""
    return Launch(min(8, max(1, triton.next_power_of_2(hidden) // 512)))


@triton.jit
def _unit(x, hidden, eps):  # type: ignore[no-untyped-def]
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden + eps))


@triton.jit
def input_norm_kernel(  # type: ignore[no-untyped-def]
    token_ptr, embed_ptr, hidden_ptr, embed_weight_ptr, hidden_weight_ptr, joined_ptr, residual_ptr,
    token_stride, vocab, hidden, eps,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, half). An embedding that does not exist is NaN: it must not look like one that does."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    out = joined_ptr + row * 2 * hidden + column
    if tl.program_id(1) == 0:
        token = tl.load(token_ptr + row * token_stride).to(tl.int64)
        known = (token >= 0) & (token < vocab)
        x = tl.load(embed_ptr + token * hidden + column, mask=inside & known, other=0.0).to(tl.float32)
        weight = tl.load(embed_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        normed = tl.where(known, _unit(x, hidden, eps) * weight, float("nan"))
        tl.store(out, normed.to(joined_ptr.dtype.element_ty), mask=inside)
    else:
        x = tl.load(hidden_ptr + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(hidden_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (_unit(x, hidden, eps) * weight).to(joined_ptr.dtype.element_ty)
        tl.store(out + hidden, rounded, mask=inside)
        if RESIDUAL:
            tl.store(residual_ptr + row * hidden + column, rounded, mask=inside)


@triton.jit
def feature_norms_kernel(x_ptr, weight_ptr, normed_ptr, hidden, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (row, feature)."""
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    offset = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + part) * hidden + column
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + part * hidden + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + offset, (_unit(x, hidden, eps) * weight).to(normed_ptr.dtype.element_ty), mask=inside)


def specimens() -> list[Specimen]:
    """Return what `aot` compiles: both kernels at a small and a large hidden size, in float32 and bfloat16."""
    sizes = [(hidden, short) for hidden in (576, 4096, 8192) for short in ("fp32", "bf16")]
    return [specimen for hidden, short in sizes for specimen in specimens_of(hidden, short, default_launch(hidden))]


def specimens_of(hidden: int, short: str, launch: Launch) -> list[Specimen]:
    """Return both kernels for rows of `hidden` numbers of Triton's type `short` ('bf16'), as `launch` compiles them."""
    floats = ("embed_ptr", "hidden_ptr", "embed_weight_ptr", "hidden_weight_ptr", "joined_ptr", "residual_ptr")
    block, warps = triton.next_power_of_2(hidden), launch.num_warps
    types = dict.fromkeys(floats, f"*{short}") | {"token_ptr": "*i64", "eps": "fp32"}
    types |= dict.fromkeys(("token_stride", "vocab", "hidden"), "i32")
    parts = dict.fromkeys(("x_ptr", "weight_ptr", "normed_ptr"), f"*{short}") | {"hidden": "i32", "eps": "fp32"}
    return [
        Specimen(input_norm_kernel, hidden, short, types, {"RESIDUAL": True, "BLOCK": block}, warps),
        Specimen(feature_norms_kernel, hidden, short, parts, {"BLOCK": block}, warps),
    ]


def supports(*tensors: Tensor) -> str | None:
    """Return None when the kernels take tensors of these dtypes and this width (the last one's), else the reason why not."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"a tensor is {str(tensor.dtype).removeprefix('torch.')}"
    hidden = tensors[-1].shape[-1]
    return None if 0 < hidden <= MAX_HIDDEN else f"hidden size {hidden} is not in 1..{MAX_HIDDEN}"


def input_norm(
    tokens: Tensor, embed: Tensor, hidden: Tensor, embed_weight: Tensor, hidden_weight: Tensor, eps: float, normed_residual: bool,
    *, launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Same contract as `reference.input_norm`, on CUDA tensors (or CPU tensors in Triton's interpreter); no gradient.

    tokens [N] may have any stride. A token outside of the vocabulary gives NaN, where the oracle raises.
    Raises ValueError for a dtype or shape that the kernel does not take.
    """
    rows, width = hidden.shape
    reason = supports(embed, hidden, embed_weight, hidden_weight)
    if reason is None and (tokens.shape != (rows,) or embed.shape[1] != width or embed_weight.shape != hidden_weight.shape):
        reason = f"tokens {tuple(tokens.shape)}, embed {tuple(embed.shape)} and hidden {tuple(hidden.shape)} do not fit"
    if reason is not None:
        raise ValueError(f"input_norm: {reason}")
    joined = torch.empty(rows, 2 * width, dtype=hidden.dtype, device=hidden.device)
    residual = torch.empty_like(joined[:, :width], memory_format=torch.contiguous_format) if normed_residual else hidden
    if rows:
        launching.launch(
            input_norm_kernel, (rows, 2), tokens, embed.contiguous(), hidden.contiguous(), embed_weight.contiguous(),
            hidden_weight.contiguous(), joined, residual, tokens.stride(0), len(embed), width, eps,
            RESIDUAL=normed_residual, BLOCK=triton.next_power_of_2(width), num_warps=(launch or default_launch(width)).num_warps,
        )  # fmt: skip
    return joined, residual


def feature_norms(features: Tensor, weights: Tensor, eps: float, *, launch: Launch | None = None) -> Tensor:
    """Same contract as `reference.feature_norms`, on CUDA tensors (or CPU tensors in Triton's interpreter); no gradient.

    Raises ValueError for a dtype or shape that the kernel does not take.
    """
    reason = supports(features, weights[..., :1], weights)
    if reason is None and features.shape[-1] != weights.numel():
        reason = f"features {tuple(features.shape)} and weights {tuple(weights.shape)} do not fit"
    if reason is not None:
        raise ValueError(f"feature_norms: {reason}")
    features = features.contiguous()
    out = torch.empty_like(features)
    parts, width = weights.shape
    if features.numel():
        launching.launch(
            feature_norms_kernel, (features.numel() // weights.numel(), parts), features, weights.contiguous(), out, width, eps,
            BLOCK=triton.next_power_of_2(width), num_warps=(launch or default_launch(width)).num_warps,
        )  # fmt: skip
    return out
