"""Launches of a draft step, counted without a GPU: the counter itself, and the bound of F4.1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from benchmarks.kernels import LLAMA_8B
from eagle.bench import launches
from eagle.bench.launches import count
from kernels import dispatch
from kernels.launches import launched

pytest.importorskip("triton")


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def test_views_and_memory_are_no_launches():
    x = empty(4, 8)
    assert launched(lambda: torch.empty_like(x[1:].t().reshape(8, 3).unflatten(1, (3, 1)).split(2)[0]), fused=False) == []
    assert launched(lambda: x.to(torch.bfloat16).contiguous(), fused=False) == []


def test_every_kernel_is_counted_once_and_in_order():
    x, weight = empty(4, 8), empty(6, 8)

    def call() -> torch.Tensor:
        y = functional.linear(functional.rms_norm(x, (8,), empty(8), 1e-5), weight)
        y += 1
        return torch.cat([y.t().contiguous(), y.float().bfloat16().t()]).argmax()

    assert launched(call, fused=False) == ["rms_norm", "mm", "add_", "clone", "_to_copy", "_to_copy", "cat", "argmax"]
    q = empty(1, 2, 3, 8)
    assert launched(lambda: functional.scaled_dot_product_attention(q, q, q) * 2, fused=False) == [
        "scaled_dot_product_attention", "mul",
    ]  # fmt: skip


def test_kernels_are_heard_and_not_run():
    x, weight = empty(4, 8), empty(8)
    assert launched(lambda: dispatch.add_rms_norm(x, x, weight, 1e-5), fused=True) == ["forward_kernel"]
    assert launched(lambda: dispatch.silu_mul(x), fused=True) == ["silu_mul_kernel"]
    assert launched(lambda: dispatch.add_rms_norm(x, x, weight, 1e-5), fused=False) == ["add", "rms_norm"]


@pytest.mark.parametrize(("batch", "context", "splits"), [(1, 512, False), (1, 4096, True), (32, 4096, False)])
def test_a_fused_step_of_four_layers_launches_at_most_0_60_of_eager(batch, context, splits):
    found = count(LLAMA_8B, batch, context)
    layers = LLAMA_8B.num_layers
    assert found.fused is not None
    assert found.fused.total() == 9 * layers + 3 + layers * splits
    assert found.fused["mm"] == 4 * layers
    assert found.fused.total() <= 0.60 * found.eager.total()
    assert found.fused.total() <= 0.60 * found.engine.total()


def test_the_count_grows_with_the_layers_only():
    two, four = (count(replace(LLAMA_8B, num_layers=layers), 1, 512) for layers in (2, 4))
    assert four.fused - two.fused == {
        "mm": 8, "forward_kernel": 4, "rope_cache_kernel": 2, "cached_attention_kernel": 2, "silu_mul_kernel": 2,
    }  # fmt: skip
    assert count(replace(LLAMA_8B, vocab_size=32000), 1, 512).fused == four.fused


@pytest.mark.parametrize(
    "variant",
    [
        {"hidden_size": 2048}, {"fc_norm": False, "norm_output": False, "norm_before_residual": True}, {"head_dim": 72},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 131072},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }},
    ],
    ids=lambda variant: next(iter(variant)),
)  # fmt: skip
def test_every_kind_of_draft_is_counted(variant):
    spec = replace(LLAMA_8B, **variant)
    found = count(spec, 1, spec.max_position_embeddings)
    assert found.fused is not None
    assert found.fused.total() == 9 * 4 + 3 + 4


def test_a_head_that_the_attention_kernel_does_not_take_is_no_fused_step():
    found = count(replace(LLAMA_8B, head_dim=256), 1, 64)
    assert found.fused is not None
    assert found.fused["cached_attention_kernel"] == found.fused["rope_cache_kernel"] == 0
    assert found.fused["scaled_dot_product_attention"] == 4


def test_without_triton_there_is_no_fused_row(monkeypatch):
    monkeypatch.setattr(launches.importlib.util, "find_spec", lambda name: None)
    found = count(LLAMA_8B, 1, 64)
    assert found.fused is None
    assert [row["form"] for row in found.table()] == ["eager", "engine without kernels"]
