"""Prefect's settings for this project. Prefect reads them at import, so `flows/__init__.py` calls `prepare` before any import.

Only defaults are set: what the user's environment or a worker says wins, PREFECT_API_URL above all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml

from eagle.errors import ConfigError
from eagle.profiles import project_root
from eagle.progress import say

_TERMINAL = "EAGLE_FLOW_TERMINAL"
DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",  # the first migration of a fresh home is slow
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
}


def prepare(start: Path) -> None:
    """Set Prefect's environment for the project at or above `start`, with its home in the project's state folder.

    Does nothing once Prefect is imported (a worker has its own settings); outside a project Prefect keeps its own home.
    """
    if "prefect" in sys.modules:
        return
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        root = project_root(start)
    except ConfigError:
        return
    home = Path(os.environ.setdefault("PREFECT_HOME", str(root / _state_folder(root) / "prefect")))
    home.parent.mkdir(parents=True, exist_ok=True)  # Prefect makes the last folder only


def quiet_console() -> None:
    """Keep Prefect's own lines off the terminal (they still reach its API) and let `show` print the steps' lines there.

    Under a worker neither happens: there Prefect's console is the terminal, and each line appears once as well.
    """
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ[_TERMINAL] = "1"


def show(line: str) -> None:
    """Print a step's line to the terminal when the command runs the flow."""
    if os.environ.get(_TERMINAL) == "1":
        say(line)


def _state_folder(root: Path) -> str:
    """Return `paths.state` as params.yaml has it; a broken file is reported later, by the config loader."""
    try:
        content = yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return ".state"
    paths = content.get("paths") if isinstance(content, dict) else None
    state = paths.get("state") if isinstance(paths, dict) else None
    return state if isinstance(state, str) else ".state"
