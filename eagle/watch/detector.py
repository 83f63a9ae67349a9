"""A sequential test that watches a mean for ever and whose false alarms are counted per month, not per look.

For one figure x in [0, 1] of each window and a boundary m, bets against "the mean of x is at least m" are placed: a bet
of size b multiplies its stake by 1 - b * min(x - m, c) (Waudby-Smith and Ramdas, Estimating means of bounded random
variables by betting, JRSS B 86, 2024). In every window a new stake of 1 enters, so a fall is met whenever it comes:
evidence = (evidence + 1) * factor, the Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo, E-detectors, New England
Journal of Statistics in Data Science 2, 2024). While the hypothesis holds, evidence minus the number of windows is a
supermartingale, so within n windows it reaches a threshold A with probability at most n / A. The mean over figures and
bet sizes has the same property. Nothing is assumed of the distribution within a window: rounds may depend on each other.

What is assumed, and how it is provided for:
- The mean of a window does not depend on the windows before it. A request that runs from one window into the next
  breaks that, so windows take turns between LANES separate tests: those of one lane are a window apart. A window must be
  longer than nearly all requests.
- c bounds what one good window can speak for health, so that bets may be larger. It takes E[(x - m - c)+] from the mean:
  at most (standard deviation of a window)^2 / (4 c), which the tolerance between reference and boundary pays for, as
  long as a window holds several requests (watch.min_requests): one alone may be far from the mean.
- Evidence starts again at 0 after a month of windows, so that each month has the same bound.

After an alarm the same test is turned round, with the boundary half-way back: it says when the figures have recovered.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

LANES = 2
MONTH_SECONDS = 30 * 86400.0
CLIP = 0.15  # c beyond the tolerance, in shares of drafts
BETS = (0.25, 0.5, 0.9)  # of the largest bet that cannot lose more than its stake

Array = NDArray[np.float64]


def update(evidence: Array, gain: Array, room: Array) -> Array:
    """Return the evidence [..., figures, bets] after one more window.

    gain: [..., figures], positive where the window speaks for the hypothesis; room: c of each figure, [figures].
    """
    capped = np.minimum(gain, room) / room
    return np.asarray((evidence + 1.0) * (1.0 - capped[..., None] * np.array(BETS)))


def threshold(window_s: float, probability: float, tests: int) -> float:
    """Return A: evidence that any lane of any of `tests` tests reaches within a month with at most that probability."""
    return month_windows(window_s) * LANES * tests / probability


def month_windows(window_s: float) -> int:
    """Return the most windows of `window_s` seconds that one lane sees in a month."""
    return math.ceil(math.ceil(MONTH_SECONDS / window_s) / LANES)


class Lane(BaseModel):
    """Evidence [figures][bets] of every LANES-th window, and how many windows it is made of."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    evidence: list[list[float]] = Field(default_factory=list)
    windows: int = Field(0, ge=0)


class Detector(BaseModel):
    """The test of one boundary. `alarm`: the figures have fallen below it, and have not recovered yet."""

    model_config = ConfigDict(extra="forbid")

    alarm: bool = False
    lanes: list[Lane] = Field(default_factory=lambda: [Lane() for _ in range(LANES)], min_length=LANES, max_length=LANES)

    def observe(self, at: int, seen: Array, healthy: Array, tolerance: float, limit: float, month: int) -> bool:
        """Take in window number `at`; return whether the alarm was raised or has ended by it.

        seen: the window's figures [figures]. healthy: what they are at the reference's bound, [figures]; those at 0
        cannot fall and are left out. The boundary is (1 - tolerance) of it. limit: the threshold A. month: windows of a
        lane after which evidence starts again.
        """
        lane = self.lanes[at % LANES]
        used = healthy > 0
        if not used.any():
            return False
        allowed = tolerance * (0.5 if self.alarm else 1.0)
        gain = seen - (1.0 - allowed) * healthy
        room = CLIP + allowed * healthy
        before = np.array(lane.evidence) if np.shape(lane.evidence) == (len(seen), len(BETS)) else np.zeros((len(seen), len(BETS)))
        evidence = np.where(used[:, None], update(before, -gain if self.alarm else gain, room), 0.0)
        lane.evidence, lane.windows = evidence.tolist(), lane.windows + 1
        if evidence.mean() >= limit:
            self.alarm = not self.alarm
            self._start_again()
            return True
        if lane.windows >= month:
            lane.evidence, lane.windows = [], 0
        return False

    def _start_again(self) -> None:
        self.lanes = [Lane() for _ in range(LANES)]
