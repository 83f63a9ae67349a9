"""Rotary embedding of q and k and the write of k and v into a paged or contiguous KV cache, in one Triton kernel.

For one token a row, n rows, h query and g key heads of d numbers of e bytes, after the joined q, k, v product:

    rope(x) = cat(a cos - b sin, b cos + a sin),   (a, b) = halves of x

Memory traffic 2 n (h + 2 g) d e + 4 n d (cos and sin, float32), 3 flops a rotated number; unfused (four operations a
rotation, two copies into the cache) it is about 10 n (h + g) d e + 4 n g d e. A grid of (rows, groups of HEADS heads).

Rotation and cache write inside the projection would save this one launch and 2 n (h + 2 g) d e bytes. The projection reads
(h + 2 g) d H e bytes of weights: at hidden size 4096 and 32 rows the saving is 1.6 % of them, at the price of a
matrix product of our own whose tiles hold whole heads. It does not pay; the product stays torch's.
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
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Launch:
    """Heads of a program (a power of two) and its warps."""

    heads: int = 4
    num_warps: int = 2


@triton.jit
def rope_cache_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, position_ptr, table_ptr, q_ptr, key_ptr, value_ptr,
    step, table_stride, pages, page, heads, kv, width,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (row, group of heads): heads are q, then k, then v, as in the joined product; HALF >= width / 2."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = width // 2
    column = tl.arange(0, HALF)
    position = tl.load(position_ptr + row) + step
    known = (position >= 0) & (position < pages * page)
    block = tl.load(table_ptr + row * table_stride + position // page, mask=known, other=0).to(tl.int64)
    slot = block * page + position % page
    inside = (head < heads + 2 * kv)[:, None] & (column < half)[None, :]
    at = qkv_ptr + (row * (heads + 2 * kv) + head[:, None]) * width + column[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    angle = position * half + column
    cos = tl.load(cos_ptr + angle, mask=known & (column < half), other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=known & (column < half), other=0.0)[None, :]
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    is_q, is_v = (head < heads)[:, None], (head >= heads + kv)[:, None]
    out = q_ptr + (row * heads + head[:, None]) * width + column[None, :]
    tl.store(out, tl.where(known, turned_first, 0.0).to(q_ptr.dtype.element_ty), mask=inside & is_q)
    tl.store(out + half, tl.where(known, turned_second, 0.0).to(q_ptr.dtype.element_ty), mask=inside & is_q)
    is_k = (head >= heads)[:, None] & (head < heads + kv)[:, None]
    place = (slot * kv + head[:, None] - heads) * width + column[None, :]
    tl.store(key_ptr + place, turned_first.to(key_ptr.dtype.element_ty), mask=inside & is_k & known)
    tl.store(key_ptr + place + half, turned_second.to(key_ptr.dtype.element_ty), mask=inside & is_k & known)
    place = (slot * kv + head[:, None] - heads - kv) * width + column[None, :]
    tl.store(value_ptr + place, first.to(value_ptr.dtype.element_ty), mask=inside & is_v & known)
    tl.store(value_ptr + place + half, second.to(value_ptr.dtype.element_ty), mask=inside & is_v & known)


def specimens() -> list[Specimen]:
    """Return what `aot` compiles: head sizes 64, 80 and 128, in float32 and bfloat16."""
    return [one for width in (64, 80, 128) for short in ("fp32", "bf16") for one in specimens_of(width, short, Launch())]


def specimens_of(width: int, short: str, launch: Launch) -> list[Specimen]:
    """Return the kernel for heads of `width` numbers of Triton's type `short` ('bf16'), as `launch` compiles it."""
    types = dict.fromkeys(("qkv_ptr", "q_ptr", "key_ptr", "value_ptr"), f"*{short}")
    types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "position_ptr": "*i64", "table_ptr": "*i32"}
    types |= dict.fromkeys(("step", "table_stride", "pages", "page", "heads", "kv", "width"), "i32")
    constants = {"HEADS": launch.heads, "HALF": triton.next_power_of_2(width // 2)}
    return [Specimen(rope_cache_kernel, width, short, types, constants, launch.num_warps, aligned=("page", "width"))]


def supports(qkv: Tensor, keys: Tensor) -> str | None:
    """Return None when the kernel takes this projection and this cache, else the reason why not."""
    for name, tensor in (("qkv", qkv), ("keys", keys)):
        if tensor.dtype not in DTYPES:
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
    width = keys.shape[-1]
    return f"head size {width} is odd or over {MAX_HEAD_DIM}" if width % 2 or width > MAX_HEAD_DIM else None


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor, table: Tensor, heads: int,
    step: int = 0, *, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as `reference.rope_cache` at positions + step, on CUDA tensors (or CPU tensors in Triton's interpreter).

    The cache must be contiguous, table int32 and cos and sin must reach over the whole table. No gradient.
    Raises ValueError for a dtype or shape that the kernel does not take.
    """
    page, kv, width = keys.shape[1:]
    reason = supports(qkv, keys)
    if reason is None and qkv.shape != (len(positions), (heads + 2 * kv) * width):
        reason = f"qkv is {tuple(qkv.shape)} for {len(positions)} rows of {heads} + 2 * {kv} heads of {width}"
    if reason is None and not (keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape):
        reason = "keys and values must be contiguous and alike"
    if reason is None and (table.dtype != torch.int32 or len(table) != len(positions)):
        reason = f"table is {str(table.dtype).removeprefix('torch.')} {tuple(table.shape)}; int32 and a row a token are needed"
    if reason is None and min(len(cos), len(sin)) < table.shape[1] * page:
        reason = f"cos and sin hold {len(cos)} positions, the table {table.shape[1] * page}"
    if reason is not None:
        raise ValueError(f"rope_cache: {reason}")
    launch = launch or Launch()
    q = torch.empty(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    if len(qkv):
        launching.launch(
            rope_cache_kernel, (len(qkv), triton.cdiv(heads + 2 * kv, launch.heads)),
            qkv.contiguous(), cos.contiguous(), sin.contiguous(),
            positions.contiguous(), table, q, keys, values, step, table.stride(0), table.shape[1], page, heads, kv, width,
            HEADS=launch.heads, HALF=triton.next_power_of_2(width // 2), num_warps=launch.num_warps,
        )  # fmt: skip
    return q
