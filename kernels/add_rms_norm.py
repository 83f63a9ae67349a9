"""Residual add + RMSNorm in one Triton kernel, forward and backward.

With x, residual of N rows of H numbers and r = 1 / sqrt(mean(s^2) + eps) a row:

    forward   s = x + residual (rounded to its dtype),  y = s * r * w
    backward  d_s = r * dy * w - s * r^3 / H * sum(dy * w * s) + d_total,   d_w = sum over rows of dy * s * r

All arithmetic is float32 whatever the storage dtype (the interpreter has no correct bfloat16 arithmetic, and the oracle
asks for it). A row lives in registers, so each number is read and written once. With e bytes a number the memory traffic is

    forward   4 N H e + H e + 4 N          (2 N H e + H e + 4 N without a residual)
    backward  4 N H e + H e + 4 N + 4 P H  (3 N H e without d_total; P programs keep a partial d_w each)

against 10 N H e and 16 N H e of the unfused operations. Fused add + norm kernels of this shape: Liger-Kernel
(fused_add_rms_norm), FlashInfer (fused_add_rmsnorm), vLLM (csrc/layernorm_kernels.cu).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import launching
from kernels.aot import Specimen

NAME = "add_rms_norm"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HIDDEN = 8192  # a wider row spills in the backward on sm_90, whatever the number of warps (`aot` shows it)


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: rows a program holds at a time (a power of two) and warps a program."""

    rows: int
    num_warps: int


def default_launch(hidden: int) -> Launch:
    """Return the launch used where nothing was tuned: one row a program, 2 to 8 warps, 16 numbers a thread (32 at most).

    With more, the backward spills on sm_90 (it keeps the row, its gradient and its part of d_w); `aot` shows it.
    """
    block = triton.next_power_of_2(hidden)
    return Launch(rows=1, num_warps=min(8, max(2, block // 512)))


def candidates(hidden: int) -> list[Launch]:
    """Return the launches worth timing for rows of `hidden` numbers: 4 to 32 numbers a thread, the default first."""
    block = triton.next_power_of_2(hidden)
    found = [default_launch(hidden)]
    for rows in (1, 2, 4):
        for warps in (1, 2, 4, 8, 16):
            if 4 <= rows * block / (32 * warps) <= 32 and Launch(rows, warps) not in found:
                found.append(Launch(rows, warps))
    return found


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, scale_ptr, rows, hidden, eps,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tile of ROWS rows: reads x (and residual), writes normed (and total) and 1/rms a row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    offset = row[:, None].to(tl.int64) * hidden + column[None, :]
    mask = (row < rows)[:, None] & (column < hidden)[None, :]
    total = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        stored = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offset, stored, mask=mask)
        total = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=1) / hidden + eps)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    normed = total * scale[:, None] * weight[None, :]
    tl.store(normed_ptr + offset, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    total_ptr, scale_ptr, weight_ptr, grad_normed_ptr, grad_total_ptr, grad_sum_ptr, grad_weight_ptr, rows, hidden,
    HAS_TOTAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p walks tiles p, p + P, ...; writes d_s, and its own part of d_w to row p of grad_weight [P, H] (float32)."""
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        offset = row[:, None].to(tl.int64) * hidden + column[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        total = tl.load(total_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_normed_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
        unit = total * scale[:, None]
        grad_weight += tl.sum(grad * unit, axis=0)
        weighted = grad * weight[None, :]
        inner = tl.sum(weighted * unit, axis=1) / hidden
        grad_sum = (weighted - unit * inner[:, None]) * scale[:, None]
        if HAS_TOTAL:
            grad_sum += tl.load(grad_total_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_sum_ptr + offset, grad_sum.to(grad_sum_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_weight_ptr + tl.program_id(0) * hidden + column, grad_weight, mask=inside)


def specimens() -> list[Specimen]:
    """Return what `aot` compiles: both kernels at a small and a large hidden size, in float32 and bfloat16."""
    sizes = [(hidden, short) for hidden in (576, 4096, 8192) for short in ("fp32", "bf16")]
    return [specimen for hidden, short in sizes for specimen in specimens_of(hidden, short, default_launch(hidden))]


def specimens_of(hidden: int, short: str, launch: Launch) -> list[Specimen]:
    """Return both kernels for rows of `hidden` numbers of Triton's type `short` ('bf16'), as `launch` compiles them."""
    forward = ("x_ptr", "residual_ptr", "weight_ptr", "normed_ptr", "total_ptr")
    backward = ("total_ptr", "weight_ptr", "grad_normed_ptr", "grad_total_ptr", "grad_sum_ptr")
    constants, sizes = {"ROWS": launch.rows, "BLOCK": triton.next_power_of_2(hidden)}, {"rows": "i32", "hidden": "i32"}
    types = dict.fromkeys(forward, f"*{short}") | {"scale_ptr": "*fp32", "eps": "fp32"} | sizes
    grads = dict.fromkeys(backward, f"*{short}") | {"scale_ptr": "*fp32", "grad_weight_ptr": "*fp32"} | sizes
    return [
        Specimen(forward_kernel, hidden, short, types, constants | {"HAS_RESIDUAL": True}, launch.num_warps),
        Specimen(backward_kernel, hidden, short, grads, constants | {"HAS_TOTAL": True}, launch.num_warps),
    ]


def supports(x: Tensor, residual: Tensor | None, weight: Tensor) -> str | None:
    """Return None when the kernel takes these tensors, else the reason why not."""
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
    if not 0 < x.shape[-1] <= MAX_HIDDEN:
        return f"hidden size {x.shape[-1]} is not in 1..{MAX_HIDDEN}"
    return None


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.add_rms_norm`, on CUDA tensors (or CPU tensors in Triton's interpreter).

    `launch` overrides the default launch (forward and backward). Not differentiable twice.
    Raises ValueError for a dtype or shape that the kernel does not take.
    """
    reason = supports(x, residual, weight)
    if reason is None and residual is not None and residual.shape != x.shape:
        reason = f"residual is {tuple(residual.shape)}, x is {tuple(x.shape)}"
    if reason is None and weight.shape != x.shape[-1:]:
        reason = f"weight is {tuple(weight.shape)}, x is {tuple(x.shape)}"
    if reason is not None:
        raise ValueError(f"{NAME}: {reason}")
    launch = launch or default_launch(x.shape[-1])
    if residual is None:
        return _RMSNorm.apply(x, weight, eps, launch), x
    return _AddRMSNorm.apply(x, residual, weight, eps, launch)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, launch: Launch
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed, total, scale [N] float32); without a residual, total is x itself (made contiguous)."""
    hidden = x.shape[-1]
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    total = x if residual is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    normed = torch.empty_like(total)
    rows = x.numel() // hidden
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        launching.launch(
            forward_kernel, (triton.cdiv(rows, launch.rows),),
            x, x if residual is None else residual, weight.contiguous(), normed, total, scale, rows, hidden, eps,
            HAS_RESIDUAL=residual is not None, ROWS=launch.rows, BLOCK=triton.next_power_of_2(hidden), num_warps=launch.num_warps,
        )  # fmt: skip
    return normed, total, scale


def _backward(
    total: Tensor, scale: Tensor, weight: Tensor, grad_normed: Tensor, grad_total: Tensor | None, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum [..., H] and of the weight [H]."""
    hidden = total.shape[-1]
    rows = total.numel() // hidden
    grad_sum = torch.empty_like(total)
    programs = min(triton.cdiv(rows, launch.rows), _programs(total.device))
    partial = torch.zeros(programs, hidden, dtype=torch.float32, device=total.device)
    if rows:
        grad_normed = grad_normed.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        launching.launch(
            backward_kernel, (programs,),
            total, scale, weight.contiguous(), grad_normed, grad_normed if grad_total is None else grad_total, grad_sum, partial,
            rows, hidden, HAS_TOTAL=grad_total is not None, ROWS=launch.rows, BLOCK=triton.next_power_of_2(hidden),
            num_warps=launch.num_warps,
        )  # fmt: skip
    return grad_sum, partial.sum(0).to(weight.dtype)


def _programs(device: torch.device) -> int:
    """Return how many backward programs walk the rows: a few a multiprocessor; 8 in the interpreter."""
    if device.type != "cuda":
        return 8
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)


class _RMSNorm(torch.autograd.Function):
    """y [..., H] of s [..., H] and weight [H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, launch: Launch) -> Tensor:
        normed, total, scale = _forward(x, None, weight, eps, launch)
        ctx.save_for_backward(total, scale, weight)
        ctx.launch = launch
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, scale, weight = ctx.saved_tensors
        grad_sum, grad_weight = _backward(total, scale, weight, grad_normed, None, ctx.launch)
        return grad_sum, grad_weight, None, None


class _AddRMSNorm(torch.autograd.Function):
    """(y, s) of x, residual [..., H] and weight [H], with s = x + residual."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, launch: Launch) -> tuple[Tensor, Tensor]:
        normed, total, scale = _forward(x, residual, weight, eps, launch)
        ctx.save_for_backward(total, scale, weight)
        ctx.launch, ctx.dtypes = launch, (x.dtype, residual.dtype)
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        total, scale, weight = ctx.saved_tensors
        if grad_normed is None:  # the normed output was not used
            grad_sum, grad_weight = grad_total, None
        else:
            grad_sum, grad_weight = _backward(total, scale, weight, grad_normed, grad_total, ctx.launch)
        if grad_sum is None:
            return None, None, None, None, None
        return grad_sum.to(ctx.dtypes[0]), grad_sum.to(ctx.dtypes[1]), grad_weight, None, None
