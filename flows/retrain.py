"""The retraining flow: dataset, distill, policy, tune, bench, bundle, register, each a supervised process.

    python -m flows.retrain --profile tiny --set distill.max_minutes=1

A run id names a folder under runs/; running it again continues where it stopped and does nothing that is up to date.
"""

from __future__ import annotations

import sys
from typing import Any

if __name__ == "__main__":  # the command refuses a bad request before Prefect is imported, then imports this module
    from flows.command import main

    sys.exit(main())

from prefect import flow
from prefect.states import Completed, State
from prefect.tasks import exponential_backoff

from eagle.errors import BusyError
from eagle.steps import STEPS
from flows import launch as launching
from flows import summary, ticks
from flows.artifacts import Artifacts
from flows.hooks import tell_crash, tell_failure
from flows.tasks import bring_up_to_date

JITTER = 0.2


@flow(name="retrain", persist_result=False, on_failure=[tell_failure], on_crashed=[tell_crash])
def retrain(
    profile: str = "default", overrides: list[str] | None = None, run_id: str | None = None, force: bool = False
) -> dict[str, Any] | State[Any]:
    """Bring all seven steps of runs/<run_id> up to date and return `{run_id, folder, steps, model, version, alias, verdict, uri}`.

    run_id: default is the profile's name. force: run every step anew. A rejected challenger is a result, not a failure.
    A scheduled run that comes too late, or while another one is at the same folder, ends at once as Completed, and so
    does one with nothing to do; the state's message says which.
    Raises ConfigError, BusyError, PreflightError before anything is started; StepExit or StepTimeout from a step.
    """
    launch = launching.prepare(profile, tuple(overrides or ()), run_id, force=force)
    late = ticks.lateness(launch.config.flow.max_late_minutes)
    if late:
        return Completed(message=late)
    try:
        with launching.run_lock(launch):
            return _retrain(launch)
    except BusyError as error:
        if ticks.scheduled_run() is None:
            raise
        return Completed(message=f"busy, skipped: {error}")


def _retrain(launch: launching.Launch) -> dict[str, Any] | State[Any]:
    stale = launching.preflight(launch)
    if not stale:
        value = summary.result(launch.base, launch.run_id, dict.fromkeys(STEPS))
        return Completed(message=f"nothing new: {', '.join(STEPS)} up to date", data=value)
    settings = launch.config.flow
    run = bring_up_to_date.with_options(
        retries=settings.retries, retry_delay_seconds=exponential_backoff(settings.retry_delay_s), retry_jitter_factor=JITTER
    )
    artifacts = Artifacts(launch, stale)
    seconds: dict[str, float | None] = {}
    for name in STEPS:
        seconds[name] = run(name, launch)
        if seconds[name] is not None:
            artifacts.after(name)
    value = summary.result(launch.base, launch.run_id, seconds)
    artifacts.at_the_end(seconds)
    return value
