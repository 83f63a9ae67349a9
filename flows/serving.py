"""Deployments served from this machine: Prefect's runner polls the API and starts each run as a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.events import DeploymentTriggerTypes
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import PrefectException
from prefect.runner import Runner
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType
from pydantic import TypeAdapter, ValidationError

from eagle.errors import ConfigError, PreflightError
from flows.definitions import Definition

RUNNER = "eagle-schedule"
TRIGGER: TypeAdapter[DeploymentTriggerTypes] = TypeAdapter(DeploymentTriggerTypes)


def serve(definitions: Sequence[Definition], automations: Path | None) -> None:
    """Register the deployments and the automations of a file with the API, then run what is due until a signal comes.

    The runner itself has no limit: each tick is put to the API, which cancels it where the deployment's limit says so.
    With a limit in the runner such ticks would wait in it and pile up. A schedule that somebody paused stays paused.
    Raises ConfigError for a cron line or trigger that Prefect refuses, PreflightError when the API does not answer.
    """
    runner = Runner(name=RUNNER, pause_on_shutdown=False, limit=None)
    try:
        for definition in definitions:
            runner.add_flow(**arguments(definition))
        if automations is not None:
            install(automations)
    except (PrefectException, httpx.HTTPError) as error:
        raise PreflightError(f"schedule: the Prefect server did not take the deployments ({_first_line(error)})") from None
    asyncio.run(runner.start())


def arguments(definition: Definition) -> dict[str, Any]:
    """Return what Prefect's `Runner.add_flow` takes. ConfigError for a cron line or a trigger that Prefect refuses."""
    limit = definition.concurrency_limit
    try:
        return {
            "flow": load_flow(definition.entrypoint),
            "name": definition.name,
            "description": definition.description,
            "parameters": definition.parameters,
            "schedules": [Cron(tick.cron, timezone=tick.timezone, slug=tick.slug) for tick in definition.schedules] or None,
            "concurrency_limit": ConcurrencyLimitConfig(**limit.model_dump()) if limit else None,
            "triggers": [TRIGGER.validate_python(trigger) for trigger in definition.triggers],
            "tags": list(definition.tags),
            "version": definition.version,
            "paused": definition.paused,
            "entrypoint_type": EntrypointType.MODULE_PATH,
        }
    except ValidationError as error:
        raise ConfigError(f"{definition.name}: {_first(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{definition.name}: {_first_line(error)}") from None


def load_flow(entrypoint: str) -> Flow[..., Any]:
    """Return the flow at `flows/retrain.py:retrain`, imported as the module that it is. ConfigError when there is none."""
    path, _, name = entrypoint.partition(":")
    module = path.removesuffix(".py").replace("/", ".")
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"entrypoint {entrypoint}: no module {error.name}; give a path below the project, such as flows/retrain.py:retrain"
        ) from None
    if not isinstance(found, Flow):
        raise ConfigError(f"entrypoint {entrypoint}: {module} has no flow '{name}'")
    return found


def install(path: Path) -> None:
    """Create the automations of a YAML file (`automations: [...]`) that the server does not have by name yet."""
    try:
        wanted = [AutomationCore.model_validate(one) for one in yaml.safe_load(path.read_text(encoding="utf-8"))["automations"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(f"{path}: no automations can be read from it ({_first_line(error)})") from None
    with get_client(sync_client=True) as client:
        for automation in wanted:
            if not client.read_automations_by_name(automation.name):
                client.create_automation(automation)


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
