"""Lookahead decoding against deterministic toy targets: the tree, what is learned, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle.decode.lookahead import LookaheadDrafter, NgramPool
from eagle.decode.proposal import Proposal

Target = Callable[[list[int]], int]


def cyclic(text: list[int]) -> int:
    """x_{t+1} = x_t + 3 modulo 17: what follows a token does not depend on what was before."""
    return (text[-1] + 3) % 17


def entangled(text: list[int]) -> int:
    """Depends on the last five tokens, so that a guess that sees wrong ancestors gives another token."""
    return (7 * text[-1] + 3 * text[-2] + sum(text[-5:])) % 101


def contexts(proposal: Proposal, row: int, known: list[int]) -> list[list[int]]:
    """What the target sees at the pending token and at each node: the text, then the node's ancestors and itself."""
    assert proposal.parents is not None
    seen = [known]
    for token, parent in zip(proposal.tokens[row].tolist(), proposal.parents[row].tolist(), strict=True):
        seen.append([*seen[1 + parent], token])
    return seen


def choose(proposal: Proposal, row: int, known: list[int], target: Target) -> list[int]:
    return [target(context) for context in contexts(proposal, row, known)]


def verify(proposal: Proposal, row: int, choices: list[int]) -> list[int]:
    """The accepted tokens and the one after them. No two open children of a node may have the same token."""
    assert proposal.parents is not None
    assert proposal.open_ is not None
    tokens, parents, open_ = (part[row].tolist() for part in (proposal.tokens, proposal.parents, proposal.open_))
    at, said = -1, []
    while True:
        said.append(choices[1 + at])
        children = [i for i, parent in enumerate(parents) if parent == at and open_[i]]
        assert len({tokens[i] for i in children}) == len(children)
        match = [i for i in children if tokens[i] == said[-1]]
        if not match:
            return said
        at = match[0]


def check_shape(proposal: Proposal, drafter: LookaheadDrafter, rows: int, length: int) -> None:
    assert proposal.parents is not None
    assert proposal.open_ is not None
    assert proposal.tokens.shape == proposal.parents.shape == proposal.open_.shape
    assert proposal.tokens.shape[0] == rows
    assert proposal.tokens.shape[1] <= drafter.max_nodes
    assert proposal.tokens.dtype == proposal.parents.dtype == torch.int64
    assert proposal.open_.dtype == torch.bool
    assert bool((proposal.parents < torch.arange(proposal.tokens.shape[1])).all())
    assert bool((proposal.parents >= -1).all())
    for row in range(rows):
        depth: list[int] = []
        for parent in proposal.parents[row].tolist():
            depth.append(1 + (depth[parent] if parent >= 0 else 0))
        for node in proposal.open_[row].nonzero().flatten().tolist():
            assert depth[node] <= length
            parent = int(proposal.parents[row, node])
            assert parent == -1 or bool(proposal.open_[row, parent])  # what is accepted hangs on what is accepted


class Request:
    """One row that is decoded as the engine does it."""

    def __init__(self, drafter: LookaheadDrafter, row: int, prompt: list[int], target: Target) -> None:
        self.drafter, self.row, self.target = drafter, row, target
        self.known = [*prompt, target(prompt)]
        drafter.extend([row], torch.tensor([[*self.known[1:], 0, 0]]), None, [0], [len(prompt)])

    def round(self, length: int) -> int:
        """Draft, verify, digest, extend; returns the tokens gained."""
        proposal = self.drafter.draft([self.row], length, None)
        check_shape(proposal, self.drafter, 1, length)
        choices = choose(proposal, 0, self.known, self.target)
        said = verify(proposal, 0, choices)
        self.drafter.digest([self.row], proposal, torch.tensor([choices]))
        start = len(self.known) - 1
        self.known += said
        self.drafter.extend([self.row], torch.tensor([[*said, 0]]), None, [start], [len(said)])
        return len(said)


def autoregressive(prompt: list[int], target: Target, length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(target(text))
    return text


def test_the_window_is_the_papers() -> None:
    drafter = LookaheadDrafter(1, window=3, ngram=4, candidates=2)
    Request(drafter, 0, [4, 4, 9, 5], cyclic)
    proposal = drafter.draft([0], 2, None)
    assert proposal.parents is not None
    assert proposal.open_ is not None
    assert proposal.parents.tolist() == [[-1, 0, 1, 0, 1, 2, 3, 4, 5]]  # nothing in the pool begins with the pending 8
    assert not bool(proposal.open_.any())
    assert set(proposal.tokens[0].tolist()) <= {4, 9, 5, 8}
    w = proposal.tokens[0].tolist()
    # level 2 of column 1 sees column 0 and itself of level 0, then its own column
    assert contexts(proposal, 0, [8])[1 + 7] == [8, w[0], w[1], w[4], w[7]]


def test_digest_shifts_the_levels_and_collects_the_trajectory() -> None:
    drafter = LookaheadDrafter(1, window=2, ngram=3, candidates=4, prompt=False)
    drafter.extend([0], torch.tensor([[5, 6, 7]]), None, [0], [3])
    before = drafter.draft([0], 2, None)
    (a0, a1), (b0, b1) = before.tokens.view(2, 2).tolist()
    drafter.digest([0], before, torch.tensor([[90, 91, 92, 70, 80]]))
    first = drafter.draft([0], 2, None)
    assert first.tokens[0, :4].tolist() == [b0, b1, 70, 80]
    drafter.digest([0], first, torch.tensor([[90, 91, 92, 71, 81]]))
    second = drafter.draft([0], 2, None)
    assert second.tokens[0, :4].tolist() == [70, 80, 71, 81]
    assert len({a0, b0, b1}) == 3  # else the lines below would say nothing
    # the first step's n-grams hold guesses beside their first token and are left out; the second's are (b, 7x, 7x)
    for number, (pending, tail) in enumerate([(a0, []), (b0, [70, 71]), (b1, [80, 81])]):
        drafter.extend([0], torch.tensor([[pending]]), None, [3 + number], [1])
        proposal = drafter.draft([0], 2, None)
        assert proposal.open_ is not None
        assert proposal.tokens[0][proposal.open_[0]].tolist() == tail


def test_candidates_share_equal_beginnings_and_are_cut_to_length() -> None:
    drafter = LookaheadDrafter(1, window=1, ngram=4, candidates=3)
    text = [1, 2, 3, 4, 9, 1, 2, 5, 6, 9, 1, 7, 7, 7, 9, 1]
    drafter.extend([0], torch.tensor([text]), None, [0], [len(text)])
    proposal = drafter.draft([0], 3, None)
    check_shape(proposal, drafter, 1, 3)
    assert proposal.parents is not None
    # newest first: (1 7 7 7), then (1 2 5 6) and (1 2 3 4), which share the 2; nodes 0..2 are the window
    assert proposal.tokens[0, 3:].tolist() == [7, 7, 7, 2, 5, 6, 3, 4]
    assert proposal.parents[0, 3:].tolist() == [-1, 3, 4, -1, 6, 7, 6, 9]
    cut = drafter.draft([0], 1, None)
    assert cut.tokens[0, 3:].tolist() == [7, 2]
    unprompted = LookaheadDrafter(1, window=1, ngram=4, candidates=3, prompt=False)
    unprompted.extend([0], torch.tensor([text]), None, [0], [len(text)])
    assert unprompted.draft([0], 3, None).tokens.shape == (1, 3)


def test_rows_with_fewer_candidates_are_filled_with_closed_nodes() -> None:
    drafter = LookaheadDrafter(2, window=2, ngram=3, candidates=2)
    texts = [[1, 2, 3, 8, 1], [1, 2, 3, 8, 4]]
    drafter.extend([0, 1], torch.tensor(texts), None, [0, 0], [5, 5])
    proposal = drafter.draft([0, 1], 2, None)
    check_shape(proposal, drafter, 2, 2)
    assert proposal.parents is not None
    assert proposal.open_ is not None
    assert proposal.open_[:, 4:].tolist() == [[True, True], [False, False]]
    assert proposal.parents[1, 4:].tolist() == [-1, -1]


def test_the_pool_forgets_what_was_used_least_recently() -> None:
    pool = NgramPool(tokens=2, per_token=2)
    for ngram in ([1, 10], [1, 11], [1, 10], [1, 12]):
        pool.add(ngram)
    assert pool.tails(1) == [(12,), (10,)]
    pool.add([2, 20])
    assert pool.tails(1) == [(12,), (10,)]  # used: now 2 is the oldest
    pool.add([3, 30])
    assert pool.tails(2) == []
    assert pool.tails(1) == [(12,), (10,)]
    assert pool.tails(3) == [(30,)]


def test_candidates_become_right_and_the_text_is_the_targets_own() -> None:
    drafter = LookaheadDrafter(1, window=6, ngram=4, candidates=6, prompt=False)
    request = Request(drafter, 0, [1, 2, 3, 4], cyclic)
    gained = [request.round(3) for _ in range(30)]
    assert request.known == autoregressive([1, 2, 3, 4], cyclic, len(request.known))
    assert gained[0] == 1  # an empty pool
    assert sum(gained[20:]) == 40  # the whole candidate and the bonus token in every round


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 5), st.integers(2, 5), st.integers(1, 4), st.integers(1, 5), st.booleans(),
    st.lists(st.integers(0, 100), min_size=2, max_size=12),
)
def test_any_sizes_give_valid_trees_and_the_same_text(
    window: int, ngram: int, candidates: int, length: int, prompt: bool, start: list[int]
) -> None:
    drafter = LookaheadDrafter(2, window=window, ngram=ngram, candidates=candidates, prompt=prompt, pool=8)
    request = Request(drafter, 1, start, entangled)
    for _ in range(8):
        assert 1 <= request.round(length) <= min(length, ngram - 1) + 1
    assert request.known == autoregressive(start, entangled, len(request.known))


def test_a_request_does_not_depend_on_its_slot_and_can_move() -> None:
    def tokens_of(drafter: LookaheadDrafter, row: int) -> Tensor:
        return drafter.draft([row], 3, None).tokens

    drafter = LookaheadDrafter(3, window=4, ngram=4, candidates=4)
    other = Request(drafter, 0, [9, 9, 8, 7], entangled)
    request = Request(drafter, 2, [5, 1, 4], cyclic)
    alone = Request(LookaheadDrafter(1, window=4, ngram=4, candidates=4), 0, [5, 1, 4], cyclic)
    for _ in range(8):
        assert request.round(3) == alone.round(3)
        other.round(3)
    drafter.move(2, 0)
    assert torch.equal(tokens_of(drafter, 0), tokens_of(alone.drafter, 0))
    request.row = 0
    assert request.round(3) == alone.round(3)
    with pytest.raises(ValueError, match="the new ones start at 2"):
        drafter.extend([0], torch.tensor([[1]]), None, [2], [1])
    assert drafter.deterministic
    assert drafter.weight_bytes == 0
    assert drafter.state_bytes > 0


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="ngram >= 2"):
        LookaheadDrafter(1, ngram=1)
