"""The pruned-vocabulary head with the draw inside: logits never reach memory. Two Triton kernels.

    z = x W^T;  T = 0: argmax z;  T > 0: argmax z / T + gumbel noise (exactly a draw from softmax(z / T)),  log q of the token

The first kernel walks tiles of the vocabulary and keeps, a row, the best score, its token and logit, and (when drawing) the
running maximum and sum of the softmax; the second merges the programs' results and maps to target ids. For n rows, Vd tokens,
H numbers of e bytes: Vd H e bytes of weights (once for each 16 rows) and 2 n Vd H flops; torch's form also writes and reads
n Vd logits several times. The noise is a counter-based random number (Philox-4x32-10 of the row's seed at token and
position): the same whatever the batch, the tiles or the order. Gumbel's trick: Maddison et al. 2014; the head over a frequent
part of the vocabulary: FR-Spec, arXiv:2502.14856.

Rejection needs the whole row q only where a token was rejected; that one row is computed again from its state.
Products as in `cached_attention`: IEEE float32, or TF32 for 16-bit weights, which it holds exactly.
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
MAX_PROGRAMS = 512


@dataclass(frozen=True)
class Launch:
    """Tokens and hidden numbers of a tile, rows of a program (powers of two, 16 at least), programs over the vocabulary, warps,
    stages of loads in flight."""

    tokens: int = 64
    depth: int = 64
    rows: int = 16
    programs: int = 264  # two for each of an H200's 132 processors
    num_warps: int = 4
    num_stages: int = 3


def default_launch(rows: int, drawing: bool) -> Launch:
    """Return the launch for `rows` rows. 32 rows a program spill with 4 warps when drawing, with 8 when not (`aot` shows it)."""
    return Launch() if rows <= 16 else Launch(rows=32, num_warps=8 if drawing else 4)


@triton.jit
def _exponential(bits):  # type: ignore[no-untyped-def]
    """-log(1 - u), u = (bits + 1/2) / 2^32; a series where 1 - u would round u away."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * (0.33333333 + u * 0.25))), -tl.log(1.0 - u))


@triton.jit
def _ordered(score):  # type: ignore[no-untyped-def]
    """Integers in the order of the scores: equal zeros, NaN above all."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit
def sample_head_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, temperature_ptr, seed_ptr, position_ptr, best_ptr, token_ptr, logit_ptr, top_ptr, mass_ptr,
    step, rows, vocab, hidden,
    SAMPLE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program p of P walks tiles p, p + P, ... for ROWS rows; writes row p of best, token, logit, top and mass [P, rows]."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mine = row < rows
    best = tl.full([ROWS], -2147483648, dtype=tl.int32)
    chosen = tl.full([ROWS], 0, dtype=tl.int32)
    chosen_logit = tl.zeros([ROWS], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([ROWS], dtype=tl.float32)
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row, mask=mine, other=0.0)
        drawn = temperature > 0.0
        seed = tl.load(seed_ptr + row, mask=mine, other=0)
        position = (tl.load(position_ptr + row, mask=mine, other=0) + step).to(tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(vocab, TOKENS), tl.num_programs(0)):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        real = token < vocab
        logit = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        for start in range(0, hidden, DEPTH):
            column = start + tl.arange(0, DEPTH)
            inside = column < hidden
            at = token.to(tl.int64)[:, None] * hidden + column[None, :]
            weight = tl.load(weight_ptr + at, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
            at = row.to(tl.int64)[None, :] * hidden + column[:, None]
            x = tl.load(x_ptr + at, mask=mine[None, :] & inside[:, None], other=0.0).to(tl.float32)
            logit = tl.dot(weight, x, logit, input_precision=PRECISION)
        score = logit
        if SAMPLE:
            logit = logit / tl.where(drawn, temperature, 1.0)[None, :]
            kept = tl.where(real[:, None], logit, float("-inf"))
            higher = tl.maximum(top, tl.max(kept, axis=0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            mass = mass * tl.exp(top - shift) + tl.sum(tl.exp(kept - shift[None, :]), axis=0)
            top = higher
            place = tl.broadcast_to(token[:, None], [TOKENS, ROWS])
            counter = tl.broadcast_to(position[None, :], [TOKENS, ROWS])
            bits, _, _, _ = tl.philox(tl.broadcast_to(seed[None, :], [TOKENS, ROWS]), place, counter, place * 0, place * 0)
            score = tl.where(drawn[None, :], logit - tl.log(_exponential(bits)), logit)
        key = tl.where(real[:, None], _ordered(score), -2147483648)
        tile_best = tl.max(key, axis=0)
        tile_token = tl.min(tl.where(key == tile_best[None, :], token[:, None], 2147483647), axis=0)
        tile_logit = tl.sum(tl.where(token[:, None] == tile_token[None, :], logit, 0.0), axis=0)
        better = tile_best > best  # tiles ascend: the first of equals stays
        chosen_logit = tl.where(better, tile_logit, chosen_logit)
        chosen = tl.where(better, tile_token, chosen)
        best = tl.maximum(best, tile_best)
    at = tl.program_id(0) * rows + row
    tl.store(best_ptr + at, best, mask=mine)
    tl.store(token_ptr + at, chosen, mask=mine)
    if SAMPLE:
        tl.store(logit_ptr + at, chosen_logit, mask=mine)
        tl.store(top_ptr + at, top, mask=mine)
        tl.store(mass_ptr + at, mass, mask=mine)


@triton.jit
def choose_kernel(  # type: ignore[no-untyped-def]
    best_ptr, token_ptr, logit_ptr, top_ptr, mass_ptr, temperature_ptr, ids_ptr, out_ptr, log_q_ptr,
    rows, programs, out_stride,
    SAMPLE: tl.constexpr, HAS_IDS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Program (row): the best of all programs, the lowest token of equals."""
    row = tl.program_id(0)
    program = tl.arange(0, PROGRAMS)
    inside = program < programs
    at = program * rows + row
    best = tl.load(best_ptr + at, mask=inside, other=-2147483648)
    token = tl.load(token_ptr + at, mask=inside, other=2147483647)
    chosen = tl.min(tl.where(best == tl.max(best, axis=0), token, 2147483647), axis=0)
    target = tl.load(ids_ptr + chosen) if HAS_IDS else chosen.to(tl.int64)
    tl.store(out_ptr + row.to(tl.int64) * out_stride, target)
    if SAMPLE:
        logit = tl.load(logit_ptr + at, mask=inside, other=0.0)
        logit = tl.sum(tl.where(token == chosen, logit, 0.0), axis=0)
        top = tl.load(top_ptr + at, mask=inside, other=float("-inf"))
        mass = tl.load(mass_ptr + at, mask=inside, other=0.0)
        highest = tl.max(top, axis=0)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        log_q = logit - shift - tl.log(tl.sum(mass * tl.exp(top - shift), axis=0))
        tl.store(log_q_ptr + row, tl.where(tl.load(temperature_ptr + row) > 0.0, log_q, 0.0))


def specimens() -> list[Specimen]:
    """Return what `aot` compiles: greedy and drawing, in float32 and bfloat16, at 16 and 32 rows a program."""
    found = []
    for sample in (False, True):
        for short in ("fp32", "bf16"):
            found += [specimens_of(4096, short, default_launch(rows, sample), sample)[0] for rows in (16, 32)]
        found.append(specimens_of(4096, "fp32", Launch(), sample)[1])
    return found


def specimens_of(hidden: int, short: str, launch: Launch, sample: bool = False) -> list[Specimen]:
    """Return both kernels for rows of `hidden` numbers of Triton's type `short` ('bf16'), as `launch` compiles them."""
    partial = {"best_ptr": "*i32", "token_ptr": "*i32", "logit_ptr": "*fp32", "top_ptr": "*fp32", "mass_ptr": "*fp32"}
    types = partial | {"x_ptr": f"*{short}", "weight_ptr": f"*{short}", "temperature_ptr": "*fp32"}
    types |= {"seed_ptr": "*i64", "position_ptr": "*i64"} | dict.fromkeys(("step", "rows", "vocab", "hidden"), "i32")
    constants = {
        "SAMPLE": sample, "ROWS": launch.rows, "TOKENS": launch.tokens, "DEPTH": launch.depth,
        "PRECISION": "ieee" if short == "fp32" else "tf32",
    }  # fmt: skip
    head = Specimen(
        sample_head_kernel, hidden, short, types, constants, launch.num_warps, ("hidden",), launch.num_stages
    )
    types = partial | {"temperature_ptr": "*fp32", "ids_ptr": "*i64", "out_ptr": "*i64", "log_q_ptr": "*fp32"}
    types |= dict.fromkeys(("rows", "programs", "out_stride"), "i32")
    constants = {"SAMPLE": sample, "HAS_IDS": True, "PROGRAMS": MAX_PROGRAMS}
    return [head, Specimen(choose_kernel, MAX_PROGRAMS, "fp32", types, constants, 4)]


def supports(x: Tensor, weight: Tensor) -> str | None:
    """Return None when the kernel takes these tensors, else the reason why not."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
    return None if len(weight) else "an empty vocabulary"


def sample_head(
    x: Tensor, weight: Tensor, ids: Tensor | None, temperature: Tensor | None, seeds: Tensor | None, positions: Tensor,
    step: int = 0, *, out: Tensor | None = None, launch: Launch | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Same contract as `reference.sample_head` at positions + step, on CUDA tensors (or CPU tensors in the interpreter).

    Tokens are written to `out` [n] (int64, any stride) where it is given. Raises ValueError for what the kernel does not take.
    """
    rows, hidden = x.shape
    reason = supports(x, weight)
    if reason is None and (weight.shape[1] != hidden or len(positions) != rows or (ids is not None and len(ids) != len(weight))):
        reason = f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and positions {tuple(positions.shape)} do not fit"
    if reason is None and (temperature is None) != (seeds is None):
        reason = "temperatures and seeds belong together"
    if reason is not None:
        raise ValueError(f"sample_head: {reason}")
    device, sample = x.device, temperature is not None
    launch = launch or default_launch(rows, sample)
    programs = min(launch.programs, triton.cdiv(len(weight), launch.tokens), MAX_PROGRAMS)
    best, token = torch.empty(2, programs, rows, dtype=torch.int32, device=device).unbind(0)
    logit, top, mass = torch.empty(3, programs, rows, dtype=torch.float32, device=device).unbind(0)
    out = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    log_q = torch.empty(rows, dtype=torch.float32, device=device) if sample else None
    if not rows:
        return out, log_q
    warmth, keys = (x, x) if temperature is None or seeds is None else (temperature.float().contiguous(), seeds.contiguous())
    launching.launch(
        sample_head_kernel, (programs, triton.cdiv(rows, launch.rows)), x.contiguous(), weight.contiguous(), warmth, keys,
        positions.contiguous(), best, token, logit, top, mass, step, rows, len(weight), hidden,
        SAMPLE=sample, ROWS=launch.rows, TOKENS=launch.tokens, DEPTH=launch.depth,
        PRECISION="ieee" if torch.float32 in (x.dtype, weight.dtype) else "tf32",
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    launching.launch(
        choose_kernel, (rows,), best, token, logit, top, mass, warmth, out if ids is None else ids, out,
        mass if log_q is None else log_q, rows, programs, out.stride(0),
        SAMPLE=sample, HAS_IDS=ids is not None, PROGRAMS=triton.next_power_of_2(programs), num_warps=4,
    )  # fmt: skip
    return out, log_q
