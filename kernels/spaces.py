"""The search space of every Triton operation: which launches may be worth timing, what each compiles, and the call to time.

A space is wide on purpose: `autotune` prunes it by what the compiled kernels take. The first launch of a space is the default.
Needs triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import add_rms_norm, cached_attention, input_norm, overlap_loss, rejection, rope_cache, sample_head, silu_mul
from kernels.aot import Specimen
from kernels.tuned import source_hash

CONTEXT = 4096  # positions of the timed cache; shorter caches take fewer splits (`cached_attention.fitted`)
DRAFT_TOKENS = 4  # of the timed rejection
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Problem:
    """One operation at one shape (the numbers that `Space.axes` names), in one dtype ('bfloat16'), of `rows` rows."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    rows: int

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis} {size}" for axis, size in zip(SPACES[self.op].axes, self.shape, strict=True))
        return f"{self.op} ({sizes}, {self.rows} row{'s' if self.rows > 1 else ''}, {self.dtype})"


@dataclass(frozen=True)
class Space:
    """`module`: the kernel's file. `launches`: the default first, without repeats. `specimens`: what a launch compiles.

    `prepare(problem, device)` makes random inputs and returns the call to time, which takes the launch.
    """

    module: Any
    axes: tuple[str, ...]
    launches: Callable[[Problem], list[Any]]
    specimens: Callable[[Problem, Any], list[Specimen]]
    prepare: Callable[[Problem, torch.device], Callable[[Any], object]]


def source(op: str) -> str:
    """Return the hash of the source of an operation's kernels: a launch tuned for another one means nothing."""
    return source_hash(f"{SPACES[op].module.__name__.rpartition('.')[2]}.py")


def write_row(problem: Problem, launch: Any) -> dict[str, Any]:
    """Return {op, shape, dtype, rows, source, launch} as plain JSON."""
    shape = dict(zip(SPACES[problem.op].axes, problem.shape, strict=True))
    about = {"op": problem.op, "shape": shape, "dtype": problem.dtype, "rows": problem.rows}
    return {**about, "source": source(problem.op), "launch": asdict(launch)}


def read_row(row: Mapping[str, Any]) -> tuple[Problem, Any]:
    """Return the problem and the launch of a row. ValueError for one that is damaged or names a launch outside of the space."""
    try:
        space = SPACES[row["op"]]
        sizes = [row["shape"][axis] for axis in space.axes]
        problem = Problem(row["op"], tuple(sizes), row["dtype"], row["rows"])
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in (*sizes, problem.rows)):
            raise ValueError(f"a size of {problem.op} is no count")  # noqa: TRY301
        launch = space.module.Launch(**row["launch"])
        row["source"]  # noqa: B018 -- must be there
        if problem.dtype not in SHORT or launch not in space.launches(problem):
            raise ValueError(f"{problem}: {launch} is not in its search space")  # noqa: TRY301
    except (KeyError, TypeError) as error:
        raise ValueError(f"a row is damaged: {error!r}") from None
    return problem, launch


def _random(device: torch.device, dtype: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(getattr(torch, dtype))


def _norm_launches(problem: Problem) -> list[add_rms_norm.Launch]:
    return add_rms_norm.candidates(problem.shape[0])


def _norm_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    (hidden,), rows = problem.shape, problem.rows
    x, residual = (_random(device, problem.dtype, rows, hidden) for _ in range(2))
    weight = torch.ones_like(x[0])
    return lambda launch: add_rms_norm.add_rms_norm(x, residual, weight, 1e-5, launch=launch)


def _row_launches(problem: Problem) -> list[input_norm.Launch]:
    hidden = problem.shape[0]
    warps = [number for number in (1, 2, 4, 8, 16) if 2 <= hidden / (32 * number) <= 128]
    return _first(input_norm.default_launch(hidden), map(input_norm.Launch, warps))


def _input_norm_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    (hidden,), rows = problem.shape, problem.rows
    embed, state = _random(device, problem.dtype, 1024, hidden), _random(device, problem.dtype, rows, hidden)
    tokens, weight = torch.arange(rows, device=device) % 1024, torch.ones_like(state[0])
    return lambda launch: input_norm.input_norm(tokens, embed, state, weight, weight, 1e-5, False, launch=launch)


def _feature_norms_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    hidden, parts = problem.shape
    features = _random(device, problem.dtype, problem.rows, parts * hidden)
    weights = torch.ones(parts, hidden, dtype=features.dtype, device=device)
    return lambda launch: input_norm.feature_norms(features, weights, 1e-5, launch=launch)


def _rope_launches(problem: Problem) -> list[rope_cache.Launch]:
    heads, kv, _ = problem.shape
    sizes = [size for size in (1, 2, 4, 8, 16) if size < 2 * (heads + 2 * kv)]
    return _first(rope_cache.Launch(), itertools.starmap(rope_cache.Launch, itertools.product(sizes, (1, 2, 4))))


def _cache(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, table of a page a row, and positions at the end of the cache."""
    (_, kv, width), rows = problem.shape, problem.rows
    keys, values = (_random(device, problem.dtype, rows, CONTEXT, kv, width) for _ in range(2))
    table = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
    return keys, values, table, torch.full((rows,), CONTEXT - 1, device=device)


def _rope_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    (heads, kv, width), rows = problem.shape, problem.rows
    keys, values, table, positions = _cache(problem, device)
    qkv = _random(device, problem.dtype, rows, (heads + 2 * kv) * width)
    angle = torch.rand(CONTEXT, width // 2, device=device)
    cos, sin = angle.cos(), angle.sin()
    return lambda launch: rope_cache.rope_cache(qkv, cos, sin, positions, keys, values, table, heads, launch=launch)


def _attention_launches(problem: Problem) -> list[cached_attention.Launch]:
    size = torch.empty(0, dtype=getattr(torch, problem.dtype)).element_size()
    default = cached_attention.default_launch(problem.rows * problem.shape[1], CONTEXT, size)
    options = itertools.product((32, 64, 128), (1, 4, 8), (2, 4, 8), (2, 3))
    return _first(default, itertools.starmap(cached_attention.Launch, options))


def _attention_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    (heads, _, width), rows = problem.shape, problem.rows
    keys, values, table, positions = _cache(problem, device)
    q = _random(device, problem.dtype, rows, heads, width)
    return lambda launch: cached_attention.cached_attention(q, keys, values, table, positions, width**-0.5, launch=launch)


def _silu_launches(problem: Problem) -> list[silu_mul.Launch]:
    pairs = itertools.product((256, 512, 1024, 2048, 4096), (1, 2, 4, 8))
    sound = [silu_mul.Launch(block, warps) for block, warps in pairs if 2 <= block / (32 * warps) <= 32]
    return _first(silu_mul.Launch(), sound)


def _silu_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    joined = _random(device, problem.dtype, problem.rows, 2 * problem.shape[0])
    return lambda launch: silu_mul.silu_mul(joined, launch=launch)


def _head_launches(problem: Problem) -> list[sample_head.Launch]:
    default = sample_head.default_launch(problem.rows, False)
    options = itertools.product((32, 64, 128), (64, 128), (default.rows,), (132, 264, 512), (4, 8), (2, 3, 4))
    return _first(default, itertools.starmap(sample_head.Launch, options))


def _head_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    (hidden, vocab), rows = problem.shape, problem.rows
    x, weight = _random(device, problem.dtype, rows, hidden), _random(device, problem.dtype, vocab, hidden)
    positions, ids = torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(vocab, device=device)
    return lambda launch: sample_head.sample_head(x, weight, ids, None, None, positions, launch=launch)


def _rejection_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    (vocab, draft_vocab), rows, k = problem.shape, problem.rows, DRAFT_TOKENS
    p = torch.randn(rows, k + 1, vocab, device=device).softmax(-1)
    q = torch.randn(rows, k, draft_vocab, device=device).softmax(-1)
    ids, draft = torch.arange(draft_vocab, device=device), torch.zeros(rows, k, dtype=torch.int64, device=device)
    uniform = torch.rand(rows, k + 1, dtype=torch.float64, device=device)
    arguments = (draft, q[:, :, 0].contiguous(), q, p, ids, uniform[:, :k].contiguous(), uniform)
    return lambda launch: rejection.rejection(*arguments, launch=launch)


def _terms_call(problem: Problem, device: torch.device) -> Callable[[Any], object]:
    logits = _random(device, problem.dtype, problem.rows, problem.shape[0])
    prob = torch.randn(problem.rows, problem.shape[0], device=device).softmax(-1)
    return lambda launch: overlap_loss.dense_terms(logits, prob, launch=launch)


def _first(default: Any, others: Any) -> list[Any]:
    return list(dict.fromkeys([default, *others]))


_CHUNKS = list(itertools.product((1024, 2048, 4096, 8192), (4, 8, 16)))
SPACES: Mapping[str, Space] = {
    "add_rms_norm": Space(
        add_rms_norm, ("hidden",), _norm_launches,
        lambda problem, launch: add_rms_norm.specimens_of(problem.shape[0], SHORT[problem.dtype], launch), _norm_call,
    ),
    "input_norm": Space(
        input_norm, ("hidden",), _row_launches,
        lambda problem, launch: input_norm.specimens_of(problem.shape[0], SHORT[problem.dtype], launch)[:1], _input_norm_call,
    ),
    "feature_norms": Space(
        input_norm, ("hidden", "parts"), _row_launches,
        lambda problem, launch: input_norm.specimens_of(problem.shape[0], SHORT[problem.dtype], launch)[1:], _feature_norms_call,
    ),
    "rope_cache": Space(
        rope_cache, ("heads", "kv", "width"), _rope_launches,
        lambda problem, launch: rope_cache.specimens_of(problem.shape[2], SHORT[problem.dtype], launch), _rope_call,
    ),
    "cached_attention": Space(
        cached_attention, ("heads", "kv", "width"), _attention_launches,
        lambda problem, launch: cached_attention.specimens_of(
            problem.shape[2], SHORT[problem.dtype], launch, problem.shape[0] // problem.shape[1]
        ),
        _attention_call,
    ),
    "silu_mul": Space(
        silu_mul, ("size",), _silu_launches,
        lambda problem, launch: silu_mul.specimens_of(problem.shape[0], SHORT[problem.dtype], launch), _silu_call,
    ),
    "sample_head": Space(
        sample_head, ("hidden", "vocab"), _head_launches,
        lambda problem, launch: sample_head.specimens_of(problem.shape[0], SHORT[problem.dtype], launch), _head_call,
    ),
    "rejection": Space(
        rejection, ("vocab", "draft_vocab"),
        lambda problem: _first(rejection.Launch(), itertools.starmap(rejection.Launch, _CHUNKS)),
        lambda problem, launch: rejection.specimens_of(problem.shape[0], launch), _rejection_call,
    ),
    "dense_terms": Space(
        overlap_loss, ("vocab",), lambda problem: _first(overlap_loss.Launch(), itertools.starmap(overlap_loss.Launch, _CHUNKS)),
        lambda problem, launch: overlap_loss.specimens_of(problem.shape[0], SHORT[problem.dtype], launch), _terms_call,
    ),
}  # fmt: skip
