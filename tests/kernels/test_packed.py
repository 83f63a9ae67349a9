"""Products with laid-out weights are those of plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.packed import can_pack, linear, packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 576, 1024), (1, 1, 1), (3, 37, 53), (4, 576, 8192), (129, 64, 72)])
def test_equals_the_plain_product(dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(outer, inner, dtype=dtype), torch.randn(2, rows, inner, dtype=dtype)
    with torch.inference_mode():
        found, exact = linear(x, packed(weight)), x.double() @ weight.double().T
    assert found.shape == (2, rows, outer)
    assert found.dtype == dtype
    # fp32 sums of `inner` products; bf16 rounds the result once (half an ulp, 2^-9 relative) after fp32 sums.
    scale = x.double().abs() @ weight.double().abs().T
    bound = scale * inner * 2.0**-24 + (exact.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0.0)
    assert bool(((found.double() - exact).abs() <= bound + 1e-12).all())


def test_what_cannot_be_packed_stays() -> None:
    for weight in (torch.zeros(3, 4, dtype=torch.float64), torch.zeros(2, 3, 4), torch.zeros(3, 4, device="meta")):
        assert not can_pack(weight)
        assert packed(weight) is weight
    weight, x = torch.randn(5, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_here_the_fast_path_is_taken() -> None:
    """On CPU builds of torch with oneDNN (all that are tested) the test above must not compare a thing with itself."""
    if torch.backends.mkldnn.is_available():
        assert packed(torch.randn(8, 16)).is_mkldnn
