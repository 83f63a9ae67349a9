"""What the watcher knows, in one small JSON file that is replaced as a whole: a new process goes on where one ended."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle import manifest
from eagle.errors import ConfigError
from eagle.watch.counts import Counts
from eagle.watch.detector import Detector
from eagle.watch.scrape import EngineCounters

Level = Literal["drifting", "degraded"]
Status = Literal["healthy", "drifting", "degraded"]
KEPT_WINDOWS = 60
KEPT_CHANGES = 50


def _detectors() -> dict[Level, Detector]:
    return {"drifting": Detector(), "degraded": Detector()}


class Window(BaseModel):
    """Counts from `began` to `ended`, Unix seconds; of the open window `ended` is the last reading's time."""

    model_config = ConfigDict(extra="forbid")

    began: float
    ended: float
    counts: Counts = Counts()


class Change(BaseModel):
    """A change of the status at `at` (Unix seconds), with the acceptance of the last windows. `told`: the event is out."""

    model_config = ConfigDict(extra="forbid")

    at: float
    status: Status
    before: Status
    window: int
    acceptance_length: float
    acceptance_by_position: list[float]
    reference_length: float
    told: bool = True


class State(BaseModel):
    """All that is kept. `reference`: the hash of the reference that the evidence is about."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    url: str
    reference: str
    engines: dict[str, EngineCounters] = Field(default_factory=dict)
    open: Window | None = None
    closed: list[Window] = Field(default_factory=list)
    windows: int = Field(0, ge=0)
    restarts: int = Field(0, ge=0)
    detectors: dict[Level, Detector] = Field(default_factory=_detectors)
    changes: list[Change] = Field(default_factory=list)

    @property
    def status(self) -> Status:
        """The worst boundary that the figures have fallen below."""
        if self.detectors["degraded"].alarm:
            return "degraded"
        return "drifting" if self.detectors["drifting"].alarm else "healthy"

    @property
    def recent(self) -> Counts:
        """The counts of the last windows together."""
        return sum((window.counts for window in self.closed), Counts())


def load_state(path: Path, url: str, reference: str) -> tuple[State, str]:
    """Return the state in the file, and why a fresh one was made instead ("" when the file's is used).

    Fresh: there is no file, or the bundle has another reference. Raises ConfigError for a file that is no state, or
    another server's: evidence is never dropped without a word.
    """
    fresh = State(url=url, reference=reference)
    try:
        state = State.model_validate(manifest.read_json(path))
    except FileNotFoundError:
        return fresh, "first start"
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise ConfigError(
            f"watch: {path} is no state of the watch ({place}: {first['msg']}); remove it or give another --state"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"watch: {path} cannot be read ({error}); remove it or give another --state") from None
    if state.url != url:
        raise ConfigError(f"watch: {path} is about {state.url}, not {url}; give each server its own --state")
    if state.reference != reference:
        return fresh, "the bundle is another one: what was seen before does not count"
    return state, ""


def save_state(path: Path, state: State) -> None:
    """Replace the file. ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_json(path, state.model_dump(mode="json"))
    except OSError as error:
        raise ConfigError(f"watch: cannot write {path} ({error.strerror}); give another place with --state") from None
