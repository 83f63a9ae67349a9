"""The Triton kernels in Triton's interpreter, on CPU tensors. Not collected by name: `test_triton.py` runs it as a
process of its own with TRITON_INTERPRET=1, for kernels are interpreter or compiler objects for the life of a process.

The interpreter truncates float32 to bfloat16 where hardware rounds: 16-bit results may be one unit in the last place off.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.add_rms_norm import Launch, add_rms_norm, backward_kernel, candidates, default_launch
from tests.kernels.compare import ULP, close

EPS = 1e-5
SHAPES = [(1, 1), (1, 576), (2, 5, 13), (7, 1), (11, 257), (2, 4096)]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x, residual = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    return x, residual, (torch.rand(shape[-1]) + 0.5).to(dtype).requires_grad_()


def test_the_kernels_are_interpreted():
    assert type(backward_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("with_residual", "rows"), [(True, 1), (True, 4), (False, 2)])
def test_value(shape, dtype, rows, with_residual):
    x, residual, weight = make(shape, dtype)
    residual = residual if with_residual else None
    normed, total = add_rms_norm(x, residual, weight, EPS, launch=Launch(rows, 4))
    close(total, reference.add_rms_norm(x, residual, weight, EPS)[1], dtype, scale=0.0)
    # The norm of the kernel's own sum, so that one truncation is not counted twice.
    close(normed, reference.add_rms_norm(total, None, weight, EPS)[0], dtype, scale=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("with_residual", "rows"), [(True, 1), (True, 2), (False, 4)])
def test_gradient(shape, dtype, rows, with_residual):
    x, residual, weight = make(shape, dtype)
    inputs = [x, residual, weight] if with_residual else [x, weight]
    torch.manual_seed(1)
    grads = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    outputs = add_rms_norm(x, residual if with_residual else None, weight, EPS, launch=Launch(rows, 4))
    got = torch.autograd.grad(outputs, inputs, grads)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    wanted = reference.add_rms_norm(wide[0], wide[1] if with_residual else None, wide[-1], EPS)
    want = torch.autograd.grad(wanted, wide, [g.double() for g in grads])
    for a, b in zip(got, want, strict=True):
        close(a, b.to(dtype), dtype, scale=1.0)


def test_more_rows_than_programs_and_a_partial_tile():
    """The backward's programs walk several tiles each; 8 programs, 3 rows a tile would leave a ragged last one."""
    x, residual, weight = make((37, 33), torch.float32)
    got = torch.autograd.grad(add_rms_norm(x, residual, weight, EPS, launch=Launch(2, 2))[0].sum(), (x, residual, weight))
    want = torch.autograd.grad(reference.add_rms_norm(x, residual, weight, EPS)[0].sum(), (x, residual, weight))
    for a, b in zip(got, want, strict=True):
        close(a, b, torch.float32)


def test_only_one_output_is_used():
    x, residual, weight = make((5, 48), torch.float32)
    for index in (0, 1):
        sums = [form(x, residual, weight, EPS)[index].sum() for form in (add_rms_norm, reference.add_rms_norm)]
        for a, b in zip(*(torch.autograd.grad(s, (x, residual, weight), allow_unused=True) for s in sums), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                close(a, b, torch.float32)


def test_no_rows():
    x, residual, weight = make((0, 48), torch.float32)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert normed.shape == total.shape == (0, 48)
    grad = torch.autograd.grad(normed.sum(), weight)[0]
    assert torch.equal(grad, torch.zeros(48))


def test_rows_of_zeros_are_finite():
    zeros = torch.zeros(3, 48)
    normed, total = add_rms_norm(zeros, zeros, torch.ones(48), EPS)
    assert torch.equal(normed, zeros)
    assert torch.equal(total, zeros)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e25])
def test_not_finite_like_the_oracle(value):
    """NaN, infinity and an overflowing square give what the oracle gives, and stay within their row."""
    x, residual, weight = (t.detach() for t in make((4, 48), torch.float32))
    x[2, 7] = value
    got, want = add_rms_norm(x, residual, weight, EPS), reference.add_rms_norm(x, residual, weight, EPS)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6, equal_nan=True)
        assert torch.isfinite(a[[0, 1, 3]]).all()


def test_mixed_dtypes_keep_the_residual_stream():
    """A 16-bit branch added to a float32 stream stays float32, and each gradient has its input's dtype."""
    x, residual, weight = make((5, 48), torch.float32)
    branch = x.detach().bfloat16().requires_grad_()
    got, want = add_rms_norm(branch, residual, weight, EPS), reference.add_rms_norm(branch, residual, weight, EPS)
    for a, b in zip(got, want, strict=True):
        close(a, b, torch.float32)
    grads = torch.autograd.grad(got[0].sum(), (branch, residual, weight))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]


def test_inputs_that_are_not_contiguous():
    torch.manual_seed(0)
    x, residual = torch.randn(6, 4, 48).transpose(0, 1), torch.randn(48, 4, 6).permute(1, 2, 0)
    weight = torch.rand(96)[::2]
    for a, b in zip(add_rms_norm(x, residual, weight, EPS), reference.add_rms_norm(x, residual, weight, EPS), strict=True):
        close(a.contiguous(), b.contiguous(), torch.float32)


@pytest.mark.parametrize(
    ("x", "residual", "weight", "words"),
    [
        (torch.zeros(2, 4, dtype=torch.float64), None, torch.ones(4), "x is float64"),
        (torch.zeros(2, 4), torch.zeros(1, 4), torch.ones(4), "residual is (1, 4)"),
        (torch.zeros(2, 4), None, torch.ones(5), "weight is (5,)"),
        (torch.zeros(1, 9000), None, torch.ones(9000), "hidden size 9000"),
    ],
)
def test_what_the_kernel_does_not_take(x, residual, weight, words):
    with pytest.raises(ValueError, match="add_rms_norm") as caught:
        add_rms_norm(x, residual, weight, EPS)
    assert words in str(caught.value)


@pytest.mark.parametrize("hidden", [1, 16, 576, 896, 2048, 4096, 8192])
def test_candidates_start_with_the_default_and_are_distinct(hidden):
    found = candidates(hidden)
    assert found[0] == default_launch(hidden)
    assert len(set(found)) == len(found)
