"""Fused operations in as few torch calls and memory passes as they need: the path of CPUs.

Decoding calls these on a handful of rows, where the number of calls is the cost: `torch.nn.functional.rms_norm` does the
oracle's arithmetic in one. Training calls them on thousands of rows, where memory passes are the cost: there autograd of
the oracle keeps three tensors of the size of the input and makes about twice as many passes as the closed form below,
which keeps the sum and one number a row.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.reference import widened


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.add_rms_norm`; not differentiable twice. RuntimeError when shapes do not fit."""
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (residual is not None and residual.requires_grad)
    ):
        if residual is None:
            return _RMSNorm.apply(x, weight, eps), x
        return _AddRMSNorm.apply(x, residual, weight, eps)
    total = x if residual is None else x + residual
    if total.dtype == weight.dtype:
        return functional.rms_norm(total, weight.shape, weight, eps), total
    wide = widened(total)  # rms_norm warns about a weight of another dtype
    return functional.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(total.dtype), total


def rejection(
    draft: Tensor, q_chosen: Tensor, q: Tensor | None, p: Tensor, ids: Tensor | None, accept_uniform: Tensor, token_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Chain rejection sampling of draft [n, K] (int64, target ids); returns (accepted [n] 0..K, following [n]), int64.

    `q_chosen` [n, K]: the draft's probability of each token; `q` [n, K, Vd]: its distributions, over the tokens `ids` [Vd]
    (None = the target's vocabulary), or None for a deterministic draft (1 at the token). `p` [n, K+1, V] or [n, K, V]: the
    target's. Token i is accepted when accept_uniform [n, K] < min(1, p/q). The token after the accepted ones is drawn from
    (p - q)+ at the first rejection (p where that has no mass), or from p after all K, by inversion of the number of
    token_uniform [n, K+1] (or [n, K]) at its place; -1 where p has no row for it. Uniforms are in [0, 1); sums are float64.
    """
    length, width = draft.shape[1], p.shape[1]
    ratio = p[:, :length].gather(2, draft[:, :, None])[:, :, 0].double() / q_chosen.double()
    accepted = (accept_uniform < ratio.clamp_(max=1.0)).long().cumprod(dim=1).sum(dim=1)
    if not width:
        return accepted, torch.full_like(accepted, -1)
    rows = torch.arange(len(draft), device=draft.device)
    at = accepted.clamp(max=width - 1)
    weights = p[rows, at].double()
    if length:
        last = accepted.clamp(max=length - 1)
        if q is None:
            rest = weights.scatter(1, draft.gather(1, last[:, None]), 0.0)
        elif ids is None:
            rest = weights - q[rows, last]
        else:
            rest = weights.index_add(1, ids, q[rows, last].double(), alpha=-1)
        rest.clamp_min_(0.0)
        weights = torch.where((accepted < length)[:, None] & (rest.sum(dim=1, keepdim=True) > 0), rest, weights)
    cumulative = weights.cumsum(dim=1)
    aim = token_uniform.gather(1, at[:, None]).double() * cumulative[:, -1:]
    following = torch.searchsorted(cumulative, aim, right=True)[:, 0]  # the first whose cumulative weight exceeds it
    return accepted, following if width > length else torch.where(accepted < length, following, -1)


def _norm(total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normed tensor [..., H] in the dtype of `total`, and 1/rms [..., 1] in the wide dtype."""
    if weight.shape != total.shape[-1:]:
        raise RuntimeError(f"weight of shape {tuple(weight.shape)} for a norm over the last dimension of {tuple(total.shape)}")
    wide = widened(total)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(total.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(total.dtype), scale


def _norm_backward(
    total: Tensor, scale: Tensor, weight: Tensor, grad_normed: Tensor, grad_total: Tensor | None, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the sum [..., H] (wide dtype) and of the weight [H] (or None).

    With r = 1/rms:  d_s = r * dy * w - s * r^3 / H * sum(dy * w * s) + d_total,  d_w = sum over rows of dy * s * r.
    Both sums are matrix-vector products with the one temporary dy * s.
    """
    hidden = total.shape[-1]
    wide, grad = widened(total), widened(grad_normed)
    gain = weight.to(wide.dtype)
    product = (grad * wide).reshape(-1, hidden)
    rows = scale.reshape(-1)
    grad_weight = (rows @ product).to(weight.dtype) if need_weight else None
    inner = (product @ gain).mul_(rows.pow(3)).div_(-hidden).view_as(scale)
    grad_sum = torch.mul(grad, gain, out=product.view_as(wide)).mul_(scale).addcmul_(wide, inner)
    if grad_total is not None:
        grad_sum.add_(grad_total)
    return grad_sum, grad_weight


def _full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Keep the matrix-vector products of a backward out of an autocast region that it was called in."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


class _RMSNorm(torch.autograd.Function):
    """y [..., H] of s [..., H] and weight [H]."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _norm(total, weight, eps)
        ctx.save_for_backward(total, scale, weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        total, scale, weight = ctx.saved_tensors
        with _full_precision(total.device):
            grad_sum, grad_weight = _norm_backward(total, scale, weight, grad_normed, None, ctx.needs_input_grad[1])
        return grad_sum.to(total.dtype), grad_weight, None


class _AddRMSNorm(torch.autograd.Function):
    """(y, s) of x, residual [..., H] and weight [H], with s = x + residual."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.shape != residual.shape:
            raise RuntimeError(f"x of shape {tuple(x.shape)} and a residual of shape {tuple(residual.shape)}")
        total = x + residual
        normed, scale = _norm(total, weight, eps)
        ctx.save_for_backward(total, scale, weight)
        ctx.dtypes = x.dtype, residual.dtype
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        total, scale, weight = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        if grad_normed is None:  # the normed output was not used
            grad_sum, grad_weight = grad_total, None
        else:
            with _full_precision(total.device):
                grad_sum, grad_weight = _norm_backward(total, scale, weight, grad_normed, grad_total, ctx.needs_input_grad[2])
        if grad_sum is None:
            return None, None, None, None
        return grad_sum.to(x_dtype), grad_sum.to(residual_dtype), grad_weight, None
