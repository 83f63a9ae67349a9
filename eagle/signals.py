"""SIGTERM as an exception, so that `finally` blocks run: children are ended, locks released, tracking runs closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143) for a while; a handler that the program has set already is kept."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave(number: int, _frame: FrameType | None) -> None:
    """A signal handler: raise SystemExit(128 + number)."""
    raise SystemExit(128 + number)
