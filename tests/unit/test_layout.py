"""The laid-out target computes what the target computes, and its weights are counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from eagle.decode.engine import Engine
from eagle.target.layout import PackedLinear, lay_out, weight_bytes
from eagle.target.load import load_target
from kernels.packed import can_pack
from tests.toys import tiny_target

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(8, 8)), reason="this build of torch lays nothing out")


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_text_are_the_targets_own(tmp_path: Path, tied: bool) -> None:
    folder = tiny_target(tmp_path, layers=3, tie=tied)
    plain, packed = load_target(folder, "float32"), lay_out(load_target(folder, "float32"))
    layers = [m for m in packed.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == sum(type(m) is nn.Linear for m in plain.modules())
    assert [layer.extra for layer in layers].count(True) == int(tied)
    tokens = torch.randint(plain.config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(packed(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-5)
    prompts = tokens[:, :5].tolist()
    texts = [
        Engine(model, None, max_length=32, batch=3).generate(prompts, max_new_tokens=16, draft_tokens=0).tokens
        for model in (plain, packed)
    ]
    assert texts[0] == texts[1]
    assert weight_bytes(packed) == weight_bytes(plain) == weight_bytes(plain, held=True)
    embedding = plain.get_input_embeddings().weight
    assert weight_bytes(packed, held=True) - weight_bytes(packed) == (embedding.numel() * 4 if tied else 0)


def test_a_bias_is_kept() -> None:
    layer = nn.Linear(6, 4)
    x = torch.randn(2, 6)
    torch.testing.assert_close(PackedLinear(layer, extra=False)(x), layer(x))
    assert not torch.allclose(PackedLinear(layer, extra=False)(x), x @ layer.weight.T)
