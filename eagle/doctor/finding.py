"""One finding of the doctor, and the lock under which it is mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from eagle.locks import owned_lock


@dataclass(frozen=True)
class Finding:
    """what, where, why mending is safe, what --fix does.

    `mend` does it and returns True, or False when a live process took the thing over since it was found; None: only a
    person can mend it, `fix` says how.
    """

    what: str
    where: str
    safe: str
    fix: str
    mend: Callable[[], bool] | None


def under_lock(lock: Path, action: Callable[[], object]) -> Callable[[], bool]:
    """Return a `mend` that does `action` while it holds `lock`, and nothing when another process holds it."""

    def mend() -> bool:
        try:
            with owned_lock(lock):
                action()
                return True
        except Timeout:
            return False

    return mend
