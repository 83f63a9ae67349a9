"""Gated activation silu(gate) * up in one Triton kernel, forward and backward, on the joined output of the gate-up product.

With s = sigmoid(g):   y = g s u;   d_g = dy u s (1 + g (1 - s)),   d_u = dy g s

For N rows of I outputs, e bytes a number: forward 3 N I e bytes and about 8 flops an output (silu and the product apart:
5 N I e), backward 5 N I e. All arithmetic is float32. The same operation: Liger-Kernel (swiglu), vLLM (silu_and_mul).
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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Launch:
    """Outputs of a program (a power of two) and its warps: 8 outputs a thread are 16-byte loads of 16-bit numbers."""

    block: int = 1024
    num_warps: int = 4


@triton.jit
def silu_mul_kernel(joined_ptr, out_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (row, block of outputs)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    row = tl.program_id(0).to(tl.int64)
    at = joined_ptr + row * 2 * size + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    out = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_backward_kernel(joined_ptr, grad_ptr, grad_joined_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (row, block of outputs)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    row = tl.program_id(0).to(tl.int64)
    offset = row * 2 * size + column
    gate = tl.load(joined_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined_ptr + offset + size, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(grad_joined_ptr + offset, grad_gate.to(grad_joined_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_joined_ptr + offset + size, (grad * gate * share).to(grad_joined_ptr.dtype.element_ty), mask=inside)


def specimens() -> list[Specimen]:
    """Return what `aot` compiles: both kernels in float32 and bfloat16."""
    return [specimen for short in ("fp32", "bf16") for specimen in specimens_of(14336, short, Launch())]


def specimens_of(size: int, short: str, launch: Launch) -> list[Specimen]:
    """Return both kernels for `size` outputs a row of Triton's type `short` ('bf16'), as `launch` compiles them."""
    found = []
    for kernel in (silu_mul_kernel, silu_mul_backward_kernel):
        names = ("joined_ptr", "out_ptr", "grad_ptr", "grad_joined_ptr")
        types = {name: f"*{short}" for name in names if name in kernel.arg_names} | {"size": "i32"}
        found.append(Specimen(kernel, size, short, types, {"BLOCK": launch.block}, launch.num_warps, aligned=("size",)))
    return found


def supports(gate_up: Tensor) -> str | None:
    """Return None when the kernel takes this tensor, else the reason why not."""
    if gate_up.dtype not in DTYPES:
        return f"gate_up is {str(gate_up.dtype).removeprefix('torch.')}"
    return f"an odd width of {gate_up.shape[-1]}" if gate_up.shape[-1] % 2 else None


def silu_mul(gate_up: Tensor, *, launch: Launch | None = None) -> Tensor:
    """Same contract as `reference.silu_mul`, on CUDA tensors (or CPU tensors in Triton's interpreter).

    Differentiable once. Raises ValueError for a dtype or shape that the kernel does not take.
    """
    reason = supports(gate_up)
    if reason is not None:
        raise ValueError(f"silu_mul: {reason}")
    out: Tensor = _SiluMul.apply(gate_up, launch or Launch())
    return out


class _SiluMul(torch.autograd.Function):
    """y [..., I] of gate_up [..., 2I]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, launch: Launch) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.launch = launch
        size = gate_up.shape[-1] // 2
        out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
        if out.numel():
            grid = (out.numel() // size, triton.cdiv(size, launch.block))
            launching.launch(silu_mul_kernel, grid, gate_up, out, size, BLOCK=launch.block, num_warps=launch.num_warps)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        out, launch = torch.empty_like(gate_up), ctx.launch
        size = gate_up.shape[-1] // 2
        if out.numel():
            grid = (out.numel() // gate_up.shape[-1], triton.cdiv(size, launch.block))
            launching.launch(
                silu_mul_backward_kernel, grid, gate_up, grad.contiguous(), out, size,
                BLOCK=launch.block, num_warps=launch.num_warps,
            )  # fmt: skip
        return out, None
