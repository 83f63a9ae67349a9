"""The whole fused draft in Triton's interpreter: every kernel in its place. Not collected by name: `test_triton.py` runs it as
a process of its own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.decode.drafting import EagleDrafter
from eagle.decode.engine import Engine
from eagle.train.objectives import dense_terms
from kernels import dispatch, draft_step, launching
from tests.decode.models import draft, target
from tests.kernels.compare import poison
from tests.kernels.test_graphs import Recorder


def drafted(backend: str, variant: dict[str, Any], heard: list[str]) -> tuple[Tensor, Tensor]:
    """Two rounds of a ragged batch; returns the tokens and the keys written."""
    model = target()
    with dispatch.using(backend=backend), torch.inference_mode(), launching.heard(heard.append):
        drafter = EagleDrafter(draft(model, **variant), model.get_input_embeddings().weight, batch=4, max_length=40)
        torch.manual_seed(5)
        drafter.extend([0, 2, 3], torch.randint(0, 64, (3, 9)), torch.randn(3, 9, 96), [0, 0, 0], [5, 9, 1])
        first = drafter.draft([0, 2, 3], 3, None).tokens
        drafter.extend([3], first[2:, :2], torch.randn(1, 2, 96), [1], [2])
        second = drafter.draft([3, 0], 3, None).tokens
        return torch.cat([first, second]), drafter.store.memory[0]


VARIANTS = [{}, {"norm_before_residual": True, "norm_output": False}, {"num_kv_heads": 4, "vocab": 64}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_draft_is_the_oracles(variant):
    heard: list[str] = []
    with poison():
        got, keys = drafted("triton", variant, heard)
    assert {"input_norm_kernel", "feature_norms_kernel", "rope_cache_kernel", "cached_attention_kernel"} <= set(heard)
    assert {"silu_mul_kernel", "sample_head_kernel", "choose_kernel", "forward_kernel"} <= set(heard)
    silent: list[str] = []
    want, wanted_keys = drafted("reference", variant, silent)
    assert silent == []
    assert torch.equal(got, want)
    assert torch.allclose(keys, wanted_keys, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_kernels_switched_off_give_the_same_text(temperature):
    answers = []
    for backend in ("triton", "reference"):
        model = target()
        with dispatch.using(backend=backend), torch.inference_mode():
            engine = Engine(model, draft(model), max_length=40, batch=2)
            prompts = [[3, 5, 7], [11, 2]]
            answers.append(engine.generate(prompts, max_new_tokens=8, draft_tokens=2, temperature=temperature, ignore_eos=True))
    assert answers[0].tokens == answers[1].tokens


def test_drawn_drafts_depend_on_seed_and_position_and_count_their_probability():
    model = target()
    with dispatch.using(backend="triton"), torch.inference_mode():
        drafter = EagleDrafter(draft(model), model.get_input_embeddings().weight, batch=3, max_length=40)
        drafter.extend([0, 1, 2], torch.ones(3, 5, dtype=torch.int64), torch.ones(3, 5, 96), [0, 0, 0], [5, 5, 5])
        cache, positions = drafter._places([0, 1, 2], 4)
        state = drafter._normed[:3], drafter._feedback[:3]
        seeds, warmth = torch.tensor([1, 2, 1]), torch.tensor([3.0, 3.0, 3.0])
        tokens, log_q = draft_step.draft(drafter._weights, cache, *state, positions, 4, warmth, seeds)
        assert torch.equal(tokens[0], tokens[2])
        assert not torch.equal(tokens[0], tokens[1])
        assert log_q is not None
        assert ((log_q < 0) & (log_q > -20)).all()
        first = (state[0] @ drafter._head.T / 3.0).log_softmax(-1)
        index = torch.searchsorted(drafter.ids, tokens[:, 0])
        assert torch.allclose(first.gather(1, index[:, None])[:, 0], log_q[:, 0], atol=1e-5)
        with pytest.raises(ValueError, match="1 at least"):
            draft_step.draft(drafter._weights, cache, *state, positions, 0)


def test_the_training_objective_takes_the_kernel():
    torch.manual_seed(0)
    logits, prob = torch.randn(5, 70, requires_grad=True), torch.randn(5, 70).softmax(-1)
    found, heard = [], []
    for backend in ("triton", "reference"):
        with dispatch.using(backend=backend), launching.heard(heard.append):
            alpha, entropy = dense_terms(logits, prob)
            found.append((alpha, entropy, torch.autograd.grad((2 * alpha - entropy).sum(), logits)[0]))
    assert heard == ["overlap_kernel", "overlap_backward_kernel"]
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, atol=1e-5)


def test_training_in_half_precision_takes_the_kernels():
    net, heard = draft(target()).requires_grad_(), []
    x = torch.randn(2, 3, net.spec.hidden_size)
    mlp = net.layers[0].mlp
    found = []
    for backend in ("triton", "reference"):
        with dispatch.using(backend=backend), launching.heard(heard.append), net.half_precision():
            out = mlp(x)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), list(mlp.parameters()))))
    assert heard == ["silu_mul_kernel", "silu_mul_backward_kernel"]
    for one, two in zip(*found, strict=True):
        assert one.dtype == two.dtype
        assert torch.allclose(one.float(), two.float(), rtol=0.05, atol=0.02 * float(two.detach().abs().max()))


def test_the_engine_drafts_through_graphs_where_they_can_be_had():
    """With a stand-in that runs the loop again: the same text as kernel by kernel, and one graph a number of rows."""
    model = target()
    with dispatch.using(backend="triton"), torch.inference_mode():
        record, answers = Recorder(), []
        for capture in (record, None):
            drafter = EagleDrafter.beside(model, draft(model), batch=2, max_length=40, capture=capture)
            engine = Engine(model, drafter, max_length=40, batch=2)
            answers.append(engine.generate([[3, 5, 7], [11, 2]], max_new_tokens=8, draft_tokens=2, ignore_eos=True).tokens)
    assert answers[0] == answers[1]
    assert set(record.shapes) <= {(1, 2), (2, 2), (1, 1), (2, 1)}
    assert record.replays > len(record.shapes)
