"""Prompt lookup decoding: our implementation of a rival, so that it can be measured in the same engine as the draft.

The draft is what followed the last earlier occurrence of the text's own ending (Saxena 2023, prompt lookup decoding;
"n-gram speculation" in vLLM). It has no weights. Verification makes it lossless, as every deterministic draft: greedily
by comparison, at temperature > 0 because the target draws each token itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle.decode.proposal import Drafter, Draws, Proposal

_OBJECT_BYTES = 32  # of a Python int
_ENTRY_BYTES = 150  # of a tuple, without its items, and its place in a dict


@dataclass
class _Text:
    """One row: its tokens, and for every n-gram in them that is followed by a token where that token stands."""

    tokens: list[int] = field(default_factory=list)
    following: dict[tuple[int, ...], int] = field(default_factory=dict)

    def append(self, new: list[int], shortest: int, longest: int) -> None:
        """Add tokens. The n-gram that ends the text is not in the index, so a look-up finds an earlier one."""
        tokens, following = self.tokens, self.following
        for token in new:
            end = len(tokens)
            for size in range(shortest, min(longest, end) + 1):
                following[tuple(tokens[end - size :])] = end
            tokens.append(token)

    def source(self, shortest: int, longest: int) -> int | None:
        """Return where what followed the longest suffix that occurred before stands (its last occurrence), or None."""
        end = len(self.tokens)
        for size in range(min(longest, end), shortest - 1, -1):
            found = self.following.get(tuple(self.tokens[end - size :]))
            if found is not None:
                return found
        return None


class NgramDrafter(Drafter):
    """Proposes what followed the last earlier occurrence of the longest suffix of `longest` to `shortest` tokens.

    A continuation that reaches the end of the text goes on with its own draft, so a loop is continued as a loop. A row
    without a match proposes its last token again and again, which will almost surely be rejected: every row of a chain
    must have `length` tokens. A row's first prompt token is not known here, because `extend` tells the token after each
    position. The index is kept up to date in `extend`, longest - shortest + 1 entries per token; a draft costs as many
    look-ups and `length` steps, on the host.

    `max_length`: the most tokens of a row. Raises ValueError unless 1 <= shortest <= longest.
    """

    deterministic = True

    def __init__(self, batch: int, max_length: int, *, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"an n-gram has 1 <= shortest <= longest tokens, not {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest
        self._max_length = max_length
        self._texts = [_Text() for _ in range(batch)]
        self._device = torch.device("cpu")

    def extend(self, rows: list[int], tokens: Tensor, aux: Tensor | None, starts: list[int], counts: list[int]) -> None:
        """See `Drafter.extend`. Raises ValueError when a row's positions do not follow those that it has."""
        self._device = tokens.device
        for row, new, start, count in zip(rows, tokens.tolist(), starts, counts, strict=True):
            if start == 0:
                self._texts[row] = _Text()
            text = self._texts[row]
            if start != len(text.tokens):
                raise ValueError(f"row {row} has {len(text.tokens)} positions, the new ones start at {start}")
            text.append(new[:count], self.shortest, self.longest)

    def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
        """See `Drafter.draft`; `draws` is not used."""
        return Proposal(torch.tensor([self._continuation(self._texts[row], length) for row in rows], device=self._device))

    def _continuation(self, text: _Text, length: int) -> list[int]:
        end = len(text.tokens)
        at = text.source(self.shortest, self.longest)
        if at is None:
            at = end - 1
        drafted = text.tokens[at : at + length]
        while len(drafted) < length:
            drafted.append(drafted[len(drafted) - (end - at)])
        return drafted

    def move(self, source: int, destination: int) -> None:
        """See `Drafter.move`."""
        self._texts[destination], self._texts[source] = self._texts[source], _Text()

    @property
    def weight_bytes(self) -> int:
        """0: it has no weights."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of texts and indexes on the host, an upper estimate: all n-grams of all rows differ, as Python objects."""
        sizes = range(self.shortest, self.longest + 1)
        per_token = 8 + _OBJECT_BYTES + sum(_ENTRY_BYTES + _OBJECT_BYTES + 8 * size for size in sizes)
        return len(self._texts) * self._max_length * per_token
