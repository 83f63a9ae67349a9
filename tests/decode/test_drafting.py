"""The fused drafter computes DraftModel.step, and keeps its cache as vLLM does."""

from __future__ import annotations

import pytest
import torch

from eagle.decode import drafting
from eagle.decode.cache import CachedAttention, KeyValueStore
from eagle.decode.drafting import EagleDrafter
from eagle.decode.proposal import MAX_DRAFT_TOKENS, Draws
from eagle.decode.sampling import SamplingParams, Warp
from kernels import draft_step
from tests.decode.models import draft, target

VARIANTS = [
    {},
    {"norm_output": False},
    {"norm_before_residual": True},
    {"fc_norm": False},
    {"num_kv_heads": 4},
    {"num_layers": 1},
    {"vocab": 64},
    {"hidden_size": 48},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equals_the_model(variant: dict) -> None:
    model = target()
    net = draft(model, **variant)
    spec = net.spec
    drafter = EagleDrafter(net, model.get_input_embeddings().weight, batch=3, max_length=40)
    store = KeyValueStore(spec.num_layers, 3, 40, spec.num_kv_heads, spec.head_dim, torch.float32, "cpu")
    attention = CachedAttention(store, spec.num_heads // spec.num_kv_heads, torch.float32)
    with torch.no_grad():
        for starts, width in (([0, 0, 0], 6), ([6, 4, 5], 1), ([7, 5, 6], 1), ([6, 5, 3], 4)):
            tokens, aux = torch.randint(0, 64, (3, width)), torch.randn(3, width, 3 * 32)
            hidden = net.fuse(aux)
            assert torch.allclose(drafter.fuse(aux), hidden, atol=1e-5)
            wanted = net.step(tokens, hidden, store.plan(starts, width), attention)
            for found, value in zip(drafter.forward([0, 1, 2], tokens, hidden, starts), wanted, strict=True):
                assert torch.allclose(found, value, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_draft_is_the_plain_loop(temperature: float) -> None:
    """Drafts of a ragged batch are those of each row alone, computed from scratch without a cache."""
    model = target()
    net = draft(model)
    drafter = EagleDrafter(net, model.get_input_embeddings().weight, batch=4, max_length=40)
    counts, length = [5, 9, 1], 4
    tokens, aux = torch.randint(0, 64, (3, 9)), torch.randn(3, 9, 3 * 32)
    rows = [0, 2, 3]
    warp = Warp.of([SamplingParams(temperature)] * 3, "cpu")
    draws = Draws(warp, torch.rand(3, length, dtype=torch.float64)) if temperature else None
    with torch.no_grad():
        drafter.extend(rows, tokens, aux, [0, 0, 0], counts)
        found = drafter.draft(rows, length, draws)
        for row, count in enumerate(counts):
            text, states = tokens[row : row + 1, :count], net.fuse(aux[row : row + 1, :count])
            for step in range(length):
                store = KeyValueStore(2, 1, 40, 2, 16, torch.float32, "cpu")
                normed, feedback = net.step(text, states, store.plan([0], text.shape[1]), CachedAttention(store, 2, torch.float32))
                logits = net.logits(normed[:, -1])
                if draws is None:
                    index = logits.argmax(-1)
                else:
                    q = torch.softmax(logits / temperature, -1)
                    assert torch.allclose(found.probabilities[row, step], q[0], atol=1e-5)
                    index = (found.ids == found.tokens[row, step]).nonzero()[:, 0]
                    assert found.chosen[row, step] == pytest.approx(float(q[0, index]), abs=1e-5)
                assert found.tokens[row, step] == net.to_target(index)[0]
                text = torch.cat([text, net.to_target(index)[None]], 1)
                states = torch.cat([states, feedback[:, -1:]], 1)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_fused_step_is_the_plain_one(variant: dict, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of GPUs, here on its oracles, drafts what the plain path drafts and leaves the same cache."""
    model = target()
    net = draft(model, **variant)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(drafting, "takes_kernels", lambda tensor, fused=fused: fused)
        monkeypatch.setattr(draft_step, "takes", lambda *numbers, fused=fused: fused)
        drafter = EagleDrafter(net, model.get_input_embeddings().weight, batch=4, max_length=40)
        torch.manual_seed(5)
        warp = Warp.of([SamplingParams(temperature)] * 3, "cpu")
        draws = Draws(warp, torch.rand(3, 4, dtype=torch.float64)) if temperature else None
        with torch.no_grad():
            drafter.extend([0, 2, 3], torch.randint(0, 64, (3, 9)), torch.randn(3, 9, 3 * 32), [0, 0, 0], [5, 9, 1])
            found.append((drafter.draft([0, 2, 3], 4, draws), drafter.store.memory))
    (plain, cache), (other, other_cache) = found
    assert torch.equal(plain.tokens, other.tokens)
    if temperature:
        assert torch.allclose(plain.probabilities, other.probabilities, atol=1e-5)
    for one, two in zip(cache, other_cache, strict=True):
        assert torch.allclose(one, two, atol=1e-4)  # float32 sums in another order, four layers deep


def test_a_fused_draft_beyond_the_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "takes_kernels", lambda tensor: True)
    monkeypatch.setattr(draft_step, "takes", lambda *numbers: True)
    model = target()
    drafter = EagleDrafter(draft(model), model.get_input_embeddings().weight, batch=1, max_length=4, reach=2)
    with torch.no_grad():
        drafter.extend([0], torch.zeros(1, 4, dtype=torch.int64), torch.randn(1, 4, 96), [0], [4])
        assert drafter.draft([0], 3, None).tokens.shape == (1, 3)
        with pytest.raises(ValueError, match="up to position 7 does not fit rows of 6"):
            drafter.draft([0], 4, None)


def test_bytes() -> None:
    model = target()
    net = draft(model)
    drafter = EagleDrafter(net, model.get_input_embeddings().weight, batch=1, max_length=10)
    assert drafter.weight_bytes == 4 * net.num_parameters()
    assert drafter.state_bytes == 2 * 2 * (10 + MAX_DRAFT_TOKENS + 1) * 2 * 16 * 4
