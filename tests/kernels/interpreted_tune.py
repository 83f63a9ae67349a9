"""Tuning in Triton's interpreter: every launch of a space computes the same. Not collected by name: `test_triton.py` runs it as a
process of its own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import autotune, dispatch, spaces
from kernels.aot import Report, Specimen
from kernels.occupancy import limits_of
from kernels.spaces import SPACES, Problem
from kernels.tuned import Stamp, Tuned, launches_of
from tests.kernels.compare import close, poison

CPU = torch.device("cpu")
SMALL = {
    "add_rms_norm": (48,), "input_norm": (48,), "feature_norms": (48, 3), "rope_cache": (4, 2, 16), "cached_attention": (4, 2, 16),
    "silu_mul": (300,), "sample_head": (48, 70), "rejection": (90, 40), "dense_terms": (70,),
}  # fmt: skip


def problem(op: str) -> Problem:
    return Problem(op, SMALL[op], "float32", 3)


def tensors(result: Any) -> list[Tensor]:
    given = result if isinstance(result, tuple) else (result,)
    return [tensor for tensor in given if isinstance(tensor, Tensor)]


@pytest.fixture(autouse=True)
def _short_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "CONTEXT", 128)


@pytest.mark.parametrize("op", SPACES)
def test_every_launch_computes_what_the_default_does(op):
    case = problem(op)
    torch.manual_seed(1)
    call = SPACES[op].prepare(case, CPU)
    default, *others = SPACES[op].launches(case)
    others = random.Random(3).sample(others, min(len(others), 5))
    with poison(), torch.no_grad():
        want = tensors(call(default))
        assert want
        for launch in others:
            for one, other in zip(tensors(call(launch)), want, strict=True):
                close(one, other, torch.float32) if one.is_floating_point() else torch.testing.assert_close(one, other)


def read(specimen: Specimen) -> Report:
    return Report("op", specimen.kernel.__name__, 90, specimen.hidden, specimen.dtype, specimen.num_warps, 32, 512, 0)


def timer_for(script: dict[int, float], ran: list[Any]) -> Callable[[Callable[[], Any]], float]:
    def timer(call):
        ran.append(call())
        return script.get(len(ran), 9.0)

    return timer


def test_tuning_runs_the_kernel_and_the_dispatch_takes_the_choice():
    """With a clock that we hold: the fourth launch that is timed is twice as fast as the default."""
    stamp, case, ran = Stamp.here("cpu"), problem("silu_mul"), list[Any]()
    row = autotune.tune(case, stamp, CPU, read, limits_of(90), timer=timer_for({4: 4.0}, ran))
    assert row is not None
    assert (row["median_ms"], row["default_ms"]) == (4.0, 9.0)
    assert row["timed"] == row["launches"] == len(ran)
    assert all(result.shape == (3, 300) for result in ran)
    chosen = SPACES["silu_mul"].module.Launch(**row["launch"])
    assert chosen != SPACES["silu_mul"].module.Launch()
    table = launches_of([row], stamp)
    heard = []
    kernel = SPACES["silu_mul"].module.silu_mul

    def listen(joined, *, launch=None):
        heard.append(launch)
        return kernel(joined, launch=launch)

    with pytest.MonkeyPatch.context() as patch, dispatch.using(backend="triton", tuned=Tuned(table)):
        patch.setattr(SPACES["silu_mul"].module, "silu_mul", listen)
        joined = torch.randn(2, 600)
        got = dispatch.silu_mul(joined)
        dispatch.silu_mul(torch.randn(2, 8))
    assert heard == [chosen, None]
    with dispatch.using(backend="reference"):
        close(got, dispatch.silu_mul(joined), torch.float32)


def test_the_first_launch_is_the_default_and_it_is_kept_unless_another_is_clearly_faster():
    for fastest, kept in ((8.9, True), (8.5, False)):
        row = autotune.tune(
            problem("silu_mul"), Stamp.here("cpu"), CPU, read, limits_of(90), timer=timer_for({3: fastest}, [])
        )
        assert row is not None
        assert (SPACES["silu_mul"].module.Launch(**row["launch"]) == SPACES["silu_mul"].module.Launch()) is kept
