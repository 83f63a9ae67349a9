"""Prompt lookup against a search that reads the whole text each time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle.decode.ngram import NgramDrafter


def searched(text: list[int], length: int, longest: int, shortest: int) -> list[int]:
    """The definition: the last earlier occurrence of the longest suffix; what follows it, read on into the draft itself."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                known = list(text)
                for step in range(length):
                    known.append(known[end + step])
                return known[len(text) :]
    return [text[-1]] * length


def tell(drafter: NgramDrafter, row: int, text: list[int], start: int = 0) -> None:
    new = text[start:]
    drafter.extend([row], torch.tensor([[*new, 99, 99]]), None, [start], [len(new)])  # 99s: beyond the count


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    drafter = NgramDrafter(1, 64, longest=3)
    tell(drafter, 0, [5, 6, 7, 8, 9, 4, 7, 3, 5, 6, 7])  # (5, 6, 7) was followed by 8; the later (7) by 3
    assert drafter.draft([0], 4, None).tokens.tolist() == [[8, 9, 4, 7]]


def test_the_last_of_two_occurrences_wins() -> None:
    drafter = NgramDrafter(1, 64, longest=2)
    tell(drafter, 0, [1, 2, 3, 1, 2, 4, 1, 2])
    assert drafter.draft([0], 1, None).tokens.tolist() == [[4]]


def test_a_loop_is_continued_beyond_the_end_of_the_text() -> None:
    drafter = NgramDrafter(1, 64)
    tell(drafter, 0, [3, 1, 2, 1, 2])
    assert drafter.draft([0], 5, None).tokens.tolist() == [[1, 2, 1, 2, 1]]


def test_without_a_match_the_last_token_is_padding() -> None:
    drafter = NgramDrafter(1, 64)
    tell(drafter, 0, [1, 2, 3])
    assert drafter.draft([0], 3, None).tokens.tolist() == [[3, 3, 3]]
    short = NgramDrafter(1, 64, longest=3, shortest=2)  # a single equal token is no match here
    tell(short, 0, [7, 1, 7])
    assert short.draft([0], 2, None).tokens.tolist() == [[7, 7]]
    assert NgramDrafter(1, 64).state_bytes > short.state_bytes > 0
    assert short.weight_bytes == 0


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.data(),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_any_text_told_in_any_parts_gives_what_a_search_finds(
    text: list[int], data: st.DataObject, length: int, longest: int, shortest: int
) -> None:
    longest = max(longest, shortest)
    drafter = NgramDrafter(2, 64, longest=longest, shortest=shortest)
    tell(drafter, 1, [0, 1, 2, 3])  # a former request, which must leave nothing behind
    cut = data.draw(st.integers(1, len(text)))
    tell(drafter, 1, text[:cut])
    if cut < len(text):
        tell(drafter, 1, text, cut)
    assert drafter.draft([1], length, None).tokens.tolist() == [searched(text, length, longest, shortest)]


def test_rows_are_apart_and_move() -> None:
    drafter = NgramDrafter(3, 64)
    drafter.extend([0, 2], torch.tensor([[1, 2, 1, 0], [4, 5, 6, 4]]), None, [0, 0], [3, 4])
    proposal = drafter.draft([0, 2], 2, None)
    assert proposal.tokens.dtype == torch.int64
    assert proposal.tokens.tolist() == [[2, 1], [5, 6]]
    assert proposal.parents is None
    assert drafter.deterministic
    drafter.move(2, 0)
    assert drafter.draft([0], 2, None).tokens.tolist() == [[5, 6]]
    with pytest.raises(ValueError, match="row 0 has 4 positions, the new ones start at 3"):
        tell(drafter, 0, [1, 2, 3, 4], 3)


def test_sizes_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="shortest <= longest"):
        NgramDrafter(1, 64, longest=1, shortest=2)
