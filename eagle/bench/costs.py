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
from eagle.decode.intake import QUIET, Traffic
from eagle.decode.requests import Request
from eagle.decode.stats import Step
from eagle.errors import ConfigError

SAMPLES = 8
ROOM = 64  # tokens behind the prompt that a batch has at least, or most of it would be spent on taking prompts in
_TURNS = 50  # runs through the workload after which a length that never came up is given up


class Turns:
    """A length policy that asks for each of some draft lengths in turn, the shortest draft first."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths, self._turn = list(lengths), 0

    def plan(self, batch: int) -> Plan:
        """See `LengthPolicy.plan`."""
        return Plan(self._lengths[self._turn % len(self._lengths)])

    def observe(self, batch: int, plan: Plan, accepted: Sequence[int], traffic: Traffic = QUIET) -> None:
        """See `LengthPolicy.observe`."""
        self._turn += 1


def cost_lengths(longest: int) -> list[int]:
    """Return the draft lengths that are timed: no draft, 1, 2, 3, then further apart, the longest included."""
    return sorted({0, *(k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k < longest), longest})


def measure_costs(engine: Engine, work: Workload, batch: int, longest: int) -> CostTable:
    """Return the median seconds of each draft length at `batch`, and at a quarter and a half of it.

    Smaller batches are measured because a batch empties when its requests end. Prompts that leave less than ROOM (or half
    the engine's positions) are cut at their beginning. Raises ConfigError when no round of some length fits even so.
    """
    target: dict[tuple[int, int], float] = {}
    draft: dict[tuple[int, int], float] = {}
    keep = engine.max_length - min(ROOM, engine.max_length // 2)
    for size in sorted({max(1, batch // 4), max(1, batch // 2), batch}):
        lengths = cost_lengths(longest)
        times: dict[int, list[Step]] = defaultdict(list)
        turns = Turns([length for length in lengths for _ in range(2)])
        for turn in range(_TURNS):
            if all(len(times[length]) >= SAMPLES for length in lengths):
                break
            for step in _full_steps(engine, [prompt[-keep:] for prompt in work.window(turn, size)], size, turns):
                times[step.length].append(step)
        missing = [length for length in lengths if not times[length]]
        if missing:
            raise ConfigError(
                f"bench.max_new_tokens: no round with {missing[0]} draft tokens fits the answers at batch {size}; "
                f"raise it, or lower bench.max_draft_tokens"
            )
        for length in lengths:
            target[size, length + 1] = statistics.median(step.target_seconds for step in times[length])
            draft[size, length] = statistics.median(step.draft_seconds for step in times[length])
    return CostTable(target, draft)


def _full_steps(engine: Engine, prompts: list[list[int]], size: int, turns: Turns) -> list[Step]:
    """Decode one batch to the end of its room and return the steps that say what a round costs.

    Left out: the first step with a draft, in which the draft takes the prompts in, steps of a smaller batch, and steps after
    one of another length: what the draft has to take in is what the step before accepted.
    """
    with engine.decoding(turns, batch=size) as run:
        for index, prompt in enumerate(prompts):
            run.submit(Request(prompt, engine.max_length - len(prompt), key=index))
        while run.busy and run.batch in (0, size):
            run.step()
        steps = [step for step in run.stats.steps if step.batch == size]
    first = next((at for at, step in enumerate(steps) if step.length), len(steps))
    return [step for at, step in enumerate(steps) if at != first and at and steps[at - 1].length == step.length]
