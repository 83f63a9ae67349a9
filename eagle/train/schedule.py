"""How far training is: steps against a time budget, the stage that follows from it, and the learning rate.

As long as all steps fit into the time budget, everything depends on the step number only, so that a run can be
repeated and resumed exactly. When they do not fit, each stage gets its share of the time and the learning rate
follows the time, so that it has decayed to its end when the budget is spent. Steps are weighed by the work that their
depth costs, so that progress by steps and progress by time agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle.config import DepthStage

_MEMORY = 0.9  # of the running mean of a step's seconds
_SLOW_START = 3  # first steps of a depth, whose seconds say little (allocation, page cache)


def work(depth: int) -> float:
    """Cost of an optimiser step with `depth` training-time-test steps over that of depth 1 (measured: 1.6 at 2, 2.2 at 3)."""
    return 1.0 + 0.6 * (depth - 1)


def learning_rate(step: int, progress: float, *, base: float, min_ratio: float, warmup: int) -> float:
    """Linear warm-up over `warmup` steps (by `step`, from 0), times a cosine from 1 to `min_ratio` over progress 0..1."""
    cosine = min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return base * cosine * min(1.0, (step + 1) / (warmup + 1))


@dataclass
class Pace:
    """The position in the stages and the time spent. `as_json` and `from_json` carry it over a crash.

    `stage` and `inside` say which stage, and how many of its steps are done; `step` counts optimiser steps;
    `elapsed` is the seconds spent so far by all processes of this run; `cost` the running mean of a step's seconds by
    depth, `overhead` the seconds spent on other things (validation, checkpoints), `reached` the furthest progress so far.
    """

    stages: Sequence[DepthStage]
    budget: float
    stage: int = 0
    inside: int = 0
    step: int = 0
    elapsed: float = 0.0
    overhead: float = 0.0
    reached: float = 0.0
    cost: dict[int, float] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Optimiser steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def depth(self) -> int:
        """Training-time-test steps of the stage at hand."""
        return self.stages[self.stage].depth

    @property
    def done(self) -> bool:
        """Whether all steps are done or the budget is spent. At least one step is always made."""
        return self.stage >= len(self.stages) or (self.step > 0 and self.elapsed >= self.budget)

    def step_done(self, seconds: float) -> None:
        """Count one optimiser step that took `seconds`, and go on to the next stage when its turn has come."""
        depth = self.depth
        self.step, self.inside, self.elapsed = self.step + 1, self.inside + 1, self.elapsed + seconds
        seen = self.seen[depth] = self.seen.get(depth, 0) + 1
        former = self.cost.get(depth, seconds)
        self.cost[depth] = seconds if seen <= _SLOW_START else _MEMORY * former + (1 - _MEMORY) * seconds
        stage = self.stages[self.stage]
        if self.inside >= stage.steps or (self.binding and self.elapsed >= self._stage_end()):
            self.stage, self.inside = self.stage + 1, 0
        self.reached = self.progress

    def end_stage(self) -> None:
        """Go on to the next stage now; there is none after the last one, which is the end."""
        self.stage, self.inside = self.stage + 1, 0
        self.reached = self.progress

    def other_work(self, seconds: float) -> None:
        """Count time that went into something else than a step."""
        self.elapsed += seconds
        self.overhead += seconds

    def _cost(self, depth: int) -> float:
        """Seconds of a step of `depth`: measured, or in proportion to the nearest measured depth."""
        if depth in self.cost:
            return self.cost[depth]
        near = min(self.cost, key=lambda known: abs(known - depth))
        return self.cost[near] * work(depth) / work(near)

    @property
    def binding(self) -> bool:
        """Whether the remaining steps, at the pace so far, would end after the budget."""
        if not self.cost or self.stage >= len(self.stages):
            return False
        ahead = self.stages[self.stage :]
        left = sum(stage.steps * self._cost(stage.depth) for stage in ahead) - self.inside * self._cost(self.depth)
        per_step = self.overhead / max(self.step, 1)
        remaining = sum(stage.steps for stage in ahead) - self.inside
        return self.elapsed + left + per_step * remaining > self.budget

    def _stage_end(self) -> float:
        """When the stage at hand should end for every stage to get its share of the budget."""
        seconds = [stage.steps * self._cost(stage.depth) for stage in self.stages]
        return self.budget * sum(seconds[: self.stage + 1]) / max(sum(seconds), 1e-9)

    @property
    def progress(self) -> float:
        """0..1, never falling: the share of the work that the steps so far are, or of the time if that is what will end the run."""
        if self.binding:
            return max(self.reached, min(self.elapsed / self.budget, 1.0))
        done = sum(stage.steps * work(stage.depth) for stage in self.stages[: self.stage])
        if self.stage < len(self.stages):
            done += self.inside * work(self.depth)
        return max(self.reached, done / sum(stage.steps * work(stage.depth) for stage in self.stages))

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` needs, without stages and budget."""
        return {
            "stage": self.stage, "inside": self.inside, "step": self.step, "elapsed": self.elapsed, "overhead": self.overhead,
            "reached": self.reached, "cost": {str(k): v for k, v in self.cost.items()},
            "seen": {str(k): v for k, v in self.seen.items()},
        }

    @classmethod
    def from_json(cls, stages: Sequence[DepthStage], budget: float, saved: dict[str, Any]) -> Pace:
        """Continue from `as_json`."""
        cost, seen = ({int(k): v for k, v in saved[name].items()} for name in ("cost", "seen"))
        plain = {name: saved[name] for name in ("stage", "inside", "step", "elapsed", "overhead", "reached")}
        return cls(stages, budget, cost=cost, seen=seen, **plain)
