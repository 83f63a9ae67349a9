"""KV memory: what is written is what is seen, and only that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config

from eagle.decode.cache import ATTENTION, KeyValueStore, MaskMaker, attend, ragged_attention
from eagle.errors import ConfigError
from tests.decode.models import target


def attention_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, window: int | None
) -> torch.Tensor:
    """One query [heads, d] over one row's keys [S, kv_heads, d]."""
    low = 0 if window is None else max(0, position - window + 1)
    keys, values = (x[low : position + 1].repeat_interleave(query.shape[0] // x.shape[1], dim=1) for x in (keys, values))
    weights = torch.softmax(torch.einsum("hd,shd->hs", query, keys) * query.shape[-1] ** -0.5, -1)
    return torch.einsum("hs,shd->hd", weights, values)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([1, 3]),
    st.sampled_from([None, 4]),
    st.integers(0, 2),
    st.booleans(),
)
def test_ragged_attention(starts: list[int], width: int, groups: int, window: int | None, first: int, equal: bool) -> None:
    starts = [starts[0]] * len(starts) if equal else starts
    torch.manual_seed(0)
    store = KeyValueStore(2, 6, 16, 2, 8, torch.float32, "cpu")
    full_k, full_v = torch.randn(6, 16, 2, 8), torch.randn(6, 16, 2, 8)
    store._memory[0, 1], store._memory[1, 1] = full_k, full_v  # leftovers everywhere: only the mask hides them
    query = torch.randn(len(starts), 2 * groups, width, 8)
    new_k, new_v = torch.randn(len(starts), width, 2, 8), torch.randn(len(starts), width, 2, 8)
    positions = store.plan(starts, width, list(range(first, first + len(starts))))
    assert positions.tolist() == [[s + t for t in range(width)] for s in starts]
    store.write(1, new_k, new_v)
    found = attend(query, *store.view(1), store.mask(groups, torch.float32, window))
    for row, start in enumerate(starts):
        full_k[first + row, start : start + width], full_v[first + row, start : start + width] = new_k[row], new_v[row]
        for t in range(width):
            wanted = attention_by_hand(query[row, :, t], full_k[first + row], full_v[first + row], start + t, window)
            assert torch.allclose(found[row, t], wanted, atol=1e-5)
    assert torch.equal(store._memory[0, 1], full_k)
    assert not store._memory[:, 0].any()


def test_move_and_limits() -> None:
    store = KeyValueStore(1, 2, 8, 1, 2, torch.float32, "cpu")
    store.plan([0, 3], 2)
    store.write(0, torch.arange(8.0).view(2, 2, 1, 2), torch.ones(2, 2, 1, 2))
    store.move(1, 0, 5)
    assert store._memory[0, 0, 0, :5].equal(store._memory[0, 0, 1, :5])
    assert store.bytes == 2 * 2 * 8 * 2 * 4
    with pytest.raises(ValueError, match="do not fit"):
        store.plan([0, 7], 2)
    with pytest.raises(ValueError, match="do not fit"):
        store.plan([0, 0], 2, rows=[1, 2])


def test_setting_of_target_is_restored() -> None:
    model = target()
    before = model.config._attn_implementation
    inside = []

    def fail() -> None:
        with ragged_attention(model):
            inside.append(model.config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [ATTENTION]
    assert model.config._attn_implementation == before


def test_unsupported_layer_kind() -> None:
    config = Gemma2Config(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(ConfigError, match="chunked_attention"):
        MaskMaker(config, torch.float32)


def test_causal_prefill_matches_sdpa() -> None:
    store = KeyValueStore(1, 2, 16, 2, 8, torch.float32, "cpu")
    store.plan([0, 0], 7)
    k, v, q = torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 4, 7, 8)
    store.write(0, k, v)
    assert store.mask(2, torch.float32) is None
    wanted = F.scaled_dot_product_attention(q, *(x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v)), is_causal=True)
    assert torch.allclose(attend(q, *store.view(0), None), wanted.transpose(1, 2), atol=1e-6)
