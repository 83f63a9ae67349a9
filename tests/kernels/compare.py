"""How interpreted kernels are compared with the oracle, shared by the interpreted tests.

The interpreter truncates float32 to bfloat16 where hardware rounds: 16-bit results may be one unit in the last place off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ULP = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def close(got: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Equal within one unit in the last place of `dtype`, and `scale` units of the largest number where terms cancel."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    got, want = got.detach().double(), want.detach().double()
    slack = 1e-6 + scale * ULP[dtype] * (float(want.abs().max()) if want.numel() else 0.0)
    torch.testing.assert_close(got, want, rtol=ULP[dtype], atol=slack)


@contextmanager
def poison() -> Iterator[None]:
    """Fill new uninitialised memory with NaN (floats) or the largest number (integers) inside: what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        assert torch.empty(2).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
