"""The promise of the watch, by simulation: how often it cries wolf in a month, and how soon it sees the wolf.

Traffic: a request has an acceptance of its own (Beta distributed), which all its rounds share, and half of a window's
requests go on into the next window.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from eagle.bundle.reference import Reference
from eagle.config import WatchConfig
from eagle.watch.counts import Counts
from eagle.watch.detector import BETS, CLIP, LANES, Detector, month_windows, threshold, update
from eagle.watch.figures import lower_bounds

Array = NDArray[np.float64]
PROMISED = WatchConfig().false_alarms_per_month
LEVELS = 2
ROUNDS, SPREAD, K = 30, 6.0, 3


def traffic(rng: np.random.Generator, sims: int, windows: int, mean: float, requests: int) -> Iterator[Array]:
    """Yield figures [sims, K + 1] of one window after the other."""
    own = rng.beta(mean * SPREAD, (1 - mean) * SPREAD, (sims, requests))
    for _ in range(windows):
        new = rng.beta(mean * SPREAD, (1 - mean) * SPREAD, (sims, requests))
        new[:, : requests // 2] = own[:, requests // 2 :]
        own = new
        yield figures(rng, own)


def figures(rng: np.random.Generator, own: Array) -> Array:
    counts = [rng.binomial(ROUNDS, own)]
    while len(counts) < K:
        counts.append(rng.binomial(counts[-1], own))
    shares = np.stack([count.sum(axis=1) for count in counts], axis=1) / (ROUNDS * own.shape[1])
    return np.append(shares, shares.mean(axis=1, keepdims=True), axis=1)


def truth(mean: float) -> Array:
    """The long-run figures [K + 1]: moments of the Beta distribution."""
    shares = np.cumprod([(mean * SPREAD + at) / (SPREAD + at) for at in range(K)])
    return np.append(shares, shares.mean())


def references(rng: np.random.Generator, sims: int, mean: float, prompts: int = 16) -> Array:
    """Lower bounds [sims, K + 1] from references that were themselves drawn from the same traffic."""
    rows = []
    for _ in range(sims):
        own = rng.beta(mean * SPREAD, (1 - mean) * SPREAD, prompts)
        counts = np.empty((prompts, K), dtype=int)
        for at in range(K):
            counts[:, at] = rng.binomial(ROUNDS if at == 0 else counts[:, at - 1], own)
        shares = (counts.sum(axis=0) / (ROUNDS * prompts)).tolist()
        reference = Reference.model_validate(
            {
                "draft_tokens": K, "temperature": 0.0, "vllm_version": "0", "acceptance_by_position": shares,
                "prompts": [{"kind": "x", "drafts": ROUNDS, "by_position": row} for row in counts.tolist()],
            }
        )  # fmt: skip
        bounds = lower_bounds(reference, WatchConfig().reference_confidence)
        rows.append([*bounds, sum(bounds) / K])
    return np.array(rows)


def first_alarms(stream: Iterator[Array], healthy: Array, tolerance: float, limit: float) -> NDArray[np.int64]:
    """Return the window of each simulation's alarm [sims], -1 where there is none: `Detector.observe` on many at once."""
    sims = len(healthy)
    evidence = np.zeros((LANES, sims, K + 1, len(BETS)))
    alarms = np.full(sims, -1)
    for at, seen in enumerate(stream):
        lane = at % LANES
        evidence[lane] = update(evidence[lane], seen - (1 - tolerance) * healthy, CLIP + tolerance * healthy)
        alarms[(evidence[lane].mean(axis=(1, 2)) >= limit) & (alarms < 0)] = at
        evidence[lane][alarms >= 0] = 0.0
    return alarms


def test_the_bound_holds_where_it_is_tight() -> None:
    """Means exactly on the boundary, nothing clipped: the alarms of a short month come near the promise and stay within."""
    rng = np.random.default_rng(1)
    windows, sims, promised = 200, 4000, 0.2
    limit = windows / promised
    evidence, alarmed = np.zeros((sims, 1, len(BETS))), np.zeros(sims, dtype=bool)
    for _ in range(windows):
        gain = np.where(rng.random((sims, 1)) < 0.1, 0.9, -0.1)
        evidence = update(evidence, gain, np.array([0.9]))
        alarmed |= evidence.mean(axis=(1, 2)) >= limit
    assert alarmed.mean() <= promised + 3 * np.sqrt(promised * (1 - promised) / sims)
    assert alarmed.mean() > promised / 20, "the simulation says nothing"


@pytest.mark.parametrize("mean", [0.3, 0.6])
def test_false_alarms_of_a_month(mean: float) -> None:
    """200 months of 10-minute windows with 6 requests each; the reference's bound exactly at the truth."""
    rng = np.random.default_rng(2)
    sims, window_s = 200, 600.0
    limit = threshold(window_s, PROMISED, LEVELS)
    windows = month_windows(window_s) * LANES
    assert windows == 4320
    healthy = np.tile(truth(mean), (sims, 1))
    alarms = first_alarms(traffic(rng, sims, windows, mean, 6), healthy, WatchConfig().drifting_tolerance, limit)
    assert (alarms >= 0).mean() <= PROMISED


def test_false_alarms_with_references_that_are_themselves_measured() -> None:
    """As above, each month with a reference of 16 prompts of its own: its confidence and the test's error add up."""
    rng = np.random.default_rng(3)
    sims, window_s = 200, 600.0
    healthy = references(rng, sims, 0.5)
    limit = threshold(window_s, PROMISED, LEVELS)
    alarms = first_alarms(traffic(rng, sims, 4320, 0.5, 6), healthy, WatchConfig().drifting_tolerance, limit)
    assert (alarms >= 0).mean() <= PROMISED + (1 - WatchConfig().reference_confidence)


def test_taking_rounds_for_independent_would_cry_wolf() -> None:
    """The same traffic: a z-test per window at a level of one false alarm in a thousand months, rounds as if independent."""
    rng = np.random.default_rng(4)
    share = truth(0.5)[0]
    error = np.sqrt(share * (1 - share) / (6 * ROUNDS))
    lowest = np.min([seen[:, 0] for seen in traffic(rng, 200, 432, 0.5, 6)], axis=0)
    assert ((lowest - share) / error < -5.0).mean() > 0.5  # 5 sigma: 3e-7 a window


@pytest.mark.parametrize(
    ("fall", "level", "within"),
    [(0.3, "drifting", 110), (0.5, "drifting", 60), (0.3, "degraded", 250), (0.5, "degraded", 110)],
)
def test_a_real_fall_is_seen_within(fall: float, level: str, within: int) -> None:
    """Default windows, first-position acceptance 0.5 before, the reference's bound 15 % below it; `fall` of it is lost."""
    rng = np.random.default_rng(5)
    config, sims = WatchConfig(), 200
    healthy = np.tile(0.85 * truth(0.5), (sims, 1))
    limit = threshold(config.window_s, config.false_alarms_per_month, LEVELS)
    alarms = first_alarms(traffic(rng, sims, within, 0.5 * (1 - fall), 12), healthy, getattr(config, f"{level}_tolerance"), limit)
    assert (alarms >= 0).mean() >= 0.95


def test_a_fall_after_a_long_healthy_time_is_seen_as_soon() -> None:
    rng = np.random.default_rng(6)
    config, sims = WatchConfig(), 50
    healthy = np.tile(0.85 * truth(0.5), (sims, 1))
    limit = threshold(config.window_s, config.false_alarms_per_month, LEVELS)

    def stream() -> Iterator[Array]:
        yield from traffic(rng, sims, 2000, 0.5, 12)
        yield from traffic(rng, sims, 110, 0.35, 12)

    alarms = first_alarms(stream(), healthy, config.drifting_tolerance, limit)
    assert (alarms >= 2000).mean() >= 0.95


class TestDetector:
    """The class itself does what the simulations above do in bulk."""

    def run(self, stream: Iterator[Array], healthy: Array, detector: Detector, month: int = 10**9) -> list[int]:
        limit = threshold(120.0, PROMISED, LEVELS)
        return [at for at, seen in enumerate(stream) if detector.observe(at, seen[0], healthy, 0.05, limit, month)]

    def test_it_agrees_with_the_bulk(self) -> None:
        healthy = truth(0.5) * 0.85
        flips = self.run(traffic(np.random.default_rng(7), 1, 150, 0.35, 12), healthy, detector := Detector())
        limit = threshold(120.0, PROMISED, LEVELS)
        bulk = first_alarms(traffic(np.random.default_rng(7), 1, 150, 0.35, 12), healthy[None], 0.05, limit)
        assert flips[0] == bulk[0]
        assert detector.alarm

    def test_it_recovers_and_only_then(self) -> None:
        healthy, detector = truth(0.5) * 0.85, Detector(alarm=True)
        assert self.run(traffic(np.random.default_rng(8), 1, 300, 0.35, 12), healthy, detector) == []
        flips = self.run(traffic(np.random.default_rng(9), 1, 300, 0.5, 12), healthy, detector)
        assert len(flips) == 1
        assert not detector.alarm

    def test_evidence_starts_again_after_a_month(self) -> None:
        detector = Detector()
        self.run(traffic(np.random.default_rng(10), 1, 20, 0.5, 12), truth(0.5), detector, month=10)
        assert [lane.windows for lane in detector.lanes] == [0, 0]
        assert [lane.evidence for lane in detector.lanes] == [[], []]

    def test_its_state_goes_through_json(self) -> None:
        healthy, whole, halves = truth(0.5) * 0.85, Detector(), Detector()
        seen = [s[0] for s in traffic(np.random.default_rng(11), 1, 150, 0.35, 12)]
        for at, one in enumerate(seen):
            halves = Detector.model_validate_json(halves.model_dump_json())
            args = (at, one, healthy, 0.05, 1e5, 10**9)
            assert halves.observe(*args) == whole.observe(*args)

    def test_figures_that_cannot_fall_are_no_evidence(self) -> None:
        detector = Detector()
        assert not any(detector.observe(at, np.zeros(4), np.zeros(4), 0.05, 1.0, 10) for at in range(100))
        assert Counts().acceptance_length == 1.0
