"""Attention of one query a row over a paged or contiguous draft cache, in Triton: grouped heads, online softmax, split rows.

    out = sum_s softmax_s(q k_s scale) v_s   over positions s = 0..position of the row

A program takes one row, one key head with the query heads that share it, and a split of the positions; keys and values are
read once: 2 (position + 1) g d e bytes a row for g key heads of d numbers of e bytes, and 4 (position + 1) h d flops for h
query heads. With more than one split, partial results (float32, 4 h d bytes a split) go through memory and a second kernel
merges them: at batch 1 a few key heads alone would leave most of a GPU idle. FlashAttention's online softmax (Dao et al.
2022, arXiv:2205.14135), split as in Flash-Decoding; paged as in vLLM (Kwon et al. 2023, arXiv:2309.06180).

Products run in float32 (IEEE) for a float32 cache and in TF32 for 16-bit ones, which TF32 holds exactly (float16's range too);
only the softmax weights are then rounded, to 11 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launching
from kernels.aot import Specimen

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM, MAX_GROUP = 128, 64
MAX_SPLITS = 16


@dataclass(frozen=True)
class Launch:
    """Positions a program looks at at a time (a power of two, 16 at least), programs a row and key head, warps a program, stages
    of loads in flight."""

    block: int
    splits: int
    num_warps: int
    num_stages: int = 3


def fitted(launch: Launch, capacity: int) -> Launch:
    """Return a launch that was tuned at a long cache for one of `capacity` positions: splits of 512 positions at least."""
    splits = launch.splits
    while splits > 1 and capacity < 512 * splits:
        splits //= 2
    return replace(launch, splits=splits)


def default_launch(programs: int, capacity: int, itemsize: int) -> Launch:
    """Return the launch for `programs` pairs of row and key head and a cache of `capacity` positions of `itemsize` bytes a number.

    More splits while they are 512 positions long at least and all programs together would not fill 132 processors.
    64 positions at a time spill in float32 at a head size of 128 (`aot` shows it).
    """
    splits = 1
    while splits < MAX_SPLITS and programs * splits < 132 and capacity >= 1024 * splits:
        splits *= 2
    return Launch(block=64 if itemsize == 2 else 32, splits=splits, num_warps=4)


@triton.jit
def cached_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, key_ptr, value_ptr, table_ptr, position_ptr, out_ptr, partial_ptr, state_ptr,
    step, table_stride, pages, page, heads, kv, width, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row, key head, split); GROUP >= heads / kv, DIM >= width. Writes out, or its partial sums, maximum and mass."""
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = heads // kv
    member, column = tl.arange(0, GROUP), tl.arange(0, DIM)
    head = key_head * group + member
    inside = (member < group)[:, None] & (column < width)[None, :]
    q = tl.load(q_ptr + (row * heads + head[:, None]) * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + row) + step
    known = (position >= 0) & (position < pages * page)
    total = tl.where(known, position + 1, 0).to(tl.int32)
    share = tl.cdiv(tl.cdiv(total, tl.num_programs(2)), BLOCK) * BLOCK
    top = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([GROUP], dtype=tl.float32)
    summed = tl.zeros([GROUP, DIM], dtype=tl.float32)
    for start in range(split * share, tl.minimum(split * share + share, total), BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = place < total
        block = tl.load(table_ptr + row * table_stride + place // page, mask=seen, other=0).to(tl.int64)
        slot = (block * page + place % page) * kv + key_head
        at = slot[:, None] * width + column[None, :]
        loaded = seen[:, None] & (column < width)[None, :]
        key = tl.load(key_ptr + at, mask=loaded, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + at, mask=loaded, other=0.0).to(tl.float32)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        weight = tl.exp(score - shift[:, None])
        fade = tl.exp(top - shift)
        mass = mass * fade + tl.sum(weight, axis=1)
        summed = summed * fade[:, None] + tl.dot(weight, value, input_precision=PRECISION)
        top = higher
    if SINGLE:
        result = tl.where(known, summed / mass[:, None], 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * heads + head[:, None]) * width + column[None, :], result, mask=inside)
    else:
        at = (row * heads + head) * tl.num_programs(2) + split
        tl.store(partial_ptr + at[:, None] * width + column[None, :], summed, mask=inside)
        tl.store(state_ptr + at * 2, top, mask=member < group)
        tl.store(state_ptr + at * 2 + 1, mass, mask=member < group)


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, state_ptr, position_ptr, out_ptr, step, capacity, heads, splits, width,
    SPLITS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (row, head): out = sum_i e^(top_i - top) sums_i / sum_i e^(top_i - top) mass_i."""
    row = tl.program_id(0).to(tl.int64)
    head = row * heads + tl.program_id(1)
    split, column = tl.arange(0, SPLITS), tl.arange(0, DIM)
    at = head * splits + split
    top = tl.load(state_ptr + at * 2, mask=split < splits, other=float("-inf"))
    mass = tl.load(state_ptr + at * 2 + 1, mask=split < splits, other=0.0)
    inside = (split < splits)[:, None] & (column < width)[None, :]
    summed = tl.load(partial_ptr + at[:, None] * width + column[None, :], mask=inside, other=0.0)
    highest = tl.max(top, axis=0)
    fade = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    result = tl.sum(summed * fade[:, None], axis=0) / tl.sum(mass * fade, axis=0)
    position = tl.load(position_ptr + row) + step
    result = tl.where((position >= 0) & (position < capacity), result, 0.0)
    tl.store(out_ptr + head * width + column, result.to(out_ptr.dtype.element_ty), mask=column < width)


def specimens() -> list[Specimen]:
    """Return what `aot` compiles: head sizes 64, 80 and 128 in float32 and bfloat16, in one piece and split."""
    found = []
    for width in (64, 80, 128):
        for short, size in (("fp32", 4), ("bf16", 2)):
            launch = default_launch(1, 4096, size)
            found += [specimens_of(width, short, replace(launch, splits=1))[0], *specimens_of(width, short, launch)]
    return found


def specimens_of(width: int, short: str, launch: Launch, group: int = 1) -> list[Specimen]:
    """Return the kernel, and the merge where it is split, for `group` query heads a key head, of type `short` ('bf16')."""
    dim = max(16, triton.next_power_of_2(width))
    types = dict.fromkeys(("q_ptr", "key_ptr", "value_ptr", "out_ptr"), f"*{short}")
    types |= {"table_ptr": "*i32", "position_ptr": "*i64", "scale": "fp32", "partial_ptr": "*fp32", "state_ptr": "*fp32"}
    types |= dict.fromkeys(("step", "table_stride", "pages", "page", "heads", "kv", "width"), "i32")
    constants = {
        "GROUP": max(16, triton.next_power_of_2(group)), "DIM": dim, "BLOCK": launch.block, "SINGLE": launch.splits == 1,
        "PRECISION": "ieee" if short == "fp32" else "tf32",
    }  # fmt: skip
    attention = Specimen(
        cached_attention_kernel, width, short, types, constants, launch.num_warps, ("page", "width"), launch.num_stages
    )
    if launch.splits == 1:
        return [attention]
    types = {"partial_ptr": "*fp32", "state_ptr": "*fp32", "position_ptr": "*i64", "out_ptr": f"*{short}"}
    types |= dict.fromkeys(("step", "capacity", "heads", "splits", "width"), "i32")
    merged = Specimen(merge_kernel, width, short, types, {"SPLITS": MAX_SPLITS, "DIM": dim}, 4, aligned=("width",))
    return [attention, merged]


def supports(q: Tensor, keys: Tensor) -> str | None:
    """Return None when the kernel takes this query [n, heads, d] and this cache, else the reason why not."""
    for name, tensor in (("q", q), ("keys", keys)):
        if tensor.dtype not in DTYPES:
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
    heads, width, kv = q.shape[1], q.shape[2], keys.shape[2]
    if width > MAX_HEAD_DIM:
        return f"head size {width} is over {MAX_HEAD_DIM}"
    return f"{heads} heads over {kv} key heads" if heads % kv or heads // kv > MAX_GROUP else None


def cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, scale: float, step: int = 0,
    *, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as `reference.cached_attention` at positions + step, on CUDA tensors (or CPU ones in the interpreter).

    The cache must be contiguous and table int32. No gradient. Raises ValueError for what the kernel does not take.
    """
    rows, heads, width = q.shape
    page, kv = keys.shape[1:3]
    reason = supports(q, keys)
    if reason is None and not (keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape):
        reason = "keys and values must be contiguous and alike"
    if reason is None and (table.dtype != torch.int32 or len(table) != rows or len(positions) != rows):
        reason = f"table is {str(table.dtype).removeprefix('torch.')} {tuple(table.shape)} for {rows} rows"
    if reason is None and keys.shape[3] != width:
        reason = f"q has heads of {width}, the cache of {keys.shape[3]}"
    if reason is not None:
        raise ValueError(f"cached_attention: {reason}")
    q, positions = q.contiguous(), positions.contiguous()
    out = torch.empty_like(q)
    if not rows:
        return out
    capacity = table.shape[1] * page
    launch = launch or default_launch(rows * kv, capacity, keys.element_size())
    partial, state = out, out
    if launch.splits > 1:
        partial = torch.empty(rows, heads, launch.splits, width, dtype=torch.float32, device=q.device)
        state = torch.empty(rows, heads, launch.splits, 2, dtype=torch.float32, device=q.device)
    dim = max(16, triton.next_power_of_2(width))
    launching.launch(
        cached_attention_kernel, (rows, kv, launch.splits), q, keys, values, table, positions, out, partial, state,
        step, table.stride(0), table.shape[1], page, heads, kv, width, scale,
        GROUP=max(16, triton.next_power_of_2(heads // kv)), DIM=dim, BLOCK=launch.block, SINGLE=launch.splits == 1,
        PRECISION="ieee" if torch.float32 in (q.dtype, keys.dtype, values.dtype) else "tf32",
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if launch.splits > 1:
        launching.launch(
            merge_kernel, (rows, heads), partial, state, positions, out, step, capacity, heads, launch.splits, width,
            SPLITS=triton.next_power_of_2(launch.splits), DIM=dim, num_warps=4,
        )  # fmt: skip
    return out
