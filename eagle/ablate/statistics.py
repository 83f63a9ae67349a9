"""Means over seeds with 95 % intervals, alone and as differences paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds and its 95 % interval (Student's t, n - 1 degrees of freedom); no interval for one seed."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return asdict(self)


def estimate(values: list[float]) -> Estimate:
    """Return the estimate of the mean of `values`, one per seed. ValueError for none."""
    if not values:
        raise ValueError("an estimate needs a value")
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, None, None, 1)
    half = float(stats.t.ppf(0.5 + LEVEL / 2, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """Return the estimate of values[seed] - reference[seed] over the seeds that both have, None when they share none."""
    shared = [seed for seed in values if seed in reference]
    return estimate([values[seed] - reference[seed] for seed in shared]) if shared else None
