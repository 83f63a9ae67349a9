"""The direct CPU operations against their eager oracles: values, odd shapes, both dtypes, NaN, slices, and how they are built."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native as module
from kernels.dispatch import using
from kernels.native import Native, native

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def ops(dtype: torch.dtype) -> Native:
    found = native(dtype, CPU)
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


def close(found: Tensor, wanted: Tensor) -> None:
    """In bfloat16 the last bit may differ where float32 sums were added in another order."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance / 10, equal_nan=True)


def wide_norm(x: Tensor, weight: Tensor) -> Tensor:
    return (F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 576), (3, 5, 37), (0, 1, 8), (7, 1, 2048)])
def test_add_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=random).to(dtype)
    normed, total = ops(dtype).add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, wide_norm(x + residual, weight))
    alone, same = ops(dtype).add_rms_norm(x, None, weight, 1e-5)
    assert same is x
    close(alone, wide_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_slices_into_a_slice(dtype: torch.dtype) -> None:
    wide = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight, out = torch.rand(20).to(dtype), torch.full((2, 3, 50), 7.0, dtype=dtype)
    ops(dtype).add_rms_norm(wide[..., 20:], None, weight, 1e-5, out[..., 10:30])
    close(out[..., 10:30], wide_norm(wide[..., 20:].contiguous(), weight))
    assert (out[..., :10] == 7).all()
    assert (out[..., 30:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_and_argmax(dtype: torch.dtype) -> None:
    joined = 4 * torch.randn(3, 2, 2 * 37, generator=torch.Generator().manual_seed(3)).to(dtype)
    joined[0, 0, 0], joined[0, 0, 1] = float("inf"), float("-inf")
    gate, up = joined.chunk(2, dim=-1)
    close(ops(dtype).silu_mul(joined), (F.silu(gate.float()).to(dtype).float() * up.float()).to(dtype))
    logits = torch.randn(5, 101, generator=torch.Generator().manual_seed(4)).to(dtype)
    logits[1, 7] = logits[1, 93] = 50.0  # a tie: the first one
    logits[2, 40] = float("nan")
    logits[3] = float("-inf")
    found = ops(dtype).argmax(logits).tolist()
    assert found[1] == 7
    assert found[2] == 40
    assert found[3] == 0
    assert found[0] == int(logits[0].argmax())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "dim"), [(8, 4, 64), (3, 1, 10), (2, 2, 128)])
@pytest.mark.parametrize("ragged", [False, True])
def test_rotation_cache_and_attention(dtype: torch.dtype, heads: int, kv: int, dim: int, ragged: bool) -> None:
    random = torch.Generator().manual_seed(5)
    batch, length, width = 4, 24, 3
    angles = torch.rand(length, dim // 2, generator=random) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    joined = torch.randn(2, width, heads + 2 * kv, dim, generator=random).to(dtype)
    keys, values = (torch.randn(batch * length, kv * dim, generator=random).to(dtype) for _ in range(2))
    starts = torch.tensor([9, 4] if ragged else [9, 9])
    rows = torch.tensor([3, 1]) if ragged else torch.tensor([1, 2])
    positions = starts[:, None] + torch.arange(width)
    index = rows[:, None] * length + positions
    turned = joined[:, :, : heads + kv].float()
    turned = turned * cos[positions][:, :, None] + turned.roll(dim // 2, -1) * sin[positions][:, :, None]
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys[index.flatten()] = turned[:, :, heads:].to(dtype).reshape(-1, kv * dim)
    wanted_values[index.flatten()] = joined[:, :, heads + kv :].reshape(-1, kv * dim)
    run = ops(dtype)
    run.rope_write(joined, cos, sin, positions, keys, values, index.flatten() if ragged else None, kv, 1, 9, length)
    close(joined[:, :, : heads + kv], turned.to(dtype))
    close(keys, wanted_keys)
    assert torch.equal(values, wanted_values)
    out = run.attend(joined, keys, values, positions, rows if ragged else None, kv, 1, length)
    for r in range(2):
        for t in range(width):
            line = keys[rows[r] * length :][: positions[r, t] + 1].view(-1, kv, dim).float().repeat_interleave(heads // kv, 1)
            held = values[rows[r] * length :][: positions[r, t] + 1].view(-1, kv, dim).float().repeat_interleave(heads // kv, 1)
            weights = (torch.einsum("hd,phd->hp", joined[r, t, :heads].float(), line) * dim**-0.5).softmax(-1)
            close(out[r, t], torch.einsum("hp,phd->hd", weights, held).to(dtype))


def test_not_on_other_devices_dtypes_or_when_switched_off() -> None:
    assert native(torch.float16, CPU) is None
    assert native(torch.float32, torch.device("meta")) is None
    with using(backend="reference"):
        assert native(torch.float32, CPU) is None


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "COMPILERS", ("no-such-compiler",))
    module._library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native(torch.float32, CPU) is None
        assert native(torch.bfloat16, CPU) is None
    module._library.cache_clear()
    assert caplog.text.count("no C++ compiler") == 1


def test_a_compiler_that_fails_is_named_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv(module.CACHE, str(folder))
    monkeypatch.setattr(module, "FLAGS", ("--no-such-option",))
    module._library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native(torch.float32, CPU) is None
    module._library.cache_clear()
    assert "native.cpp was not built" in caplog.text
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_may_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    monkeypatch.setenv(module.CACHE, str(shared))
    assert module._cache_folder() != shared
    shared.chmod(0o700)
    assert module._cache_folder() == shared
