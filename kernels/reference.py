"""The oracle: what each fused operation must compute, in plain differentiable torch, one operation a line.

Every other implementation (`eager`, the Triton kernels) is tested against these for value and gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Return `x` in the dtype that norms are computed in: float32 for the 16-bit types, its own otherwise."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then RMSNorm of the sum (Zhang and Sennrich, arXiv:1910.07467; the norm of Llama).

        s = x + residual                                    rounded to the promoted dtype of the two
        y = s / sqrt(mean(s^2) + eps) * weight              in float32, rounded once to the dtype of s

    x [..., H], residual [..., H] or None (then s = x), weight [H]; returns (y, s), both [..., H] in the dtype of s.
    float64 is computed in float64. Hugging Face's LlamaRMSNorm rounds before the product with the weight, a
    difference of at most one unit in the last place in 16-bit types and none in float32.
    """
    total = x if residual is None else x + residual
    wide = widened(total)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(total.dtype), total
