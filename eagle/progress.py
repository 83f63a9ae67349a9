"""Progress of long work: a live bar on a terminal, plain lines with rate and ETA otherwise.

Steps write to stderr through this module only; the flow and CI read the plain lines.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 5.0


def say(text: str) -> None:
    """Print one line for the person who watches, to stderr, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Track:
    """Progress of one loop. Use as a context manager; call `advance(n, note)` as work is done.

    On a terminal a live bar is drawn; elsewhere a line at most every 5 seconds, and one at the end.
    """

    def __init__(self, title: str, total: float, unit: str, *, done: float = 0.0, stream: TextIO | None = None) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self._start_done = done
        self._stream = stream or sys.stderr
        self._began = self._last = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Track:
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
                TextColumn("{task.fields[rate]:.0f}/s"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.title, total=self.total, completed=int(self.done), unit=self.unit, rate=0.0, note=""
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self.done > self._start_done:
            self._line("")

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        """Say that `amount` more units are done; `note` is shown beside the rate."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rate=self.rate, note=note)
        elif time.monotonic() - self._last >= PLAIN_SECONDS:
            self._line(note)

    @property
    def rate(self) -> float:
        """Units per second since the start of this process' part of the work."""
        return (self.done - self._start_done) / max(time.monotonic() - self._began, 1e-9)

    def _line(self, note: str) -> None:
        self._last = time.monotonic()
        left = max(self.total - self.done, 0.0) / max(self.rate, 1e-9)
        if self.done - self._start_done < 0.01 * self.total and left >= 1:
            eta = "ETA -"  # too little is done to tell
        else:
            eta = f"ETA {int(left // 60)}:{int(left % 60):02d}" if left >= 1 else f"done in {self._last - self._began:.0f} s"
        tail = f"  {note}" if note else ""
        self._stream.write(f"{self.title}: {self.done:.0f}/{self.total:.0f} {self.unit}  {self.rate:.1f}/s  {eta}{tail}\n")
        self._stream.flush()
