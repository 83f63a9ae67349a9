"""What is measured: held-out prompts, the arms that are compared, and which prompts each repeat takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle.config import Method
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
    """One way to decode at one batch size and temperature.

    `draft_tokens`: K of a chain, the depth of a tree, the most that an adaptive method may draft; 0 for `none`.
    """

    batch: int
    temperature: float
    draft_tokens: int
    method: Method = "eagle31"

    @property
    def name(self) -> str:
        """As `arm_name`."""
        return arm_name(self.method, self.draft_tokens)

    @property
    def place(self) -> str:
        """Return e.g. 'batch 32, T=0'."""
        return f"batch {self.batch}, T={self.temperature:g}"


LABELS: dict[Method, str] = {
    "none": "none",
    "ngram": "n-gram (prompt lookup)",
    "lookahead": "Lookahead",
    "medusa": "Medusa",
    "eagle2": "EAGLE-2",
    "eagle31-distilled": "Eagle 3.1 (distilled)",
    "eagle31": "Eagle 3.1",
    "eagle31-tree": "Eagle 3.1, dynamic tree",
    "eagle31-drawn": "Eagle 3.1, drawn tree",
    "eagle31-pid": "Eagle 3.1 + PID",
    "eagle31-chunks": "Eagle 3.1 + batch-sequential",
}
_SIZES: dict[Method, str] = {
    "lookahead": "depth",
    "medusa": "depth",
    "eagle2": "depth",
    "eagle31-tree": "depth",
    "eagle31-drawn": "depth",
    "eagle31-pid": "K<",
    "eagle31-chunks": "K<",
}


def arm_name(method: Method, draft_tokens: int) -> str:
    """Return e.g. 'none', 'Eagle 3.1, K=3', 'Medusa, depth=4', 'Eagle 3.1 + PID, K<=8'."""
    label = LABELS[method]
    return label if method == "none" else f"{label}, {_SIZES.get(method, 'K')}={draft_tokens}"


def is_adaptive(method: Method) -> bool:
    """Whether the method chooses its draft length itself, up to the one named."""
    return method in ("eagle31-pid", "eagle31-chunks")


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


def speed_arms(
    batches: list[int], temperatures: list[float], methods: Sequence[Method], lengths: Callable[[Method], Sequence[int]]
) -> list[list[Arm]]:
    """Return the groups of arms that are timed against each other: no speculation first, then each method and length.

    Every batch size at the first temperature; further temperatures at the first batch size only (their acceptance is
    measured for all draft lengths elsewhere), each method with its longest draft.
    """
    first = temperatures[0]
    groups = [[Arm(b, first, 0, "none")] + [Arm(b, first, k, m) for m in methods for k in lengths(m)] for b in batches]
    return groups + [
        [Arm(batches[0], t, 0, "none")] + [Arm(batches[0], t, max(lengths(m)), m) for m in methods] for t in temperatures[1:]
    ]


def window_size(prompts: int, batch: int, rounds: int) -> int:
    """Return how many prompts one repeat takes: a whole batch at least, and all prompts once over the repeats."""
    return max(batch, -(-prompts // rounds))
