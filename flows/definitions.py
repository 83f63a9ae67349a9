"""The deployments of prefect.yaml as checked values: one file for serving from this machine and for work pools. No Prefect here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from zoneinfo import available_timezones

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle.errors import ConfigError, closest
from eagle.profiles import load_config

FILE = "prefect.yaml"


class Tick(BaseModel):
    """One schedule: a cron line in a time zone. `slug` names it among a deployment's schedules."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cron: str = Field(min_length=1)
    timezone: str = "UTC"
    slug: str | None = None


class Limit(BaseModel):
    """How many runs at once, and what becomes of one more: cancelled, or put in a queue."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(1, ge=1)
    collision_strategy: Literal["CANCEL_NEW", "ENQUEUE"] = "CANCEL_NEW"
    grace_period_seconds: int | None = Field(None, ge=60, le=86400)


class Definition(BaseModel):
    """One deployment. What only work pools need (work_pool and the build, push and pull steps) is not looked at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    description: str | None = None
    entrypoint: str = Field(pattern=r"^[\w./-]+\.py:\w+$")
    parameters: dict[str, Any] = Field(default_factory=dict)
    schedules: tuple[Tick, ...] = ()
    concurrency_limit: Limit | None = None
    triggers: tuple[dict[str, Any], ...] = ()
    tags: tuple[str, ...] = ()
    version: str | None = None
    paused: bool | None = None
    work_pool: Any = None
    build: Any = None
    push: Any = None
    pull: Any = None

    def moved(self, cron: str | None, timezone: str | None, profile: str | None, overrides: list[str]) -> Definition:
        """Return it with what the command line said; one without a schedule is returned as it is."""
        if not self.schedules:
            return self
        tick = {name: value for name, value in (("cron", cron), ("timezone", timezone)) if value}
        said = {name: value for name, value in (("profile", profile), ("overrides", overrides)) if value}
        schedules = tuple(Tick.model_validate(old.model_dump() | tick) for old in self.schedules)
        return self.model_copy(update={"schedules": schedules, "parameters": self.parameters | said})


def read_definitions(path: Path) -> list[Definition]:
    """Return the deployments that a prefect.yaml defines. ConfigError, one line, for a file or a value that cannot be used."""
    content = _read_yaml(path)
    found = content.get("deployments") if isinstance(content, dict) else None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{path}: defines no deployments; see the project's own {FILE}")
    try:
        return [Definition.model_validate(one) for one in found]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "deployment"
        raise ConfigError(f"{path}: {place}: {first['msg']}, got {first.get('input')!r}") from None


def check(definition: Definition, root: Path) -> None:
    """Check what a run would only find at its hour: the time zone, the profile and the overrides. Raises ConfigError."""
    for tick in definition.schedules:
        if tick.timezone not in available_timezones():
            near = closest(tick.timezone, available_timezones())
            raise ConfigError(f"{definition.name}: no time zone '{tick.timezone}'{near}; names as in the IANA database")
    if definition.schedules:
        said = definition.parameters
        load_config(root, str(said.get("profile", "default")), tuple(said.get("overrides") or ()))


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; deployments are defined in the project's {FILE}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
