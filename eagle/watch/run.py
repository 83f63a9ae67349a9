"""The watch at work: scrape, judge, keep the state, tell about changes. One process per server and state file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from filelock import Timeout

from eagle import manifest
from eagle.bundle.reference import Reference
from eagle.config import WatchConfig
from eagle.errors import BusyError, EagleError
from eagle.locks import owned_lock
from eagle.progress import say
from eagle.watch.scrape import NoCounters, Unreachable, fetch, metrics_url, parse
from eagle.watch.state import Change, State, load_state, save_state
from eagle.watch.watcher import Boundaries, take

EXIT_CODES = {"healthy": 0, "drifting": 10, "degraded": 11}
_STRANGE = ".-"

Tell = Callable[[Change, State], None]


class Watch:
    """A server under watch. `tell` is called once for each change of the status, again at the next look if it failed."""

    def __init__(self, url: str, reference: Reference, config: WatchConfig, path: Path, tell: Tell | None = None) -> None:
        self.url, self.config, self.path, self._tell = metrics_url(url), config, path, tell
        self.known = Boundaries.of(reference, config)
        self.state, self.fresh = load_state(path, self.url, manifest.hash_json(reference.model_dump(mode="json")))

    def look(self) -> list[Change]:
        """Scrape once and judge; the state is on disk when this returns. Returns the changes of the status.

        Raises Unreachable when the server does not answer, NoCounters when what it sends is no vLLM with speculation.
        """
        engines = parse(fetch(self.url, self.config.timeout_s), self.url)
        changes = take(self.state, engines, time.time(), self.config, self.known)
        if self._tell:
            for change in changes:
                change.told = False
        save_state(self.path, self.state)
        self._tell_changes()
        return changes

    def _tell_changes(self) -> None:
        if self._tell is None:
            return
        for change in (c for c in self.state.changes if not c.told):
            try:
                self._tell(change, self.state)
            except EagleError as error:
                say(f"{error}; tried again at the next look")
                return
            change.told = True
            save_state(self.path, self.state)

    def follow(self, show: Callable[[list[Change], str], None]) -> None:
        """Look every `watch.interval_s` seconds until a signal ends it; show(changes, trouble) after each look.

        A server that does not answer is no end: `trouble` says so, "" when all is well. Neither is a page without
        counters, once there were some: a proxy may stand in for a server that starts. Raises NoCounters before that.
        """
        while True:
            began = time.monotonic()
            try:
                changes, trouble = self.look(), ""
            except (Unreachable, NoCounters) as error:
                if isinstance(error, NoCounters) and self.state.open is None:
                    raise
                changes, trouble = [], str(error)
            show(changes, trouble)
            time.sleep(max(self.config.interval_s - (time.monotonic() - began), 0.0))


def default_state(folder: Path, url: str) -> Path:
    """Return the state file of a server below `folder`: its host and port, and a hash that tells whole addresses apart."""
    full = metrics_url(url)
    name = "".join(c if c.isalnum() or c in _STRANGE else "_" for c in urlsplit(full).netloc.rpartition("@")[2])
    return folder / f"{name}-{hashlib.sha256(full.encode()).hexdigest()[:8]}.json"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the state file; BusyError when another watch has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with owned_lock(path.with_name(path.name + ".lock")):
            yield
    except Timeout:
        raise BusyError(f"watch: another process watches with {path}; stop it or give another --state") from None
