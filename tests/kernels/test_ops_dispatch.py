"""The operations of the fused draft step in the dispatch: oracle on CPU, kernel on GPU, one logged line where it cannot."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.train import objectives
from kernels import dispatch, reference

EPS = 1e-5


def calls(dtype: torch.dtype = torch.float32) -> dict[str, tuple[str, Any]]:
    """{operation: (module of its kernel, call of the dispatch)}; one call of each, on few numbers."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    keys, values, table = random(3, 4, 1, 8), random(3, 4, 1, 8), torch.tensor([[1], [2]], dtype=torch.int32)
    at, out = torch.tensor([0, 2]), torch.zeros(2, dtype=torch.int64)
    return {
        "input_norm": ("input_norm", lambda: dispatch.input_norm(at, random(5, 8), random(2, 8), random(8), random(8), EPS, True)),
        "feature_norms": ("input_norm", lambda: dispatch.feature_norms(random(2, 16), random(2, 8), EPS)),
        "silu_mul": ("silu_mul", lambda: dispatch.silu_mul(random(2, 8))),
        "rope_cache": (
            "rope_cache",
            lambda: dispatch.rope_cache(random(2, 32), torch.ones(4, 4), torch.zeros(4, 4), at, keys, values, table, 2, 1),
        ),
        "cached_attention": (
            "cached_attention", lambda: dispatch.cached_attention(random(2, 2, 8), keys, values, table, at, 0.3, 1),
        ),
        "sample_head": ("sample_head", lambda: dispatch.sample_head(random(2, 8), random(6, 8), None, None, None, at, 1, out=out)),
        "dense_terms": ("overlap_loss", lambda: objectives.dense_terms(random(2, 8), random(2, 8).softmax(-1))),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_the_kernel_runs_where_it_can(name, monkeypatch):
    module, call = calls()[name]
    fake = SimpleNamespace(supports=lambda *tensors: None, **{name: lambda *a, **k: ("kernel", name)})
    monkeypatch.setattr(dispatch, "_kernel", {module: fake}.__getitem__)
    with dispatch.using(backend="triton"):
        assert call() == ("kernel", name)
    assert call() != ("kernel", name)


@pytest.mark.parametrize("name", calls())
def test_what_the_kernel_does_not_take_is_logged_once_and_is_right(name, monkeypatch, caplog):
    module, call = calls()[name]
    fake = SimpleNamespace(supports=lambda *tensors: f"no such {name} (test)")
    monkeypatch.setattr(dispatch, "_kernel", {module: fake}.__getitem__)
    want = call()
    call = calls()[name][1]
    with dispatch.using(backend="triton"), caplog.at_level(logging.WARNING):
        torch.testing.assert_close(call(), want)
        call()
    assert [r.getMessage() for r in caplog.records] == [f"kernels: {module}: no such {name} (test); the eager form runs"]


def test_float64_is_a_reason_of_every_kernel():
    pytest.importorskip("triton")
    from kernels import cached_attention, input_norm, overlap_loss, rope_cache, sample_head, silu_mul

    wide = torch.zeros(2, 2, 8, dtype=torch.float64)
    for reason in (
        cached_attention.supports(wide, wide[None]), input_norm.supports(wide), overlap_loss.supports(wide, wide),
        rope_cache.supports(wide, wide), sample_head.supports(wide, wide), silu_mul.supports(wide),
    ):  # fmt: skip
        assert reason is not None
        assert reason.endswith("is float64")


def test_the_draft_network_is_the_oracles_rope_and_attention():
    """The restated formulas against torch's own operations and the rotation that the draft is trained with."""
    from eagle.draft.ops import rotate

    torch.manual_seed(1)
    heads, kv, width, page = 4, 2, 8, 3
    angle = torch.rand(6, width // 2)
    cos, sin = angle.cos(), angle.sin()
    keys, values = torch.zeros(5, page, kv, width), torch.zeros(5, page, kv, width)
    table = torch.tensor([[4, 1]], dtype=torch.int32)
    written: list[tuple[Tensor, Tensor]] = []
    for position in range(5):
        qkv, at = torch.randn(1, (heads + 2 * kv) * width), torch.tensor([position])
        q = reference.rope_cache(qkv, cos, sin, at, keys, values, table, heads)
        parts = qkv.view(1, -1, 1, width)
        turned = rotate(parts[:, : heads + kv], cos[at][:, None], sin[at][:, None])
        torch.testing.assert_close(q[0], turned[0, :heads, 0])
        written.append((turned[0, heads:], parts[0, heads + kv :]))
    k, v = (torch.cat([pair[i] for pair in written], dim=1)[None] for i in (0, 1))
    want = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(reference.cached_attention(q, keys, values, table, at, 0.5), want[:, :, 0])


def test_the_oracles_loss_is_the_objective():
    torch.manual_seed(2)
    logits, prob = torch.randn(4, 9, dtype=torch.float64, requires_grad=True), torch.rand(4, 9, dtype=torch.float64).softmax(-1)
    for index in (0, 1):
        one, two = (form(logits, prob)[index] for form in (reference.dense_terms, objectives.dense_terms))
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(*(torch.autograd.grad(value.sum(), logits)[0] for value in (one, two)))


def test_philox_is_the_published_one():
    """The known answer of Random123 (Salmon et al. 2011) for zeros, and the moments of the noise made of it."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert int(reference.philox(zero, zero, zero)) == 0x6627E8D5
    noise = reference.gumbel(torch.arange(50), torch.arange(50), 400)
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.03)
    assert float(noise.var()) == pytest.approx(torch.pi**2 / 6, abs=0.08)
