"""Measures what the controllers must know: seconds of a target pass and of a draft, by batch and draft length.

They are taken from real decoding of the workload, under a policy that goes through the draft lengths in turns, so that
contexts, caches and the taking in of accepted positions are those of real rounds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from eagle.bench.workload import Workload
from eagle.decode.control import Plan
from eagle.decode.cost import CostTable
from eagle.decode.engine import Engine

CYCLES = 5
_PER_ROUND = 1.6  # tokens that a round is expected to gain, for the length of the run; more only makes it shorter


class Turns:
    """A length policy that asks for each of some draft lengths in turn."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths, self._turn = list(lengths), 0

    def plan(self, batch: int) -> Plan:
        """See `LengthPolicy.plan`."""
        return Plan(self._lengths[self._turn % len(self._lengths)])

    def observe(self, batch: int, plan: Plan, accepted: Sequence[int]) -> None:
        """See `LengthPolicy.observe`."""
        self._turn += 1


def cost_lengths(longest: int) -> list[int]:
    """Return the draft lengths that are timed: no draft, 1, 2, 3, then further apart, the longest included."""
    return sorted({0, *(k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k < longest), longest})


def measure_costs(engine: Engine, work: Workload, batch: int, longest: int, seed: int) -> CostTable:
    """Return the median seconds of each draft length at `batch`, and at a quarter and a half of it, from short runs.

    Smaller batches are measured because a batch empties when its requests end.
    """
    lengths = cost_lengths(longest)
    target: dict[tuple[int, int], float] = {}
    draft: dict[tuple[int, int], float] = {}
    for size in sorted({max(1, batch // 4), max(1, batch // 2), batch}):
        prompts = work.window(0, size)
        # All requests must still be there in the last cycle.
        room = engine.max_length - max(map(len, prompts))
        tokens = min(room, int(_PER_ROUND * CYCLES * len(lengths)) + 2)
        stats = engine.generate(
            prompts, max_new_tokens=tokens, draft_tokens=Turns(lengths), ignore_eos=True, batch=size, seed=seed
        ).stats
        times: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for step in stats.steps:
            if step.batch == size:
                times[step.length].append((step.target_seconds, step.draft_seconds))
        for length, seen in times.items():
            target[size, length + 1] = statistics.median(t for t, _ in seen)
            draft[size, length] = statistics.median(d for _, d in seen)
    return CostTable(target, draft)
