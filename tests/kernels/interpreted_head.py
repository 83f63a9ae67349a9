"""The head's kernels and the loss in Triton's interpreter. Not collected by name: `test_triton.py` runs it as a process of its
own with TRITON_INTERPRET=1, for kernels are interpreter or compiler objects for the life of a process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.overlap_loss import BLOCK, dense_terms
from kernels.sample_head import Launch, sample_head, sample_head_kernel
from tests.kernels.compare import ULP, close, poison

FLOATS = [torch.float32, torch.bfloat16]
SMALL = Launch(tokens=16, depth=16, rows=16, programs=3)
DEEP = Launch(tokens=64, depth=128, rows=16, programs=2)  # fewer and wider tiles: quicker to interpret


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poison():
        yield


def test_the_kernels_are_interpreted():
    assert type(sample_head_kernel).__name__ == "InterpretedFunction"


def make(rows: int, hidden: int, vocab: int, dtype: torch.dtype, target_vocab: int | None = None) -> tuple[Tensor, ...]:
    torch.manual_seed(rows + vocab)
    x, weight = torch.randn(rows, hidden).to(dtype), torch.randn(vocab, hidden).to(dtype)
    ids = None if target_vocab is None else torch.randperm(target_vocab)[:vocab].sort().values
    return x, weight, ids


def draws(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures (0 among them), seeds of all 64 bits and positions."""
    temperature = torch.tensor([0.7, 0.0, 1.3])[torch.arange(rows) % 3]
    return temperature, torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 100_000, (rows,))


SHAPES = [(1, 1, 1), (1, 64, 48), (3, 13, 17), (17, 33, 101), (2, 576, 257)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "hidden", "vocab"), SHAPES)
@pytest.mark.parametrize("target_vocab", [None, 500])
def test_greedy(rows, hidden, vocab, target_vocab, dtype):
    x, weight, ids = make(rows, hidden, vocab, dtype, target_vocab)
    positions = torch.zeros(rows, dtype=torch.int64)
    token, log_q = sample_head(x, weight, ids, None, None, positions, launch=DEEP if hidden > 64 else SMALL)
    assert log_q is None
    assert token.dtype == torch.int64
    assert torch.equal(token, reference.sample_head(x, weight, ids, None, None, positions)[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "hidden", "vocab"), SHAPES)
def test_drawn(rows, hidden, vocab, dtype):
    x, weight, ids = make(rows, hidden, vocab, dtype, 500)
    x = x / hidden**0.5
    temperature, seeds, positions = draws(rows)
    out = torch.full((rows, 2), -7)
    launch = DEEP if hidden > 64 else SMALL
    token, log_q = sample_head(x, weight, ids, temperature, seeds, positions - 2, 2, out=out[:, 1], launch=launch)
    want, want_q = reference.sample_head(x, weight, ids, temperature, seeds, positions)
    assert torch.equal(token, want)
    assert torch.equal(out, torch.stack([torch.full_like(want, -7), want], dim=1))
    torch.testing.assert_close(log_q, want_q, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("vocab", [4096, 32000, 151936])
@pytest.mark.parametrize("sampled", [True, False])
def test_real_vocabularies(vocab, sampled):
    """Wide tiles, so that the interpreter is quick; the last one is ragged."""
    x, weight, _ = make(3, 16, vocab, torch.bfloat16)
    temperature, seeds, positions = draws(3)
    if not sampled:
        temperature = seeds = None
    got = sample_head(x, weight, None, temperature, seeds, positions, launch=Launch(tokens=16384, depth=16, programs=4))
    want = reference.sample_head(x, weight, None, temperature, seeds, positions)
    assert torch.equal(got[0], want[0])
    if sampled:
        torch.testing.assert_close(got[1], want[1], rtol=2e-5, atol=2e-5)


def test_a_draw_depends_on_its_seed_and_position_only():
    x, weight, _ = make(6, 16, 300, torch.float32)
    x[:] = x[0] * 0.1
    seeds, positions = torch.tensor([5, 5, 5, 9, 5, 9]), torch.tensor([0, 1, 0, 0, 1, 1])
    token, _ = sample_head(x, weight, None, torch.ones(6), seeds, positions, launch=SMALL)
    assert token[0] == token[2]
    assert token[1] == token[4]
    assert len({int(token[i]) for i in (0, 1, 3, 5)}) > 1
    other = Launch(tokens=64, depth=32, rows=32, programs=2)
    alone, _ = sample_head(x[3:4], weight, None, torch.ones(1), seeds[3:4], positions[3:4], launch=other)
    assert alone[0] == token[3]


def test_draws_follow_the_softmax():
    """512 draws over 5 tokens against their probabilities, within five standard deviations."""
    count, weight = 512, torch.tensor([[0.0], [1.0], [2.0], [-1.0], [0.5]])
    x, seeds = torch.ones(count, 1), torch.full((count,), 1234)
    launch = Launch(tokens=16, depth=16, rows=512)
    token, log_q = sample_head(x, weight, None, torch.full((count,), 0.8), seeds, torch.arange(count), launch=launch)
    q = (weight[:, 0] / 0.8).softmax(0)
    share = token.bincount(minlength=5) / count
    assert ((share - q).abs() < 5 * (q * (1 - q) / count).sqrt()).all()
    torch.testing.assert_close(log_q, q.log()[token], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampled", [True, False])
def test_head_not_finite_like_the_oracle(value, sampled):
    x, weight, _ = make(4, 16, 70, torch.float32)
    weight[50] = value
    x[1, 3] = value
    x[2] = 0.0
    temperature, seeds, positions = draws(4) if sampled else (None, None, torch.zeros(4, dtype=torch.int64))
    got = sample_head(x, weight, None, temperature, seeds, positions, launch=SMALL)
    want = reference.sample_head(x, weight, None, temperature, seeds, positions)
    assert torch.equal(got[0], want[0])
    if sampled:
        torch.testing.assert_close(got[1], want[1], rtol=2e-5, atol=2e-5, equal_nan=True)


def test_of_equal_maxima_the_first_and_no_rows():
    x, weight = torch.ones(2, 16), torch.zeros(90, 16)
    weight[[20, 75, 30]] = 1.0
    x[1] = 0.0
    token, _ = sample_head(x, weight, None, None, None, torch.zeros(2, dtype=torch.int64), launch=SMALL)
    assert token.tolist() == [20, 0]
    assert sample_head(x[:0], weight, None, None, None, torch.zeros(0, dtype=torch.int64))[0].shape == (0,)


def losses(rows: int, vocab: int, dtype: torch.dtype, prob_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits and a target near them that has zeros and less mass than 1."""
    torch.manual_seed(rows + vocab)
    logits = (torch.randn(rows, vocab) * 2).to(dtype)
    prob = (logits.float() + torch.randn(rows, vocab)).softmax(-1) * 0.9
    return logits.requires_grad_(), prob.masked_fill(torch.rand(rows, vocab) < 0.2, 0.0).to(prob_dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "prob_dtype"),
    [
        (1, 1, torch.float32), (5, 13, torch.float32), (3, BLOCK + 1, torch.float32), (2, 4096, torch.bfloat16),
        (2, 32000, torch.float32), (1, 151936, torch.float32),
    ],
)  # fmt: skip
def test_loss(rows, vocab, prob_dtype, dtype):
    logits, prob = losses(rows, vocab, dtype, prob_dtype)
    got = dense_terms(logits, prob)
    wide = logits.detach().double().requires_grad_()
    want = reference.dense_terms(wide, prob.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
    torch.manual_seed(1)
    grads = torch.randn(rows), torch.randn(rows)
    a = torch.autograd.grad(got, logits, grads)[0]
    b = torch.autograd.grad(want, wide, [g.double() for g in grads])[0]
    assert a.dtype == dtype
    torch.testing.assert_close(a.double(), b, rtol=max(2e-5, ULP[dtype]), atol=2e-6 if dtype == torch.float32 else 1e-4)


def test_loss_where_only_one_term_is_used_and_no_rows():
    logits, prob = losses(4, 50, torch.float32)
    for index in (0, 1):
        sums = [form(logits, prob)[index].sum() for form in (dense_terms, reference.dense_terms)]
        close(*(torch.autograd.grad(s, logits)[0] for s in sums), torch.float32)
    alpha, _ = dense_terms(logits[:0], prob[:0])
    assert torch.autograd.grad(alpha.sum(), logits)[0].eq(0).all()


@pytest.mark.parametrize("vocab", [70, BLOCK + 70])
def test_loss_not_finite_like_the_oracle(vocab):
    """Rows: NaN, infinity, some -inf where p is 0, some where it is not, a whole first chunk of -inf, all -inf, NaN in p."""
    logits, prob = (t.detach().clone() for t in losses(8, vocab, torch.float32))
    prob[prob == 0] = 1e-4
    logits[0, 5], logits[1, 6], prob[7, 3] = float("nan"), float("inf"), float("nan")
    logits[2, 7], prob[2, 7] = float("-inf"), 0.0
    logits[3, 8] = float("-inf")
    logits[4, : min(BLOCK, 60)], prob[4, : min(BLOCK, 60)] = float("-inf"), 0.0
    logits[5] = float("-inf")
    for a, b in zip(dense_terms(logits, prob), reference.dense_terms(logits, prob), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, equal_nan=True)
        assert a[[2, 6]].isfinite().all()
    good, mass = logits[[2, 4, 6]].requires_grad_(), prob[[2, 4, 6]]
    got, want = (torch.autograd.grad(form(good, mass)[0].sum(), good)[0] for form in (dense_terms, reference.dense_terms))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_rows_of_zeros():
    alpha, entropy = dense_terms(torch.zeros(3, 50), torch.zeros(3, 50))
    assert alpha.eq(0).all()
    assert entropy.eq(0).all()


def test_views_and_what_the_kernels_do_not_take():
    logits, prob = losses(6, 40, torch.float32)
    strided = logits.detach().t().contiguous().t()
    for a, b in zip(dense_terms(strided, prob), reference.dense_terms(strided, prob), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    x, weight, _ = make(2, 16, 30, torch.float32)
    where = torch.zeros(2, dtype=torch.int64)
    for call, words in (
        (lambda: dense_terms(logits.double(), prob), "dense_terms: logits is float64"),
        (lambda: dense_terms(logits, prob[:, 1:]), "dense_terms: logits are (6, 40), prob (6, 39)"),
        (lambda: sample_head(x.double(), weight, None, None, None, where), "sample_head: x is float64"),
        (lambda: sample_head(x, weight[:, 1:], None, None, None, where), "do not fit"),
        (lambda: sample_head(x, weight[:0], None, None, None, where), "an empty vocabulary"),
        (lambda: sample_head(x, weight, None, torch.ones(2), None, where), "temperatures and seeds belong together"),
    ):
        with pytest.raises(ValueError, match=": ") as caught:
            call()
        assert words in str(caught.value)
