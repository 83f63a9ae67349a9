"""What is measured: held-out prompts, the arms that are compared, and which prompts each repeat takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle.dataset.read import load_rows
from eagle.errors import DataError
from eagle.progress import say


@dataclass(frozen=True)
class Workload:
    """Held-out prompts as token ids, with their ids and kinds (one per prompt)."""

    prompts: list[list[int]]
    ids: list[str]
    kinds: list[str]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt) for prompt in self.prompts)

    def window(self, turn: int, size: int) -> list[list[int]]:
        """Return `size` prompts, other ones for each `turn` as far as there are any; the list is taken as a circle."""
        count = len(self.prompts)
        return [self.prompts[(turn * size + i) % count] for i in range(size)]


@dataclass(frozen=True, order=True)
class Arm:
    """One way to decode at one batch size and temperature; `draft_tokens` 0 is no speculation."""

    batch: int
    temperature: float
    draft_tokens: int

    @property
    def name(self) -> str:
        """'none' or 'Eagle 3.1, K=...'."""
        return f"Eagle 3.1, K={self.draft_tokens}" if self.draft_tokens else "none"


def load_workload(dataset: Path, count: int) -> Workload:
    """Return up to `count` held-out prompts, spread evenly over all (rows lie in an order without meaning).

    Raises DataError when the data set has no held-out rows.
    """
    rows = load_rows(dataset, "heldout")
    if not rows:
        raise DataError("bench: the data set has no held-out rows; raise dataset.heldout_fraction or the number of prompts")
    if len(rows) < count:
        say(f"bench: {len(rows)} held-out prompts for the {count} asked for")
    picked = rows if len(rows) <= count else [rows[i * len(rows) // count] for i in range(count)]
    return Workload([row.prompt for row in picked], [row.id for row in picked], [row.kind for row in picked])


def speed_arms(batches: list[int], lengths: list[int], temperatures: list[float]) -> list[list[Arm]]:
    """Return the groups of arms that are timed against each other: no speculation first, then each draft length.

    Every batch size at the first temperature; further temperatures at the first batch size only (their acceptance is
    measured for all draft lengths elsewhere), with the longest draft.
    """
    groups = [[Arm(batch, temperatures[0], k) for k in (0, *lengths)] for batch in batches]
    return groups + [[Arm(batches[0], t, k) for k in (0, max(lengths))] for t in temperatures[1:]]


def window_size(prompts: int, batch: int, rounds: int) -> int:
    """Return how many prompts one repeat takes: a whole batch at least, and all prompts once over the repeats."""
    return max(batch, -(-prompts // rounds))
