"""Settings of the controller in one vLLM server: JSON in the environment variable EAGLE_PID_SETTINGS, or a file it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eagle.decode.control import ControlSettings
from eagle.decode.cost import CostTable

VARIABLE = "EAGLE_PID_SETTINGS"
TESTED = ("0.32",)  # vLLM versions (major.minor) in which the scheduler's hooks were run


class PidSettings(BaseModel):
    """`max_tokens`: the largest draft length K (never more than the server's num_speculative_tokens).

    `intake_length`: the largest K of a step that takes prompts in, whose first tokens wait for the drafts (16 = no limit).
    `control`: keys of `eagle.decode.control.ControlSettings`. `costs`: a `CostTable` as JSON object, believed until the
    server's own rounds have been timed. `versions`: vLLM versions (major.minor) in which the controller is used; in others
    vLLM's own draft length stays. `flush_seconds`: how often the metrics are written.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1, le=16)] = 16
    intake_length: Annotated[int, Field(ge=0, le=16)] = 1
    control: dict[str, float] = Field(default_factory=dict)
    costs: dict[str, Any] | None = None
    versions: tuple[str, ...] = TESTED
    flush_seconds: Annotated[float, Field(gt=0.0, le=60.0)] = 0.5

    @field_validator("control")
    @classmethod
    def _known(cls, value: dict[str, float]) -> dict[str, float]:
        _control(value)
        return value

    @field_validator("costs")
    @classmethod
    def _table(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        _table(value)
        return value

    def control_settings(self, limit: int) -> ControlSettings:
        """The controller's settings for a server whose num_speculative_tokens is `limit`."""
        return _control({**self.control, "max_tokens": min(self.max_tokens, limit), "trace_rounds": 1})

    def cost_table(self) -> CostTable | None:
        """The costs believed at first, or None."""
        return _table(self.costs)


def load_settings(environment: Mapping[str, str]) -> PidSettings:
    """Return the settings that the environment gives; the defaults when it gives none.

    Raises ValueError, one line, for a file that cannot be read, bad JSON, an unknown key or a value out of range.
    """
    given = environment.get(VARIABLE, "").strip()
    if not given:
        return PidSettings()
    try:
        text = given if given.startswith("{") else Path(given).read_text(encoding="utf-8")
        return PidSettings.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{VARIABLE}: {key}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{VARIABLE}: {given[:200]}: {error}") from None


def _control(values: Mapping[str, float]) -> ControlSettings:
    whole = {"max_tokens", "probe_every", "probe_limit", "probe_drafts", "trace_rounds"}
    try:
        return ControlSettings(**{name: int(value) if name in whole else value for name, value in values.items()})  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(str(error).rpartition(") ")[2]) from None


def _table(value: dict[str, Any] | None) -> CostTable | None:
    return None if value is None else CostTable.from_json(json.dumps(value))
