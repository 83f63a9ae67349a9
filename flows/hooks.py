"""What a run that failed or crashed leaves for whoever looks: one line in its log, and an artifact with the next command."""

from __future__ import annotations

import shlex
from typing import Any

import httpx
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import PrefectException
from prefect.logging.loggers import flow_run_logger

KEY = "eagle-failure"


def tell_failure(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's on_failure hook: a step refused its work, crashed more often than it is retried, or ran out of time."""
    _tell(flow, flow_run, state, f"continue once the cause is mended: {command(flow_run.parameters)}")


def tell_crash(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's on_crashed hook: the run's process was ended from outside, or the machine took it."""
    _tell(flow, flow_run, state, f"see what is left: eagle doctor --fix; then: {command(flow_run.parameters)}")


def command(parameters: dict[str, Any]) -> str:
    """Return the command that continues a run with these parameters of the flow `retrain`, as a line for a shell."""
    words = ["python", "-m", "flows.retrain"]
    words += ["--profile", str(parameters["profile"])] if parameters.get("profile") else []
    words += [word for override in parameters.get("overrides") or [] for word in ("--set", str(override))]
    words += ["--run-id", str(parameters["run_id"])] if parameters.get("run_id") else []
    return shlex.join(words)


def _tell(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any], then: str) -> None:
    logger = flow_run_logger(flow_run, flow)
    why = " ".join((state.message or state.name or "").split())
    logger.error("%s: %s; %s", state.name, why, then)
    text = f"**{state.name}**: {why}\n\nNext, {then}\n"
    about = f"{flow_run.name}: {state.name}"
    artifact = ArtifactCreate(key=KEY, type="markdown", description=about, data=text, flow_run_id=flow_run.id)
    try:
        with get_client(sync_client=True) as client:
            client.create_artifact(artifact)
    except (PrefectException, httpx.HTTPError) as error:
        logger.warning("artifact %s not stored: %s", KEY, error)
