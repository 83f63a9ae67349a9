"""The oracle, the eager form that CPUs run, and the dispatch between them and the kernels."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels import dispatch, eager, reference
from kernels.tuned import Launches, Tuned

ROOT = Path(__file__).resolve().parents[2]
EPS = 1e-5


def make(shape: tuple[int, ...], dtype: torch.dtype, *, grad: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x, residual = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    weight = torch.rand(shape[-1], dtype=torch.float64) + 0.5
    return tuple(t.to(dtype).requires_grad_(grad) for t in (x, residual, weight))


@pytest.mark.parametrize("form", [reference.add_rms_norm, eager.add_rms_norm])
@pytest.mark.parametrize("with_residual", [True, False])
def test_gradcheck(form, with_residual):
    x, residual, weight = make((2, 3, 5), torch.float64, grad=True)
    inputs = (x, residual, weight) if with_residual else (x, weight)

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        return form(given[0], given[1] if with_residual else None, given[-1], EPS)

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_oracle_is_the_norm_of_llama(dtype):
    x, residual, weight = make((4, 9, 64), dtype)
    norm = LlamaRMSNorm(64, eps=EPS).to(dtype)
    norm.weight.data.copy_(weight)
    got, total = reference.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    ulp = 2.0**-7 if dtype == torch.bfloat16 else 3e-7
    torch.testing.assert_close(got, norm(x + residual), rtol=ulp, atol=0.0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 5), max_size=2), hidden=st.integers(1, 70), seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    with_residual=st.booleans(), scale=st.sampled_from([1e-6, 1.0, 1e4]),
)  # fmt: skip
def test_eager_equals_the_oracle(rows, hidden, seed, dtype, with_residual, scale):
    x, residual, weight = make((*rows, hidden), dtype, grad=True, seed=seed)
    x = (x.detach() * scale).requires_grad_()
    given_residual = residual if with_residual else None
    want = reference.add_rms_norm(x, given_residual, weight, EPS)
    with torch.no_grad():
        bare = eager.add_rms_norm(x, given_residual, weight, EPS)
    assert torch.equal(bare[0], want[0])  # the decoding path does the oracle's arithmetic
    assert torch.equal(bare[1], want[1])
    got = eager.add_rms_norm(x, given_residual, weight, EPS)
    tight = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(got, want, rtol=tight, atol=tight * 1e-2)
    inputs = [t for t in (x, given_residual, weight) if t is not None]
    grads = [torch.randn_like(want[0]), torch.randn_like(want[1])]
    for a, b in zip(torch.autograd.grad(got, inputs, grads), torch.autograd.grad(want, inputs, grads), strict=True):
        assert a.dtype == b.dtype
        size = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=2 * tight, atol=2 * tight * size + 1e-30)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
def test_eager_not_finite_like_the_oracle(value):
    x, residual, weight = make((4, 48), torch.float32, grad=True)
    x = x.detach().index_put((torch.tensor(2), torch.tensor(7)), torch.tensor(value)).requires_grad_()
    want = reference.add_rms_norm(x, residual, weight, EPS)
    bare = [t.detach() for t in (x, residual, weight)]
    for got in (eager.add_rms_norm(x, residual, weight, EPS), eager.add_rms_norm(*bare, EPS)):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_training_under_autocast_keeps_the_stream_and_the_norm_in_float32():
    """The backward is called inside the autocast region: its matrix-vector products must not become bfloat16."""
    x, residual, weight = make((64, 96), torch.float32, grad=True)
    want = torch.autograd.grad(reference.add_rms_norm(x, residual, weight, EPS)[0].square().sum(), (x, residual, weight))
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = dispatch.add_rms_norm(x, residual, weight, EPS)
        assert normed.dtype == total.dtype == torch.float32
        got = torch.autograd.grad(normed.square().sum(), (x, residual, weight))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    branch = x.detach().bfloat16().requires_grad_()  # what a matrix product under autocast returns
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = dispatch.add_rms_norm(branch, residual, weight, EPS)
    assert normed.dtype == total.dtype == torch.float32
    assert torch.autograd.grad(normed.sum(), branch)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_weight_of_another_dtype(dtypes, recwarn):
    x, residual, _ = make((3, 16), dtypes[0])
    weight = torch.rand(16).to(dtypes[1])
    got, want = dispatch.add_rms_norm(x, residual, weight, EPS), reference.add_rms_norm(x, residual, weight, EPS)
    assert got[0].dtype == dtypes[0]
    assert torch.equal(got[0], want[0])
    assert not recwarn.list


def test_strides_do_not_matter():
    torch.manual_seed(0)
    x = torch.randn(6, 4, 48).transpose(0, 1).requires_grad_()
    residual = torch.randn(48, 4, 6).permute(1, 2, 0).requires_grad_()
    weight = torch.rand(96)[::2].requires_grad_()
    got, want = eager.add_rms_norm(x, residual, weight, EPS), reference.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    loss = [(n.sum() + (t * n).sum()) for n, t in (got, want)]  # a gradient that is expanded, one that is not
    for a, b in zip(*(torch.autograd.grad(value, (x, residual, weight)) for value in loss), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("index", [0, 1])
def test_only_one_output_is_used(index):
    x, residual, weight = make((5, 12), torch.float32, grad=True)
    ways = [form(x, residual, weight, EPS)[index].sin().sum() for form in (eager.add_rms_norm, reference.add_rms_norm)]
    for a, b in zip(*(torch.autograd.grad(way, (x, residual, weight), allow_unused=True) for way in ways), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("grad", [True, False])
def test_shapes_that_do_not_fit(grad):
    x, residual, _ = make((2, 4), torch.float32, grad=grad)
    with pytest.raises(RuntimeError):
        eager.add_rms_norm(x, residual, torch.ones(5), EPS)
    with pytest.raises(RuntimeError):
        eager.add_rms_norm(x, torch.zeros(2, 5), torch.ones(4), EPS)


class Kernel:
    """Stands where the Triton module would; counts calls."""

    def __init__(self, reason: str | None = None) -> None:
        self.calls, self.reason = [], reason

    def supports(self, x, residual, weight):
        return self.reason

    def add_rms_norm(self, x, residual, weight, eps, *, launch=None):
        self.calls.append(launch)
        return reference.add_rms_norm(torch.ones(1, 4), None, torch.ones(4), eps)


class OnCuda:
    """As much of a CUDA tensor as the dispatch looks at before it hands it on."""

    is_cuda, dtype, shape = True, torch.bfloat16, torch.Size((1, 4))


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    monkeypatch.setattr(dispatch, "_kernel", lambda name: made)
    monkeypatch.setattr(dispatch, "eager", SimpleNamespace(add_rms_norm=lambda *a: "eager"))
    return made


def test_cuda_takes_the_kernel_and_the_tuned_launch(kernel):
    dispatch.add_rms_norm(OnCuda(), None, None, EPS)
    with dispatch.using(tuned=Tuned(Launches({("add_rms_norm", (4,), "bfloat16"): {1: "tuned"}}))):
        dispatch.add_rms_norm(OnCuda(), None, None, EPS)
    dispatch.add_rms_norm(OnCuda(), None, None, EPS)
    assert kernel.calls == [None, "tuned", None]


def test_the_kernel_can_be_switched_off(kernel):
    assert dispatch.add_rms_norm(OnCuda(), None, None, EPS, backend="reference") == "eager"
    with dispatch.using(backend="reference"):
        assert dispatch.add_rms_norm(OnCuda(), None, None, EPS) == "eager"
        with dispatch.using(backend="auto"):
            dispatch.add_rms_norm(OnCuda(), None, None, EPS)
    assert len(kernel.calls) == 1
    with pytest.raises(ValueError, match="one of: auto, reference"), dispatch.using(backend="trition"):
        pass


def test_what_the_kernel_does_not_take_is_logged_once(kernel, caplog):
    kernel.reason = "x is float64 (test)"
    with caplog.at_level(logging.WARNING):
        assert [dispatch.add_rms_norm(OnCuda(), None, None, EPS) for _ in range(3)] == ["eager"] * 3
    assert [r.getMessage() for r in caplog.records] == ["kernels: add_rms_norm: x is float64 (test); the eager form runs"]


def test_compiled_code_traces_the_oracle():
    traced = torch.compile(dispatch.add_rms_norm, backend="eager", fullgraph=True)
    x, residual, weight = make((3, 8), torch.float32)
    assert torch.equal(traced(x, residual, weight, EPS)[0], reference.add_rms_norm(x, residual, weight, EPS)[0])


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "EAGLE_KERNELS", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**base, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_works_without_triton_and_says_so_once():
    code = (
        "import sys, logging; logging.basicConfig(format='%(message)s'); sys.modules['triton'] = None\n"
        "import kernels, torch\nfrom kernels import dispatch\n"
        "assert 'triton' not in [m for m in sys.modules if sys.modules[m]]\n"
        "assert dispatch._kernel('add_rms_norm') is None and dispatch._kernel('add_rms_norm') is None\n"
        "dispatch.add_rms_norm(torch.ones(2, 4), None, torch.ones(4), 1e-5)\nassert 'eagle' not in sys.modules"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("triton cannot be imported") == 1


def test_the_environment_variable(monkeypatch):
    monkeypatch.setenv("EAGLE_KERNELS", "reference")
    assert dispatch._initial().backend == "reference"
    monkeypatch.setenv("EAGLE_KERNELS", "of")
    with pytest.raises(ValueError, match="environment variable EAGLE_KERNELS is 'of'; it must be one of: auto, reference"):
        dispatch._initial()
    monkeypatch.delenv("EAGLE_KERNELS")
    assert dispatch._initial().backend == "auto"


def test_transformers_does_not_take_the_folder_for_the_package_of_that_name(tmp_path):
    """From the repository root, `kernels` is this folder; transformers looks for Hugging Face's package called so.

    It goes by the version of the distribution that owns the name (ours), so that version must stay out of the range it accepts.
    """
    code = (
        "import kernels, transformers\nfrom pathlib import Path\n"
        f"assert Path(kernels.__file__).parent == Path({str(ROOT)!r}) / 'kernels'\n"
        "from transformers.utils import is_kernels_available\nassert not is_kernels_available()\n"
        "from transformers import AutoModelForCausalLM\nfrom tests.toys import tiny_target\n"
        f"folder = tiny_target(Path({str(tmp_path)!r}) / 't', layers=1)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "import torch\nassert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
