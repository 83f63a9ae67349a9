"""What a run shows in Prefect's UI: progress, the bench table, the gate, times, the model version and the report.

Every run of a run id writes to the same keys, so that the UI keeps their history. An API that does not answer costs a
warning in the log, never the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from eagle.steps import STEPS
from flows import summary
from flows.launch import Launch

PROGRESS, BENCH, GATE, TIMES, VERSION, REPORT = (
    f"eagle-{name}" for name in ("progress", "bench", "gate", "steps", "version", "report")
)


class Artifacts:
    """The artifacts of one run. `stale`: the steps that will run; what they wait for may run too."""

    def __init__(self, launch: Launch, stale: Sequence[str]) -> None:
        self._launch = launch
        self._progress: UUID | None = None
        with _tolerant(PROGRESS):
            text = f"run {launch.run_id}: {', '.join(stale)} to do"
            self._progress = cast(UUID, create_progress_artifact(0.0, key=PROGRESS, description=text))

    def after(self, step: str) -> None:
        """Show that `step` ran, and what it brought: the bench table, the gate's checks."""
        run_id, base = self._launch.run_id, self._launch.base
        self._advance(100.0 * (list(STEPS).index(step) + 1) / len(STEPS), f"run {run_id}: {step} done")
        if step == "bench":
            with _tolerant(BENCH):
                create_markdown_artifact(
                    f"```\n{summary.bench_table(base)}\n```", key=BENCH, description=f"bench of run {run_id}"
                )  # fmt: skip
        if step == "register":
            with _tolerant(GATE):
                create_table_artifact(summary.gate_rows(base), key=GATE, description=summary.gate_lines(base)[0])

    def at_the_end(self, seconds: dict[str, float | None]) -> None:
        """Show each step's time, where the registered version is, and the model card."""
        run_id, base = self._launch.run_id, self._launch.base
        self._advance(100.0, f"run {run_id}: complete")
        with _tolerant(TIMES):
            rows = [{"step": name, "seconds": took, "state": _state(took)} for name, took in seconds.items()]
            create_table_artifact(rows, key=TIMES, description=f"steps of run {run_id}")
        with _tolerant(VERSION):
            _show_version(summary.registration(base), base)
        with _tolerant(REPORT):
            create_markdown_artifact(summary.report(base), key=REPORT, description=f"report of run {run_id}")

    def _advance(self, percent: float, text: str) -> None:
        if self._progress is not None:
            with _tolerant(PROGRESS):
                update_progress_artifact(self._progress, percent, description=text)


def _state(seconds: float | None) -> str:
    return "up to date" if seconds is None else "ran"


def _show_version(registered: dict[str, Any], base: Path) -> None:
    """Link to the version in MLflow's UI; where the store is a database without one, say how to look at it."""
    model, version, store = registered["model"], registered["version"], registered["tracking_uri"]
    text = f"{model} version {version}, alias {registered['alias']}"
    if store.startswith(("http://", "https://")):
        link = f"{store.rstrip('/')}/#/models/{model}/versions/{version}"
        create_link_artifact(link, link_text=f"{model} {version}", key=VERSION, description=text)
        return
    lines = (
        f"- version: `models:/{model}/{version}` (alias `{registered['alias']}`)", f"- MLflow run: `{registered['run_id']}`",
        f"- look at both: `mlflow ui --backend-store-uri '{store}'`", f"- all that is recorded: `eagle registry show {version}`",
        f"- files of the run: `{base}`",
    )  # fmt: skip
    create_markdown_artifact("\n".join(lines), key=VERSION, description=text)


@contextmanager
def _tolerant(what: str) -> Iterator[None]:
    try:
        yield
    except (PrefectException, httpx.HTTPError) as error:
        get_run_logger().warning("artifact %s not stored: %s", what, error)
