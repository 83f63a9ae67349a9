"""Chain rejection sampling of speculative decoding in one Triton kernel: one program a request, no wait for the host.

A program tests the request's K draft tokens, then reads the target's row p (and the draft's row q) where the first test
failed, or p alone where none did, twice: once for the mass of (p - q)+ and of p, once for the token at which the
cumulative mass exceeds u times that. The second pass ends at the token. With e bytes a probability the memory traffic of a
request is at most

    2 e (V + Vd) + 4 V  (the last term, the map between the vocabularies, only for a draft vocabulary of its own)

whereas the eager form writes and reads several rows of V float64. Sums are float64, as in the eager form, in another order:
the two give the same token unless u times the mass is within rounding of a cumulative sum. Leviathan et al. 2023, algorithm
1; Chen et al. 2023, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launching
from kernels.aot import Specimen

NAME = "rejection"
DTYPES = (torch.float32, torch.float64)
BLOCK, NUM_WARPS = 2048, 8  # 8 float64 weights a thread


@dataclass(frozen=True)
class Launch:
    """Numbers of a row that a program looks at at a time (a power of two), and its warps."""

    block: int = BLOCK
    num_warps: int = NUM_WARPS


@triton.jit
def _weights(p_ptr, q_ptr, place_ptr, token, index, vocab, HAS_Q: tl.constexpr, HAS_IDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """p and (p - q)+ at `index`, float64; without q the draft's mass is all at `token`."""
    inside = index < vocab
    p = tl.load(p_ptr + index, mask=inside, other=0.0).to(tl.float64)
    if HAS_Q:
        if HAS_IDS:
            place = tl.load(place_ptr + index, mask=inside, other=-1)
            q = tl.load(q_ptr + place, mask=place >= 0, other=0.0).to(tl.float64)
        else:
            q = tl.load(q_ptr + index, mask=inside, other=0.0).to(tl.float64)
        rest = tl.maximum(p - q, 0.0)
    else:
        rest = tl.where(index == token, 0.0, p)
    return p, rest


@triton.jit
def rejection_kernel(  # type: ignore[no-untyped-def]
    draft_ptr, chosen_ptr, q_ptr, place_ptr, p_ptr, accept_ptr, token_ptr, accepted_ptr, following_ptr,
    length, width, numbers, vocab, draft_vocab,
    HAS_Q: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes accepted and following of one request; `numbers`: token uniforms a request, `place` [V]: draft index or -1."""
    row = tl.program_id(0).to(tl.int64)
    accepted = tl.zeros([], dtype=tl.int32)
    going = tl.full([], 1, dtype=tl.int32)
    for i in range(length):
        token = tl.load(draft_ptr + row * length + i)
        p_token = tl.load(p_ptr + (row * width + i) * vocab + token).to(tl.float64)
        q_token = tl.load(chosen_ptr + row * length + i).to(tl.float64)
        kept = tl.load(accept_ptr + row * length + i) < tl.minimum(p_token / q_token, 1.0)
        going = going & kept.to(tl.int32)
        accepted += going
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    following = tl.full([], -1, dtype=tl.int32)
    if accepted < width:
        at = tl.minimum(accepted, tl.maximum(length - 1, 0))
        token = tl.load(draft_ptr + row * length + at, mask=length > 0, other=-1)
        p_row, q_row = p_ptr + (row * width + accepted) * vocab, q_ptr + (row * length + at) * draft_vocab
        index = tl.arange(0, BLOCK)
        p_mass = tl.zeros([BLOCK], dtype=tl.float64)
        rest_mass = tl.zeros([BLOCK], dtype=tl.float64)
        for start in range(0, vocab, BLOCK):
            p, rest = _weights(p_row, q_row, place_ptr, token, start + index, vocab, HAS_Q, HAS_IDS)
            p_mass += p
            rest_mass += rest
        rest_total = tl.sum(rest_mass, axis=0)
        # p = q up to rounding leaves no mass: then p itself, as after full acceptance.
        use_p = (accepted == length) | (rest_total <= 0.0)
        aim = tl.load(token_ptr + row * numbers + accepted) * tl.where(use_p, tl.sum(p_mass, axis=0), rest_total)
        running = tl.zeros([], dtype=tl.float64)
        last = tl.full([], -1, dtype=tl.int32)
        start = tl.zeros([], dtype=tl.int32)
        while (start < vocab) & (following < 0):
            p, rest = _weights(p_row, q_row, place_ptr, token, start + index, vocab, HAS_Q, HAS_IDS)
            weight = tl.where(use_p, p, rest)
            mass = tl.sum(weight, axis=0)
            if running + mass > aim:
                # A scan rounds in an order of its own, and may step where the weight is 0.
                hit = (running + tl.cumsum(weight, axis=0) > aim) & (weight > 0.0)
                first = tl.min(tl.where(hit, start + index, vocab), axis=0)
                following = tl.where(first < vocab, first, -1)
            last = tl.maximum(last, tl.max(tl.where(weight > 0.0, start + index, -1), axis=0))
            running += mass
            start += BLOCK
        following = tl.where(following < 0, last, following)
    tl.store(following_ptr + row, following.to(tl.int64))


def specimens() -> list[Specimen]:
    """Return what `aot` compiles: with the target's vocabulary, with one of the draft's own, and for deterministic drafts."""
    cases = ((49152, True, True), (128256, True, False), (151936, False, False))
    return [specimen for vocab, has_q, has_ids in cases for specimen in specimens_of(vocab, Launch(), has_q, has_ids)]


def specimens_of(vocab: int, launch: Launch, has_q: bool = True, has_ids: bool = True) -> list[Specimen]:
    """Return the kernel for float32 rows of `vocab` probabilities, as `launch` compiles it."""
    types = {"draft_ptr": "*i64", "place_ptr": "*i32", "accept_ptr": "*fp64", "token_ptr": "*fp64"}
    types |= {"accepted_ptr": "*i64", "following_ptr": "*i64"} | dict.fromkeys(("chosen_ptr", "q_ptr", "p_ptr"), "*fp32")
    types |= dict.fromkeys(("length", "width", "numbers", "vocab", "draft_vocab"), "i32")
    constants = {"HAS_Q": has_q, "HAS_IDS": has_ids, "BLOCK": launch.block}
    return [Specimen(rejection_kernel, vocab, "fp32", types, constants, launch.num_warps)]


def supports(draft: Tensor, q_chosen: Tensor, q: Tensor | None, p: Tensor) -> str | None:
    """Return None when the kernel takes these tensors, else the reason why not."""
    for name, tensor in (("q_chosen", q_chosen), ("q", q), ("p", p)):
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
    if draft.dtype != torch.int64:
        return f"draft is {str(draft.dtype).removeprefix('torch.')}"
    return None


def rejection(
    draft: Tensor, q_chosen: Tensor, q: Tensor | None, p: Tensor, ids: Tensor | None, accept_uniform: Tensor, token_uniform: Tensor,
    *, launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Same contract as `eager.rejection`, on CUDA tensors (or CPU tensors in Triton's interpreter).

    Raises ValueError for a dtype or shape that the kernel does not take.
    """
    (count, length), (width, vocab) = draft.shape, p.shape[1:]
    reason = supports(draft, q_chosen, q, p)
    if reason is None and width not in (length, length + 1):
        reason = f"p has {width} rows for {length} draft tokens"
    if reason is None and token_uniform.shape[1] < width:
        reason = f"token_uniform has {token_uniform.shape[1]} numbers for {width} rows of p"
    if reason is None and q is not None and q.shape[2] != (vocab if ids is None else len(ids)):
        reason = f"q has {q.shape[2]} tokens, the draft's vocabulary {vocab if ids is None else len(ids)}"
    if reason is not None:
        raise ValueError(f"{NAME}: {reason}")
    accepted, following = torch.empty(2, count, dtype=torch.int64, device=p.device).unbind(0)
    if not count:
        return accepted, following
    if not length:
        q = None  # an empty tensor, which the kernel must not read
    p, launch = p.contiguous(), launch or Launch()
    place = draft
    if q is not None and ids is not None:
        place = torch.full((vocab,), -1, dtype=torch.int32, device=p.device)
        place.index_copy_(0, ids, torch.arange(len(ids), dtype=torch.int32, device=p.device))
    launching.launch(
        rejection_kernel, (count,),
        draft.contiguous(), q_chosen.contiguous(), p if q is None else q.contiguous(), place, p,
        accept_uniform.double().contiguous(), token_uniform.double().contiguous(), accepted, following,
        length, width, token_uniform.shape[1], vocab, 0 if q is None else q.shape[2],
        HAS_Q=q is not None, HAS_IDS=q is not None and ids is not None, BLOCK=launch.block, num_warps=launch.num_warps,
    )  # fmt: skip
    return accepted, following
