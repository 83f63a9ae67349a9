"""Taps against transformers' own output_hidden_states, on toys of 1 to 8 layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle.errors import ConfigError
from eagle.target.load import load_target
from eagle.target.taps import HiddenTaps, default_aux_layers, resolve_aux_layers
from tests.toys import tiny_target


@pytest.mark.parametrize("layers", range(1, 9))
def test_taps_are_the_hidden_states_before_the_final_norm(tmp_path, layers):
    model = load_target(tiny_target(tmp_path, layers=layers, hidden=32, heads=2, kv_heads=1, head_dim=16), "float32")
    tokens = torch.randint(3, 300, (2, 7), generator=torch.Generator().manual_seed(layers))
    every = tuple(range(layers + 1))
    with torch.no_grad(), HiddenTaps(model, every) as taps:
        output = model(tokens, output_hidden_states=True)
        tapped = taps.concat()
    assert tapped.shape == (2, 7, (layers + 1) * 32)
    states = tapped.split(32, dim=-1)
    for index in range(layers):
        assert torch.equal(states[index], output.hidden_states[index]), index
    last = model.model.norm(states[layers])
    torch.testing.assert_close(last, output.hidden_states[layers], rtol=0, atol=0)
    assert not torch.equal(states[layers], output.hidden_states[layers])


def test_taps_follow_the_latest_forward_and_the_given_ids(tmp_path):
    model = load_target(tiny_target(tmp_path, layers=4), "float32")
    with torch.no_grad(), HiddenTaps(model, (3, 1, 3)) as taps:
        assert taps.layers == (1, 3)
        model(torch.tensor([[5, 6, 7]]))
        first = taps.concat().clone()
        output = model(torch.tensor([[9, 8]]), output_hidden_states=True)
        assert first.shape == (1, 3, 128)
        assert torch.equal(taps.concat(), torch.cat([output.hidden_states[1], output.hidden_states[3]], dim=-1))
        taps.clear()
        with pytest.raises(RuntimeError, match="no hidden state of layer 1"):
            taps.concat()


def test_hooks_are_gone_after_the_context(tmp_path):
    model = load_target(tiny_target(tmp_path, layers=2), "float32")
    with HiddenTaps(model, (0, 2)):
        pass
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.model.layers)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2)), (4, (1, 2)), (5, (2,)), (6, (2, 3)),
     (7, (2, 3, 4)), (30, (2, 15, 27)), (80, (2, 40, 77))],
)
def test_default_layers_are_distinct_and_inside(layers, expected):
    assert default_aux_layers(layers) == expected
    assert resolve_aux_layers(None, layers) == expected


def test_configured_layers_are_checked():
    assert resolve_aux_layers([4, 0, 2, 4], 4) == (0, 2, 4)
    with pytest.raises(ConfigError, match=r"5 is outside 0\.\.4"):
        resolve_aux_layers([2, 5], 4)
    with pytest.raises(ConfigError, match="at least one"):
        resolve_aux_layers([], 4)


def test_another_architecture_is_refused():
    with pytest.raises(ConfigError, match=r"Linear has no model\.layers"):
        HiddenTaps(nn.Linear(2, 2), (1,))
