"""Acceptance as a few figures per window, made comparable: live ones, and what the reference makes of them at the live K.

The figures are, for each position i that the reference and the server have in common, the share of drafts whose token i
was accepted, and at the end their mean over the positions. All are in [0, 1].

vLLM does not tell how many drafts had a token at position i. With a fixed K all had. Where something varies K (a
controller, the PID scheduler, a length limit), only the mean K of the window is known, and the expected figure is
bounded from below over all mixtures of K with that mean: the least share of drafts with at least i of M tokens is
(K - i + 1) / (M - i + 1), with all others just short of i; the sum over positions is concave in K, so its least mean is
on the chord between K = 1 and K = M. At a fixed K = M both are exact. If K is raised where tokens are accepted, the
live figures are higher still: the bound errs on the side of health.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from eagle.bundle.reference import Reference
from eagle.watch.counts import Counts

Figures = NDArray[np.float64]


def lower_bounds(reference: Reference, confidence: float) -> tuple[float, ...]:
    """Return a lower confidence bound of each reference share (one-sided, each by itself).

    The share is a ratio of sums over prompts; its standard error comes from the prompts' residuals (ratio estimator,
    Cochran, Sampling Techniques, 3rd ed., 1977, eq. 6.13, and its variance over clusters), Student's t with n - 1
    degrees of freedom: rounds of one prompt may depend on each other in any way. With one prompt the bound is 0.
    """
    rows = [prompt for prompt in reference.prompts if prompt.drafts]
    if len(rows) < 2:
        return (0.0,) * reference.draft_tokens
    drafts = np.array([row.drafts for row in rows], dtype=np.float64)
    accepted = np.array([row.by_position for row in rows], dtype=np.float64)
    share = accepted.sum(axis=0) / drafts.sum()
    residuals = accepted - drafts[:, None] * share
    n = len(rows)
    error = np.sqrt(n / (n - 1) * (residuals**2).sum(axis=0)) / drafts.sum()
    bounds = np.array(reference.acceptance_by_position) - stdtrit(n - 1, confidence) * error
    bounds = np.minimum.accumulate(np.clip(bounds, 0.0, 1.0))
    return tuple(float(bound) for bound in bounds)


def observed(window: Counts, positions: int) -> Figures:
    """Return the figures [positions + 1] of a window with at least one draft, over its first `positions` positions."""
    shares = np.zeros(positions)
    known = min(positions, window.positions)
    shares[:known] = np.array(window.by_position[:known]) / window.drafts
    return np.append(shares, shares.mean())


def expected(shares: tuple[float, ...], window: Counts, positions: int) -> Figures:
    """Return the least figures [positions + 1] that reference shares allow at the window's mean K (see above)."""
    most = max(window.positions, 1)
    mean = float(np.clip(window.draft_tokens / window.drafts, 1.0, most))
    before = np.arange(positions)  # positions before each one
    held = np.where(before == 0, 1.0, np.clip((mean - before) / np.maximum(most - before, 1), 0.0, 1.0))
    held[most:] = 0.0
    first, whole = shares[0], sum(shares[: min(positions, most)])
    along = (mean - 1.0) / (most - 1.0) if most > 1 else 1.0
    return np.append(np.array(shares[:positions]) * held, (first + along * (whole - first)) / positions)
