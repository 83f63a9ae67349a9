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
    """Progress of one loop. Use as a context manager; call `advance(n, note)` as work is done, `begin(note)` before a part of it.

    On a terminal a live bar is drawn; elsewhere a line for every part that begins, one at most every 5 seconds, and one at the
    end.
    """

    def __init__(self, title: str, total: float, unit: str, *, done: float = 0.0, stream: TextIO | None = None) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self._start_done = done
        self._stream = stream or sys.stderr
        self._began = self._last = time.monotonic()
        self._note = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Track:
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.title, total=self.total, completed=int(self.done), unit=self.unit, rate="", note=""
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self.done > self._start_done:
            self._line("")

    def begin(self, note: str) -> None:
        """Say, before it starts, which part of the work comes now; it is shown beside the rate until the next one."""
        self._note = note
        if self._bar is not None:
            self._bar.update(self._task, note=note)
        else:
            self._line(note)

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        """Say that `amount` more units are done; `note`, else what was begun last, is shown beside the rate."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rate=self._pace, note=note or self._note)
        elif time.monotonic() - self._last >= PLAIN_SECONDS:
            self._line(note or self._note)

    @property
    def rate(self) -> float:
        """Units per second since the start of this process' part of the work."""
        return (self.done - self._start_done) / max(time.monotonic() - self._began, 1e-9)

    @property
    def _pace(self) -> str:
        """The rate as text, of what is slower than one a second per minute; nothing before anything is done."""
        return f"{self.rate:.1f}/s" if self.rate >= 1.0 else f"{60 * self.rate:.1f}/min" if self.rate else ""

    def _line(self, note: str) -> None:
        self._last = time.monotonic()
        left = max(self.total - self.done, 0.0) / max(self.rate, 1e-9)
        if self.done - self._start_done < 0.01 * self.total and left >= 1:
            eta = "ETA -"  # too little is done to tell
        else:
            over = self.done >= self.total
            eta = f"done in {self._last - self._began:.0f} s" if over else f"ETA {int(left // 60)}:{int(left % 60):02d}"
        parts = (f"{self.title}: {self.done:.0f}/{self.total:.0f} {self.unit}", self._pace, eta, note)
        self._stream.write("  ".join(part for part in parts if part) + "\n")
        self._stream.flush()
