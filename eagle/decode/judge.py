"""Applies the verifiers of `eagle.decode.verify` to a pass over rows whose drafts may differ in length and origin."""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor

from eagle.decode.proposal import Proposal
from eagle.decode.randomness import Stream, uniforms
from eagle.decode.requests import Left
from eagle.decode.sampling import Warp, distribution
from eagle.decode.trees import TreeVerdict, verify_tree_coupled, verify_tree_drawn, verify_tree_greedy
from eagle.decode.verify import draw, verify_block, verify_coupled, verify_greedy, verify_sampled

Verification = Literal["rejection", "block"]
_NEVER = 1.0  # no acceptance probability exceeds it
_NO_TOKEN = -1


class Judge:
    """Decides what the target keeps. `verification`: how drawn chains are judged at temperature > 0.

    Deterministic drafts are judged by drawing the target's own token at each position and comparing: as probable to
    accept as with a one-hot q, and equal token for token to sampling without speculation.
    """

    def __init__(self, verification: Verification, device: torch.device) -> None:
        self._verify = {"rejection": verify_sampled, "block": verify_block}[verification]
        self.fresh_numbers = verification == "block"  # per round, see eagle.decode.randomness
        self._device = device

    def first(self, logits: Tensor, warp: Warp, seeds: list[int], keys: list[int], places: list[int]) -> list[int]:
        """Return the target's token after each prompt, from logits [n, V]; `places`: where it will stand."""
        if warp.greedy:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = draw(distribution(logits, warp), uniforms(seeds, Stream.TOKEN, keys, places, 1, self._device)[:, 0])
        found: list[int] = tokens.tolist()
        return found

    def chains(
        self,
        logits: Tensor,
        drafts: list[list[int]],
        lefts: list[Left | None],
        warp: Warp,
        seeds: list[int],
        keys: list[int],
        starts: list[int],
        rounds: list[int],
    ) -> tuple[list[int], list[int]]:
        """Return how many tokens of each row's draft stand, and the target's token after them (-1 where it has no logits).

        logits [n, T, V]: after the pending token at `starts[i]` and after each draft token that was fed. `drafts`:
        the tokens to decide, at most T a row; `lefts`: where they come from; `rounds`: drafts decided for each row before.
        """
        width = max(map(len, drafts))
        tokens = torch.tensor([d + [_NO_TOKEN] * (width - len(d)) for d in drafts], device=self._device).view(len(drafts), width)
        logits = logits[:, : width + 1]
        if warp.greedy:
            verdict = verify_greedy(tokens, logits.argmax(dim=-1))
        else:
            places = [start + 1 for start in starts]
            p = distribution(logits, warp)
            number = uniforms(seeds, Stream.TOKEN, keys, places, width + 1, self._device)
            drawn = next((left.proposal for left in lefts if left and left.proposal.probabilities is not None), None)
            if drawn is None:
                verdict = verify_coupled(tokens, p, number)
            else:
                salt = rounds if self.fresh_numbers else None
                accept = uniforms(seeds, Stream.ACCEPT, keys, places, width, self._device, rounds=salt)
                chosen, q, padding = _drawn(drafts, lefts, drawn, width)
                if padding is not None:
                    accept = accept.masked_fill(padding, _NEVER)
                verdict = self._verify(tokens.clamp_min(0), chosen, q, p, drawn.ids, accept, number)
        found = torch.stack([verdict.accepted, verdict.following]).tolist()
        return found[0], found[1]

    def tree(
        self, logits: Tensor, proposal: Proposal, depth: int, warp: Warp, seeds: list[int], keys: list[int], starts: list[int]
    ) -> TreeVerdict:
        """Judge a tree from logits [n, 1 + N, V] after the pending token and after each node."""
        assert proposal.parents is not None  # noqa: S101 -- for the type checker
        if warp.greedy:
            return verify_tree_greedy(proposal.tokens, proposal.parents, proposal.open_, logits.argmax(dim=-1), depth)
        places = [start + 1 for start in starts]
        number = uniforms(seeds, Stream.TOKEN, keys, places, depth + 1, self._device)
        if proposal.probabilities is not None and proposal.widths is not None:
            widths = proposal.widths
            lanes = uniforms(seeds, Stream.ACCEPT, keys, places, len(widths), self._device, max(widths))
            accept = torch.cat([lanes[:, d, :width].repeat(1, prod(widths[:d])) for d, width in enumerate(widths)], dim=1)
            return verify_tree_drawn(
                proposal.tokens, proposal.parents, widths, proposal.probabilities, distribution(logits, warp), proposal.ids, accept,
                number,
            )  # fmt: skip
        return verify_tree_coupled(proposal.tokens, proposal.parents, proposal.open_, distribution(logits, warp), number)


def _drawn(
    drafts: list[list[int]], lefts: list[Left | None], drawn: Proposal, width: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the draft's probabilities of its tokens [n, K], its distributions [n, K, Vd] and where rows are padded [n, K].

    Padding has q = 0, so that the residual there is the target's whole distribution.
    """
    assert drawn.probabilities is not None  # noqa: S101 -- for the type checker
    assert drawn.chosen is not None  # noqa: S101 -- for the type checker
    first = lefts[0]
    if first and all(x and x.proposal is drawn and x.at == first.at for x in lefts) and len({len(d) for d in drafts}) == 1:
        part = slice(first.at, first.at + width)
        rows = [x.row for x in lefts if x]
        return drawn.chosen[rows, part], drawn.probabilities[rows, part], None
    count = len(drafts)
    chosen = drawn.chosen.new_ones(count, width)
    q = drawn.probabilities.new_zeros(count, width, drawn.probabilities.shape[-1])
    padding = torch.ones(count, width, dtype=torch.bool, device=q.device)
    for i, (draft, left) in enumerate(zip(drafts, lefts, strict=True)):
        if left is None or not draft:
            continue
        source, part = left.proposal, slice(left.at, left.at + len(draft))
        padding[i, : len(draft)] = False
        if source.probabilities is None or source.chosen is None:
            # Drafted while all rows were greedy: q is 1 at the token, and what was chosen had probability 1.
            index = torch.tensor(draft, device=q.device)
            if drawn.ids is not None:
                index = torch.searchsorted(drawn.ids, index)
            q[i, torch.arange(len(draft)), index] = 1.0
        else:
            chosen[i, : len(draft)] = source.chosen[left.row, part]
            q[i, : len(draft)] = source.probabilities[left.row, part]
    return chosen, q, padding
