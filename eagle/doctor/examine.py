"""The whole examination, in order: processes, folders, then MLflow, whose findings depend on who is alive."""

from __future__ import annotations

from pathlib import Path

from eagle.config import Config
from eagle.doctor.finding import Finding
from eagle.doctor.folders import project_findings
from eagle.doctor.processes import server_findings, temporary_findings
from eagle.errors import BusyError, EagleError


def examine(config: Config, root: Path) -> list[Finding]:
    """Return what is wrong with the project at `root`. Changes nothing and makes nothing."""
    state = root / config.paths.state
    found = [*server_findings(state), *temporary_findings(), *project_findings(config, root)]
    if config.register_.tracking_uri is not None or (state / "mlflow.db").is_file():
        found += _registry(config, root)
    return found


def _registry(config: Config, root: Path) -> list[Finding]:
    from eagle.registry.client import open_store  # MLflow, only where there is a store
    from eagle.registry.health import store_findings
    from eagle.registry.step import model_name

    try:
        return list(store_findings(open_store(config, root), model_name(config)))
    except EagleError as error:
        wait = "wait for the other process" if isinstance(error, BusyError) else "do what the message says"
        return [Finding(f"the MLflow store cannot be examined: {error}", str(root), "nothing was changed", f"cannot: {wait}", None)]


def mend(findings: list[Finding]) -> list[bool]:
    """Mend each finding that can be; returns which were mended. One that a live process took over meanwhile is left."""
    return [finding.mend is not None and finding.mend() for finding in findings]
