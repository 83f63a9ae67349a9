"""Sampling settings: equal to transformers' warpers, row by row, whatever the other rows ask for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle.decode.sampling import SamplingParams, Warp, distribution

MIXED = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.5, top_k=5, top_p=0.6),
    SamplingParams(temperature=2.0, top_k=1000, top_p=1e-9),
    SamplingParams(top_k=2, top_p=0.1),
]


def reference(logits: Tensor, params: SamplingParams) -> Tensor:
    """What `generate` of transformers samples from: logits [m, V] -> probabilities [m, V]."""
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return torch.softmax(warpers(torch.zeros(len(logits), 1).long(), logits.float()), -1)  # type: ignore[arg-type]


def logits_of(count: int, inner: tuple[int, ...], vocab: int, seed: int = 0) -> Tensor:
    """Few distinct values, so that ties at the k-th place and at the edge of the nucleus are the rule."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-6, 7, (count, *inner, vocab), generator=generator) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [(), (3,), (2, 3)], ids=str)
def test_mixed_rows_are_those_of_transformers(inner: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = logits_of(len(MIXED), inner, 23).to(dtype)
    logits[1, ..., 4] = -torch.inf
    found = distribution(logits, Warp.of(MIXED, "cpu"))
    assert found.dtype == torch.float32
    for row, params in enumerate(MIXED):
        assert found[row].reshape(-1, 23).equal(reference(logits[row].reshape(-1, 23), params))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1e-5, 0.3, 1, 1.7]),
            top_k=st.integers(0, 12),
            top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.75, 0.9, 0.999999, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_any_mixture(params: list[SamplingParams], seed: int, tied: bool) -> None:
    logits = logits_of(len(params), (2,), 9, seed)
    if not tied:
        logits = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    found = distribution(logits, Warp.of(params, "cpu"))
    for row, setting in enumerate(params):
        assert found[row].equal(reference(logits[row], setting))
        assert found[row].sum(-1).tolist() == pytest.approx([1.0] * 2, abs=1e-5)


def test_the_edges_that_are_easy_to_get_wrong() -> None:
    tied = torch.tensor([[2.0, 2.0, 2.0, 1.0]])
    assert distribution(tied, Warp.of([SamplingParams(1.0, top_k=2)], "cpu"))[0].tolist() == pytest.approx([1 / 3] * 3 + [0])
    half = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    kept = distribution(half, Warp.of([SamplingParams(1.0, top_p=0.5)], "cpu"))[0]
    assert kept.tolist() == [1, 0, 0, 0]  # the smallest set that has 0.5
    kept = distribution(half, Warp.of([SamplingParams(1.0, top_p=0.5001)], "cpu"))[0]
    assert kept.tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    both = distribution(half, Warp.of([SamplingParams(1.0, top_k=2, top_p=0.6)], "cpu"))[0]
    assert both.tolist() == [1, 0, 0, 0]  # top-p sees what top-k left: 2/3 and 1/3
    assert distribution(tied, Warp.of([SamplingParams()], "cpu"))[0].tolist() == [1, 0, 0, 0]


def test_host_flags_and_take() -> None:
    warp = Warp.of(MIXED, "cpu")
    assert not warp.greedy
    assert not warp.plain
    assert warp.take([2, 6]).greedy
    assert not warp.take([2, 6]).plain
    assert warp.take([0, 2]).plain
    taken = warp.take([4, 1])
    assert taken.rows == (MIXED[4], MIXED[1])
    assert taken.temperature.tolist() == [0.5, pytest.approx(1.3)]
    assert taken.top_k.tolist() == [5, 3]
    assert taken.top_p.tolist() == [0.6, 1.0]
    logits = logits_of(len(MIXED), (2,), 11)
    assert distribution(logits[[4, 1]], taken).equal(distribution(logits, warp)[[4, 1]])


def test_no_rows() -> None:
    empty = Warp.of([], "cpu")
    assert empty.greedy
    assert distribution(torch.zeros(0, 3, 5), empty).shape == (0, 3, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": None}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.0}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_what_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        SamplingParams(**change)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
