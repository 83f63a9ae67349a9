"""Acceptance by prompt, and how sure a difference is: percentile bootstrap over prompts (Efron 1979)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Counts:
    """What was accepted. `rounds` [n]: drafts of each prompt; `accepted` [n, K]: drafts whose token k, and all before, was."""

    rounds: NDArray[np.int64]
    accepted: NDArray[np.int64]

    @classmethod
    def of(cls, rounds: Sequence[Sequence[int]], draft_tokens: int) -> Counts:
        """Count the accepted tokens of every round of every prompt."""
        table = np.zeros((len(rounds), draft_tokens), dtype=np.int64)
        for at, counts in enumerate(rounds):
            for count in counts:
                table[at, :count] += 1
        return cls(np.asarray([len(counts) for counts in rounds], dtype=np.int64), table)

    def take(self, rows: Sequence[int]) -> Counts:
        """Return the counts of some prompts."""
        return Counts(self.rounds[list(rows)], self.accepted[list(rows)])

    @property
    def acceptance_length(self) -> float:
        """Tokens per round over all prompts, bonus token included; 1.0 without a round."""
        return float(_lengths(self, np.ones((1, len(self.rounds)), dtype=np.int64))[0])

    @property
    def by_position(self) -> list[float]:
        """Share of drafts whose token k was accepted, cumulative."""
        total = max(int(self.rounds.sum()), 1)
        return [float(count) / total for count in self.accepted.sum(0)]


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields, rounded to 4 digits."""
        return {"value": round(self.value, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


def relative_loss(base: Counts, other: Counts, *, paired: bool, seed: int, samples: int = SAMPLES) -> Interval:
    """Return 1 - tau(other) / tau(base) with tau the acceptance length; negative where `other` accepts more.

    `paired`: row i of both is the same prompt, and prompts are drawn together; else each side is drawn by itself.
    Raises ValueError for a side without prompts, or a paired comparison of different numbers of them.
    """
    count, more = len(base.rounds), len(other.rounds)
    if not count or not more or (paired and count != more):
        raise ValueError(f"cannot compare {count} with {more} prompts{' in pairs' if paired else ''}")
    random = np.random.default_rng(seed)
    drawn = random.multinomial(count, np.full(count, 1.0 / count), size=samples)
    others = drawn if paired else random.multinomial(more, np.full(more, 1.0 / more), size=samples)
    losses = 1.0 - _lengths(other, others) / _lengths(base, drawn)
    low, high = np.quantile(losses, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(1.0 - other.acceptance_length / base.acceptance_length, float(low), float(high))


def _lengths(counts: Counts, weights: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the acceptance length of every resample: weights [samples, n] say how often each prompt was drawn."""
    rounds = weights @ counts.rounds
    accepted = weights @ counts.accepted.sum(1)
    return 1.0 + accepted / np.maximum(rounds, 1)
