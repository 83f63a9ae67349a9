"""The kernels of a draft step but its head in Triton's interpreter. Not collected by name: `test_triton.py` runs it as a process
of its own with TRITON_INTERPRET=1, for kernels are interpreter or compiler objects for the life of a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cached_attention import Launch, cached_attention, default_launch
from kernels.input_norm import feature_norms, input_norm
from kernels.rope_cache import rope_cache, rope_cache_kernel
from kernels.silu_mul import silu_mul
from tests.kernels.compare import close, poison

EPS = 1e-5
FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poison():
        yield


def test_the_kernels_are_interpreted():
    assert type(rope_cache_kernel).__name__ == "InterpretedFunction"


def inputs(rows: int, hidden: int, dtype: torch.dtype, vocab: int = 37) -> tuple[Any, ...]:
    torch.manual_seed(rows * hidden)
    embed, state = torch.randn(vocab, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
    weights = (torch.rand(2, hidden) + 0.5).to(dtype).unbind(0)
    return torch.randint(vocab, (rows,)), embed, state, *weights, EPS


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (1, 576), (5, 13), (7, 257), (2, 4096)])
@pytest.mark.parametrize("normed_residual", [True, False])
def test_input_norm(rows, hidden, dtype, normed_residual):
    case = inputs(rows, hidden, dtype)
    got, want = input_norm(*case, normed_residual), reference.input_norm(*case, normed_residual)
    for a, b in zip(got, want, strict=True):
        close(a, b, dtype, scale=0.0)
    assert got[1].is_contiguous()
    assert normed_residual or got[1] is case[2]


def test_input_norm_of_tokens_with_a_stride_and_mixed_dtypes():
    tokens, embed, state, *rest = inputs(4, 48, torch.float32)
    strided = torch.stack([tokens, tokens.flip(0)], dim=1)[:, 0]
    assert strided.stride() == (2,)
    got = input_norm(strided, embed.bfloat16(), state, *rest, True)
    want = reference.input_norm(tokens, embed.bfloat16(), state, *rest, True)
    close(got[0], want[0], torch.float32)
    assert input_norm(tokens[:0], embed, state[:0], *rest, True)[0].shape == (0, 96)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
def test_input_norm_not_finite_like_the_oracle(value):
    tokens, embed, state, *rest = inputs(4, 48, torch.float32)
    state[2, 7] = value
    embed[tokens[0], 3] = value
    got, want = (form(tokens, embed, state, *rest, True) for form in (input_norm, reference.input_norm))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6, equal_nan=True)


def test_input_norm_of_zeros_is_zero():
    tokens, embed, state, *rest = inputs(4, 48, torch.float32)
    assert input_norm(tokens, embed * 0, state * 0, *rest, False)[0].eq(0).all()


@pytest.mark.parametrize("token", [-1, 37, 2**40])
def test_a_token_outside_of_the_vocabulary_is_nan(token):
    tokens, *rest = inputs(3, 48, torch.float32)
    tokens[1] = token
    joined, _ = input_norm(tokens, *rest, False)
    assert joined[1, :48].isnan().all()
    assert joined[1, 48:].isfinite().all()
    assert joined[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "parts", "hidden"), [((1,), 1, 1), ((3,), 3, 13), ((2, 3), 3, 576), ((0,), 2, 8), ((2,), 4, 2048)]
)
def test_feature_norms(shape, parts, hidden, dtype):
    torch.manual_seed(hidden)
    features, weights = torch.randn(*shape, parts * hidden).to(dtype), (torch.rand(parts, hidden) + 0.5).to(dtype)
    close(feature_norms(features, weights, EPS), reference.feature_norms(features, weights, EPS), dtype, scale=0.0)
    close(feature_norms(features * 0, weights, EPS), features * 0, dtype)


def test_feature_norms_of_a_view_and_not_finite():
    features, weights = torch.randn(4, 3, 48).transpose(0, 1)[:, 1].repeat(1, 2), torch.rand(2, 48)
    features[1, 50] = float("inf")
    features[2, 3] = float("nan")
    torch.testing.assert_close(
        feature_norms(features, weights, EPS), reference.feature_norms(features, weights, EPS), rtol=2e-6, atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 26), (2, 3, 1536), (3, 2 * 1025), (0, 8)], ids=str)
def test_silu_mul(shape, dtype):
    torch.manual_seed(shape[-1])
    joined = (torch.randn(shape) * 4).to(dtype).requires_grad_()
    got, want = silu_mul(joined), reference.silu_mul(joined)
    close(got, want, dtype, scale=0.0)
    grad = torch.randn(want.shape).to(dtype)
    wide = joined.detach().double().requires_grad_()
    expected = torch.autograd.grad(reference.silu_mul(wide), wide, grad.double())[0]
    close(torch.autograd.grad(got, joined, grad)[0], expected.to(dtype), dtype, scale=1.0)


def test_silu_mul_not_finite_like_the_oracle():
    joined = torch.tensor([[float("nan"), float("inf"), -200.0, 200.0, 0.0, 1.0, 2.0, 3.0, -1.0, 4.0]]).repeat(2, 1)
    joined[1] = joined[1].flip(0)
    got, want = silu_mul(joined), reference.silu_mul(joined)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-30, equal_nan=True)
    assert silu_mul(torch.zeros(2, 8)).eq(0).all()


class Cache:
    """A paged cache with shuffled pages, NaN wherever no position was written, and rope tables."""

    def __init__(self, rows: int, pages: int, page: int, kv: int, width: int, dtype: torch.dtype) -> None:
        torch.manual_seed(rows * page + width)
        shape = (rows * pages + 1, page, kv, width)
        self.keys, self.values = torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)
        self.table = torch.randperm(rows * pages).add(1).view(rows, pages).to(torch.int32)
        angle = torch.arange(pages * page)[:, None] / 100.0 ** (torch.arange(width // 2) / (width // 2))
        self.cos, self.sin = angle.cos(), angle.sin()

    def fill(self, positions: Tensor) -> None:
        """Write random keys and values at 0..position of each row."""
        for row, position in enumerate(positions.tolist()):
            for place in range(position + 1):
                page, at = int(self.table[row, place // self.keys.shape[1]]), place % self.keys.shape[1]
                for held in (self.keys, self.values):
                    held[page, at] = torch.randn(held.shape[2:]).to(held.dtype)


ROPE = [(1, 1, 1, 2, 1, 1), (3, 2, 5, 64, 4, 2), (2, 3, 7, 72, 6, 2), (2, 1, 16, 80, 8, 8), (4, 2, 16, 128, 3, 1)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "pages", "page", "width", "heads", "kv"), ROPE)
@pytest.mark.parametrize("step", [0, 1])
def test_rope_and_cache_write(rows, pages, page, width, heads, kv, dtype, step):
    got, want = (Cache(rows, pages, page, kv, width, dtype) for _ in range(2))
    positions = torch.randint(-1, pages * page - 1, (rows,)) if rows > 1 else torch.tensor([0])
    qkv = torch.randn(rows, (heads + 2 * kv) * width).to(dtype)
    q = rope_cache(qkv, got.cos, got.sin, positions, got.keys, got.values, got.table, heads, step)
    expected = reference.rope_cache(qkv, want.cos, want.sin, positions + step, want.keys, want.values, want.table, heads)
    close(q, expected, dtype, scale=0.5)
    for a, b in ((got.keys, want.keys), (got.values, want.values)):
        assert torch.equal(a.isnan(), b.isnan())  # nothing else was written
        close(a.nan_to_num(), b.nan_to_num(), dtype, scale=0.5)


def test_positions_outside_of_the_table_write_nothing():
    cache = Cache(3, 2, 4, 2, 16, torch.float32)
    positions = torch.tensor([-1, 8, 2**40])
    q = rope_cache(torch.randn(3, 6 * 16), cache.cos, cache.sin, positions, cache.keys, cache.values, cache.table, 2)
    assert q.eq(0).all()
    assert cache.keys.isnan().all()
    assert cache.values.isnan().all()


def test_rope_not_finite_stays_within_its_head():
    got, want = (Cache(2, 1, 4, 1, 16, torch.float32) for _ in range(2))
    qkv, positions = torch.randn(2, 4 * 16), torch.tensor([1, 2])
    qkv[0, 3], qkv[1, 40], qkv[0, 60] = float("nan"), float("inf"), float("-inf")
    for cache, form in ((got, rope_cache), (want, reference.rope_cache)):
        cache.q = form(qkv, cache.cos, cache.sin, positions, cache.keys, cache.values, cache.table, 2)
    for name in ("q", "keys", "values"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=2e-6, atol=1e-6, equal_nan=True)


ATTENTION = [  # rows, pages, page, width, heads, kv
    (1, 1, 1, 64, 1, 1), (2, 1, 131, 64, 4, 2), (3, 7, 16, 72, 6, 2), (2, 2, 37, 80, 8, 8), (2, 3, 32, 128, 20, 1),
    (3, 1, 9, 16, 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "pages", "page", "width", "heads", "kv"), ATTENTION)
@pytest.mark.parametrize(("splits", "block"), [(1, 32), (3, 16)])
def test_attention(rows, pages, page, width, heads, kv, dtype, splits, block):
    cache = Cache(rows, pages, page, kv, width, dtype)
    positions = torch.randint(0, pages * page, (rows,))
    positions[-1] = pages * page - 1
    cache.fill(positions)
    q = torch.randn(rows, heads, width).to(dtype)
    arguments = (q, cache.keys, cache.values, cache.table)
    got = cached_attention(*arguments, positions - 1, width**-0.5, 1, launch=Launch(block, splits, 4))
    close(got, reference.cached_attention(*arguments, positions, width**-0.5), dtype, scale=0.5)


@pytest.mark.parametrize("splits", [1, 4])
def test_attention_of_rows_outside_of_the_table_is_zero_and_unwritten_entries_are_not_read(splits):
    cache = Cache(4, 2, 8, 1, 16, torch.float32)
    positions = torch.tensor([-1, 16, 3, 2**40])
    cache.fill(torch.tensor([-1, -1, 3, -1]))
    q = torch.randn(4, 2, 16)
    arguments = (q, cache.keys, cache.values, cache.table, positions, 0.25)
    got = cached_attention(*arguments, launch=Launch(16, splits, 4))
    assert got[[0, 1, 3]].eq(0).all()
    close(got, reference.cached_attention(*arguments), torch.float32)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_attention_not_finite_like_the_oracle(value, splits):
    cache = Cache(3, 1, 40, 2, 16, torch.float32)
    positions = torch.tensor([39, 20, 25])
    cache.fill(positions)
    q = torch.randn(3, 4, 16)
    cache.keys[int(cache.table[0, 0]), 5, 0, 3] = value
    cache.values[int(cache.table[1, 0]), 7, 1, 2] = value
    q[2, 0, 1] = value
    arguments = (q, cache.keys, cache.values, cache.table, positions, 0.25)
    got, want = cached_attention(*arguments, launch=Launch(16, splits, 4)), reference.cached_attention(*arguments)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got[1, :2].isfinite().all()


def test_attention_splits_where_programs_are_few():
    assert default_launch(8, 512, 2).splits == 1
    assert default_launch(8, 4096, 2).splits == 8
    assert default_launch(256, 4096, 2).splits == 1
    assert default_launch(8, 4096, 4).block == 32


def test_what_the_kernels_do_not_take():
    tokens, embed, state, *rest = inputs(3, 48, torch.float32)
    cache = Cache(3, 2, 4, 2, 16, torch.float32)
    qkv, positions = torch.randn(3, 6 * 16), torch.tensor([1, 2, 3])
    held = (cache.keys, cache.values, cache.table)
    for call, words in (
        (lambda: input_norm(tokens, embed.double(), state, *rest, True), "input_norm: a tensor is float64"),
        (lambda: input_norm(tokens[:2], embed, state, *rest, True), "do not fit"),
        (lambda: feature_norms(state, torch.ones(2, 48), EPS), "feature_norms: features (3, 48) and weights (2, 48)"),
        (lambda: silu_mul(torch.ones(2, 3)), "silu_mul: an odd width of 3"),
        (lambda: rope_cache(qkv[:, :-16], cache.cos, cache.sin, positions, *held, 2), "rope_cache: qkv is (3, 80)"),
        (lambda: rope_cache(qkv, cache.cos[:5], cache.sin, positions, *held, 2), "cos and sin hold 5 positions, the table 8"),
        (lambda: rope_cache(qkv, cache.cos, cache.sin, positions, *held[:2], held[2].long(), 2), "table is int64"),
        (lambda: rope_cache(qkv, cache.cos, cache.sin, positions, held[0].transpose(1, 2), *held[1:], 2), "rope_cache: "),
        (lambda: cached_attention(torch.ones(3, 3, 16), *held, positions, 1.0), "3 heads over 2 key heads"),
        (lambda: cached_attention(torch.ones(3, 2, 160), *held, positions, 1.0), "head size 160 is over 128"),
        (lambda: cached_attention(torch.ones(3, 2, 8), *held, positions, 1.0), "q has heads of 8, the cache of 16"),
        (lambda: cached_attention(torch.ones(3, 2, 16), *held, positions[:2], 1.0), "for 3 rows"),
    ):
        with pytest.raises(ValueError, match=": ") as caught:
            call()
        assert words in str(caught.value)
