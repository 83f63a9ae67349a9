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

import httpx
from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from eagle.steps import STEPS
from flows import launch as launching
from flows import summary
from flows.tasks import bring_up_to_date


@flow(name="retrain", persist_result=False)
def retrain(
    profile: str = "default", overrides: list[str] | None = None, run_id: str | None = None, force: bool = False
) -> dict[str, Any]:
    """Bring all seven steps of runs/<run_id> up to date and return `{run_id, folder, steps, model, version, alias, verdict, uri}`.

    run_id: default is the profile's name. force: run every step anew. A rejected challenger is a result, not a failure.
    Raises ConfigError, BusyError, PreflightError before anything is started; StepExit or StepTimeout from a step.
    """
    launch = launching.prepare(profile, tuple(overrides or ()), run_id, force=force)
    with launching.run_lock(launch):
        launching.preflight(launch)
        run = bring_up_to_date.with_options(retries=launch.config.flow.retries, retry_delay_seconds=1)
        seconds: dict[str, float | None] = {}
        for name in STEPS:
            seconds[name] = run(name, launch)
            if seconds[name] is not None:
                _show_artifact(name, launch)
        return summary.result(launch.base, launch.run_id, seconds)


def _show_artifact(name: str, launch: launching.Launch) -> None:
    """Publish the bench table and the gate's verdict as Prefect artifacts. A failing API costs a warning, not the run."""
    if name == "bench":
        markdown = f"```\n{summary.bench_table(launch.base)}\n```"
    elif name == "register":
        markdown = "\n".join(f"- {line.strip()}" for line in summary.gate_lines(launch.base))
    else:
        return
    try:
        create_markdown_artifact(markdown=markdown, key=f"eagle-{name}", description=f"{name} of run {launch.run_id}")
    except (PrefectException, httpx.HTTPError) as error:
        get_run_logger().warning("artifact of %s not stored: %s", name, error)
