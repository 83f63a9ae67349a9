"""The one Prefect task: a step as a supervised process, its lines in the run's log and on the terminal."""

from __future__ import annotations

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from eagle.steps import get_step, status
from flows import env
from flows.launch import Launch
from flows.process import StepExit, run_supervised


async def is_crash(_task: Any, _run: Any, state: Any) -> bool:
    """Prefect's retry condition: only a step that crashed is tried again, never one that refused its work."""
    failure = await state.aresult(raise_on_failure=False)
    return isinstance(failure, StepExit) and failure.crashed


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=is_crash)
def bring_up_to_date(name: str, launch: Launch) -> float | None:
    """Run step `name` of the launch unless it is up to date. Returns its seconds, or None when nothing was to be done.

    Raises StepExit or StepTimeout; the step's own message is the last line it wrote.
    """
    logger = get_run_logger()

    def line(text: str) -> None:
        logger.info(text)
        env.show(text)

    if not launch.force and status(get_step(name), launch.config, launch.root, launch.base).up_to_date:
        line(f"{name}: up to date")
        return None
    began = time.monotonic()
    run_supervised(
        name, launch.command(name), cwd=launch.root, env=launch.environment(),
        timeout=launch.config.flow.step_timeout_s, line=line,
    )
    return round(time.monotonic() - began, 1)
