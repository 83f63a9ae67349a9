"""Positions that the drafter has not been told of yet, per batch slot.

A round without speculation, a chunk of a draft that goes on, a prompt: the drafter needs none of them before its next
draft. Telling it late costs one pass over all of them instead of one pass a round, and nothing at all for a request
that ends before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class _Waiting:
    """`start`: first position not told. `tokens`: the token after each waiting position; `aux`: pieces [t, A*H]."""

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    aux: list[Tensor] = field(default_factory=list)


class Backlog:
    """What waits for the drafter, for `slots` batch slots."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots = [_Waiting() for _ in range(slots)]
        self._device = device

    def begin(self, slot: int) -> None:
        """A new request takes the slot, or none: what waits is dropped."""
        self._slots[slot] = _Waiting()

    def add(self, slot: int, tokens: list[int], aux: Tensor | None) -> None:
        """Append positions: the token after each, and the hidden states there [len(tokens), A*H]."""
        waiting = self._slots[slot]
        waiting.tokens.extend(tokens)
        if aux is not None:
            waiting.aux.append(aux)

    def fresh(self, slot: int) -> bool:
        """Whether the drafter knows nothing of the slot's request yet."""
        return self._slots[slot].start == 0

    def waiting(self, slot: int) -> int:
        """How many positions the drafter has not been told of."""
        return len(self._slots[slot].tokens)

    def take(self, slots: list[int]) -> tuple[Tensor, Tensor | None, list[int], list[int]]:
        """Hand over what waits: tokens [n, T], aux [n, T, A*H] (right-padded), starts and counts, for `Drafter.extend`."""
        waiting = [self._slots[slot] for slot in slots]
        counts = [len(w.tokens) for w in waiting]
        starts = [w.start for w in waiting]
        longest = max(counts)
        tokens = torch.tensor([w.tokens + [0] * (longest - len(w.tokens)) for w in waiting], device=self._device)
        aux = None
        if waiting[0].aux:
            joined = [w.aux[0] if len(w.aux) == 1 else torch.cat(w.aux) for w in waiting]
            aux = joined[0][None] if len(joined) == 1 else torch.nn.utils.rnn.pad_sequence(joined, batch_first=True)
        for w in waiting:
            w.start += len(w.tokens)
            w.tokens, w.aux = [], []
        return tokens, aux, starts, counts

    def move(self, source: int, destination: int) -> None:
        """The request of slot `source` moves to slot `destination`."""
        self._slots[destination] = self._slots[source]
        self._slots[source] = _Waiting()
