"""From readings to a verdict: windows are filled, closed and judged. Knows nothing of servers, files or clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eagle.bundle.reference import REFERENCE, Reference
from eagle.config import WatchConfig
from eagle.errors import BundleError
from eagle.watch.counts import Counts, between
from eagle.watch.detector import month_windows, threshold
from eagle.watch.figures import expected, lower_bounds, observed
from eagle.watch.scrape import EngineCounters
from eagle.watch.state import KEPT_CHANGES, KEPT_WINDOWS, Change, Level, State, Window


@dataclass(frozen=True)
class Boundaries:
    """The reference as the test uses it: `bounds`, its lower confidence bounds by position, and the threshold of evidence."""

    reference: Reference
    bounds: tuple[float, ...]
    limit: float
    month: int

    @classmethod
    def of(cls, reference: Reference, config: WatchConfig) -> Boundaries:
        """Return the boundaries of a bundle's reference. BundleError when its lower bound is 0: no fall could ever be seen."""
        levels = 2
        bounds = lower_bounds(reference, config.reference_confidence)
        if bounds[0] <= 0.0:
            share, count = reference.acceptance_by_position[0], sum(prompt.drafts > 0 for prompt in reference.prompts)
            raise BundleError(
                f"{REFERENCE}: no fall can be told from {count} prompt{'s' * (count != 1)} with first-position acceptance "
                f"{share:.2f}: its lower bound is 0; pack with more: eagle step bundle --set bundle.prompts=32 --force"
            )
        return cls(
            reference,
            bounds,
            threshold(config.window_s, config.false_alarms_per_month, levels),
            month_windows(config.window_s),
        )

    def length(self, tolerance: float) -> float:
        """The acceptance length below which the long-run mean must be for an alarm, at the reference's K."""
        return 1.0 + (1.0 - tolerance) * sum(self.bounds)


def take(state: State, engines: Mapping[str, EngineCounters], now: float, config: WatchConfig, known: Boundaries) -> list[Change]:
    """Put one reading at time `now` (Unix seconds) into the state; return the changes of the status that it brought.

    The first reading only says where to count from. A window is closed by the first reading at which it is
    `watch.window_s` old and holds `watch.min_drafts` drafts and `watch.min_requests` ended requests: an idle server
    leaves it open, a gap between readings makes it longer. A clock that was set back begins the window's time anew, and
    keeps its counts.
    """
    if state.open is None:
        state.engines, state.open = dict(engines), Window(began=now, ended=now)
        return []
    counted, restarted = between(state.engines, engines)
    state.engines = {**state.engines, **engines}  # an engine that is missing for a while is not new when it comes back
    state.restarts += len(restarted)
    began = min(state.open.began, now)
    state.open = Window(began=began, ended=now, counts=state.open.counts + counted)
    held = state.open.counts
    if now - began < config.window_s or held.drafts < config.min_drafts or held.requests < config.min_requests:
        return []
    change = _judge(state, state.open, now, config, known)
    state.open = Window(began=now, ended=now)
    return [change] if change else []


def _judge(state: State, window: Window, now: float, config: WatchConfig, known: Boundaries) -> Change | None:
    before = state.status
    positions = known.reference.draft_tokens
    seen, healthy = observed(window.counts, positions), expected(known.bounds, window.counts, positions)
    tolerances: dict[Level, float] = {"drifting": config.drifting_tolerance, "degraded": config.degraded_tolerance}
    for level, tolerance in tolerances.items():
        state.detectors[level].observe(state.windows, seen, healthy, tolerance, known.limit, known.month)
    state.windows += 1
    state.closed = [*state.closed, window][-KEPT_WINDOWS:]
    if state.status == before:
        return None
    recent: Counts = state.recent
    change = Change(
        at=now, status=state.status, before=before, window=state.windows,
        acceptance_length=round(recent.acceptance_length, 4),
        acceptance_by_position=[round(share, 4) for share in recent.acceptance_by_position],
        reference_length=round(known.reference.acceptance_length, 4),
    )  # fmt: skip
    state.changes = [*state.changes, change][-KEPT_CHANGES:]
    return change
