"""Overlap and soft cross-entropy of draft logits with the target's distribution, in Triton: chunked, forward and backward.

With q = softmax(logits), w = 1[q < p], for each row of V:

    forward   alpha = sum min(p, q),  entropy = -sum_{p>0} p log q
    backward  d = g_alpha (q w - q sum(q w)) + g_entropy (q sum(p) - p)

A program takes a row in chunks of BLOCK: once for the normaliser (online maximum and sum), once for the sums. It keeps the
normaliser, sum(p) and sum(q w), so that the backward pass is one sweep and no softmax is ever stored. For N rows, e bytes a
logit and f a probability: forward N V (2 e + f), backward N V (2 e + f) bytes; about 12 flops a logit each. Sums are float32.
The formulas of eagle/train/objectives.py (`dense_terms`): Leviathan et al. 2023 (overlap = 1 - total variation), LK losses
(arXiv:2602.23881). Chunked losses of this form: Liger-Kernel (arXiv:2410.10989).
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
BLOCK, NUM_WARPS = 2048, 8


@dataclass(frozen=True)
class Launch:
    """Numbers of a row that a program looks at at a time (a power of two), and its warps."""

    block: int = BLOCK
    num_warps: int = NUM_WARPS


@triton.jit
def overlap_kernel(  # type: ignore[no-untyped-def]
    logit_ptr, prob_ptr, alpha_ptr, entropy_ptr, norm_ptr, mass_ptr, gain_ptr, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row): both terms, and what the backward pass needs."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logit_ptr + row * vocab + start + index, mask=start + index < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        summed = summed * tl.exp(top - shift) + tl.exp(x - shift)
        top = higher
    highest = tl.max(top, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    norm = shift + tl.log(tl.sum(summed * tl.exp(top - shift), axis=0))
    alpha = tl.zeros([BLOCK], dtype=tl.float32)
    entropy = tl.zeros([BLOCK], dtype=tl.float32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    gain = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + index < vocab
        x = tl.load(logit_ptr + row * vocab + start + index, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(prob_ptr + row * vocab + start + index, mask=inside, other=0.0).to(tl.float32)
        log_q = x - norm
        q = tl.exp(log_q)
        smaller = tl.where((p <= q) | (p != p), p, q)  # NaN of either
        alpha += tl.where(inside, smaller, 0.0)
        entropy -= tl.where(inside & (p > 0.0), p * log_q, 0.0)  # 0 * -inf would be NaN
        mass += p
        gain += tl.where(inside & (q < p), q, 0.0)
    tl.store(alpha_ptr + row, tl.sum(alpha, axis=0))
    tl.store(entropy_ptr + row, tl.sum(entropy, axis=0))
    tl.store(norm_ptr + row, norm)
    tl.store(mass_ptr + row, tl.sum(mass, axis=0))
    tl.store(gain_ptr + row, tl.sum(gain, axis=0))


@triton.jit
def overlap_backward_kernel(  # type: ignore[no-untyped-def]
    logit_ptr, prob_ptr, norm_ptr, mass_ptr, gain_ptr, grad_alpha_ptr, grad_entropy_ptr, grad_ptr, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row, chunk): the gradient of the logits."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    x = tl.load(logit_ptr + row * vocab + index, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(prob_ptr + row * vocab + index, mask=inside, other=0.0).to(tl.float32)
    norm, mass, gain = tl.load(norm_ptr + row), tl.load(mass_ptr + row), tl.load(gain_ptr + row)
    grad_alpha, grad_entropy = tl.load(grad_alpha_ptr + row), tl.load(grad_entropy_ptr + row)
    q = tl.exp(x - norm)
    grad = grad_alpha * (tl.where(q < p, q, 0.0) - q * gain) + grad_entropy * (q * mass - p)
    tl.store(grad_ptr + row * vocab + index, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def specimens() -> list[Specimen]:
    """Return what `aot` compiles: both kernels for float32 and bfloat16 logits."""
    return [specimen for short in ("fp32", "bf16") for specimen in specimens_of(32000, short, Launch())]


def specimens_of(vocab: int, short: str, launch: Launch) -> list[Specimen]:
    """Return both kernels for `vocab` logits a row of Triton's type `short` ('bf16'), as `launch` compiles them."""
    found = []
    sums = ("alpha_ptr", "entropy_ptr", "norm_ptr", "mass_ptr", "gain_ptr", "grad_alpha_ptr", "grad_entropy_ptr", "prob_ptr")
    for kernel in (overlap_kernel, overlap_backward_kernel):
        types = {name: "*fp32" for name in sums if name in kernel.arg_names} | {"logit_ptr": f"*{short}", "vocab": "i32"}
        types |= {"grad_ptr": f"*{short}"} if "grad_ptr" in kernel.arg_names else {}
        found.append(Specimen(kernel, vocab, short, types, {"BLOCK": launch.block}, launch.num_warps, aligned=("vocab",)))
    return found


def supports(logits: Tensor, prob: Tensor) -> str | None:
    """Return None when the kernel takes these tensors, else the reason why not."""
    for name, tensor in (("logits", logits), ("prob", prob)):
        if tensor.dtype not in DTYPES:
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
    return None


def dense_terms(logits: Tensor, prob: Tensor, *, launch: Launch | None = None) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.dense_terms`, on CUDA tensors (or CPU tensors in the interpreter); both results float32.

    Differentiable once, in logits; at a tie q = p the side w = 0. Raises ValueError for what the kernel does not take.
    """
    reason = supports(logits, prob)
    if reason is None and (logits.dim() != 2 or logits.shape != prob.shape):
        reason = f"logits are {tuple(logits.shape)}, prob {tuple(prob.shape)}"
    if reason is not None:
        raise ValueError(f"dense_terms: {reason}")
    alpha, entropy = _DenseTerms.apply(logits, prob, launch or Launch())
    return alpha, entropy


class _DenseTerms(torch.autograd.Function):
    """(overlap, soft cross-entropy) [N] of logits and prob [N, V]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, prob: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
        logits, prob = logits.contiguous(), prob.contiguous()
        rows, vocab = logits.shape
        alpha, entropy, norm, mass, gain = torch.empty(5, rows, dtype=torch.float32, device=logits.device).unbind(0)
        if rows:
            launching.launch(
                overlap_kernel, (rows,), logits, prob, alpha, entropy, norm, mass, gain, vocab,
                BLOCK=launch.block, num_warps=launch.num_warps,
            )  # fmt: skip
        ctx.save_for_backward(logits, prob, norm, mass, gain)
        ctx.launch = launch
        return alpha, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_alpha: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, prob, norm, mass, gain = ctx.saved_tensors
        out, launch = torch.empty_like(logits), ctx.launch
        rows, vocab = logits.shape
        if out.numel():
            launching.launch(
                overlap_backward_kernel, (rows, triton.cdiv(vocab, launch.block)), logits, prob, norm, mass, gain,
                grad_alpha.float().contiguous(), grad_entropy.float().contiguous(), out, vocab,
                BLOCK=launch.block, num_warps=launch.num_warps,
            )  # fmt: skip
        return out, None, None
