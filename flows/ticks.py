"""What makes a scheduled run end before it starts: it comes too late, or another one is at work. Reads Prefect's run only."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.runtime import flow_run as runtime


def scheduled_run() -> FlowRun | None:
    """Return the flow run that this process is in when a schedule made it, else None (by hand, by an event, no flow run)."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return run if run is not None and run.auto_scheduled else None


def lateness(max_minutes: float | None) -> str | None:
    """Return why the scheduled run that this process is in comes too late, or None. max_minutes: None = never too late.

    A run that is tried again is not late: somebody wanted it again.
    """
    run = scheduled_run()
    if run is None or max_minutes is None or run.expected_start_time is None or int(runtime.run_count or 0) > 1:
        return None
    return too_late(run.expected_start_time, clock(), max_minutes)


def clock() -> datetime:
    """Return the time now, with its zone."""
    return datetime.now(UTC)


def too_late(due: datetime, now: datetime, max_minutes: float) -> str | None:
    """Return the reason, as the run's state shows it, when `now` is more than `max_minutes` after `due`; else None."""
    minutes = (now - due).total_seconds() / 60
    if minutes <= max_minutes:
        return None
    return (
        f"late tick, skipped: due {due.astimezone(UTC):%Y-%m-%d %H:%M} UTC, {minutes:.0f} min ago; "
        f"at most {max_minutes:g} (flow.max_late_minutes)"
    )
