"""The draft vocabulary map."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle.draft.vocab import choose_vocab, coverage, fitting_size, to_maps
from eagle.errors import ConfigError


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=40), data=st.data())
def test_the_most_frequent_ids_and_those_that_must(counts: list[int], data: st.DataObject) -> None:
    total = len(counts)
    must = data.draw(st.lists(st.integers(0, total - 1), max_size=4))
    size = data.draw(st.integers(max(1, len(set(must))), total + 3))
    ids = choose_vocab(np.array(counts), size, must)
    assert len(ids) == min(size, total)
    assert set(must) <= set(ids.tolist())
    assert np.all(np.diff(ids) > 0)
    free = [i for i in range(total) if i not in must]
    inside = [counts[i] for i in free if i in ids]
    outside = [counts[i] for i in free if i not in ids]
    assert not inside or not outside or min(inside) >= max(outside)
    d2t, t2d = to_maps(ids, total)
    assert torch.equal(torch.arange(len(ids)) + d2t, torch.from_numpy(ids))
    assert t2d.nonzero().squeeze(1).tolist() == ids.tolist()
    assert bool((d2t >= 0).all())
    assert bool((d2t.diff() >= 0).all())


def test_few_distinct_tokens_are_filled_up_from_below() -> None:
    counts = np.zeros(10, dtype=np.int64)
    counts[7] = 3
    assert choose_vocab(counts, 4, [9]).tolist() == [0, 1, 7, 9]


def test_a_vocabulary_larger_than_the_distinct_tokens_is_cut() -> None:
    counts = np.zeros(1000, dtype=np.int64)
    counts[:70] = 1
    assert fitting_size(counts, 500) == 128
    assert fitting_size(counts, 100) == 100
    assert fitting_size(counts, 500, range(60, 129)) == 192
    assert fitting_size(counts, 1000) == 1000, "the whole vocabulary needs no map"
    assert fitting_size(np.zeros(1000, dtype=np.int64), 500, [2]) == 64


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="smaller than the 3 ids"):
        choose_vocab(np.ones(10, dtype=np.int64), 2, [1, 2, 3])
    with pytest.raises(ConfigError, match="id 10 is outside"):
        choose_vocab(np.ones(10, dtype=np.int64), 5, [10])
    with pytest.raises(ValueError, match="ascending"):
        to_maps(np.array([3, 3]), 10)


def test_coverage() -> None:
    assert coverage(np.array([1, 2, 3, 4]), np.array([1, 4])) == 0.5
    assert coverage(np.array([], dtype=np.int32), np.array([1])) == 1.0
