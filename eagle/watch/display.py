"""The watch in words: one plain line, or a table that a terminal redraws."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from eagle.progress import say
from eagle.watch.counts import Counts
from eagle.watch.run import Watch
from eagle.watch.state import Change


def _shares(values: list[float] | tuple[float, ...]) -> str:
    return " ".join(f"{share:.2f}" for share in values) or "-"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def change_line(change: Change) -> str:
    """Return the line about a change of the status."""
    return (
        f"watch: {change.before} -> {change.status} at {_clock(change.at)}: acceptance length {change.acceptance_length:.2f} "
        f"[{_shares(change.acceptance_by_position)}], the bundle's {change.reference_length:.2f}"
    )


def status_line(watch: Watch) -> str:
    """Return one line: the status, live and reference acceptance, how much was seen, what is missing for a verdict."""
    state, known = watch.state, watch.known
    recent = state.recent
    if not recent.drafts:
        held, needed = state.open.counts if state.open else Counts(), watch.config
        return (
            f"watch: {state.status}, no window yet: {held.drafts} of {needed.min_drafts} drafts, {held.requests} of "
            f"{needed.min_requests} requests, and at least {needed.window_s:g} s"
        )
    reference = known.reference
    return (
        f"watch: {state.status}: acceptance length {recent.acceptance_length:.2f} [{_shares(recent.acceptance_by_position)}] of "
        f"{recent.drafts} drafts at K {recent.draft_tokens / recent.drafts:.1f}; the bundle's {reference.acceptance_length:.2f} "
        f"[{_shares(reference.acceptance_by_position)}] at K {reference.draft_tokens}; "
        f"windows {state.windows}, restarts {state.restarts}"
    )


def next_step(watch: Watch) -> str:
    """Return what to do about the status, "" when it is healthy."""
    if watch.state.status == "healthy":
        return ""
    return "next: eagle dataset from-traffic LOG.jsonl --out prompts.jsonl, then retrain with it in dataset.prompt_files"


def board(watch: Watch, trouble: str) -> Table:
    """Return the table for a terminal: acceptance by position, live beside the reference, its bound and the boundaries."""
    state, known, config = watch.state, watch.known, watch.config
    recent = state.recent
    live = recent.acceptance_by_position
    title = f"{watch.url}: {state.status}" + (f" ({trouble})" if trouble else "")
    table = Table(title=title, title_justify="left", caption=status_line(watch), caption_justify="left")
    for name in ("position", "live", "reference", "its bound", "drifting below", "degraded below"):
        table.add_column(name, justify="right")
    drifting, degraded = 1.0 - config.drifting_tolerance, 1.0 - config.degraded_tolerance
    for at, (share, bound) in enumerate(zip(known.reference.acceptance_by_position, known.bounds, strict=True)):
        shown = f"{live[at]:.3f}" if at < len(live) else "-"
        table.add_row(str(at + 1), shown, f"{share:.3f}", f"{bound:.3f}", f"{drifting * bound:.3f}", f"{degraded * bound:.3f}")
    table.add_row(
        "length", f"{recent.acceptance_length:.3f}" if recent.drafts else "-", f"{known.reference.acceptance_length:.3f}",
        *(f"{known.length(fall):.3f}" for fall in (0.0, config.drifting_tolerance, config.degraded_tolerance)),
    )  # fmt: skip
    return table


class Screen:
    """Shows a watch that goes on: a table on a terminal, else a line per closed window, change and new trouble."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._trouble = ""
        self._windows = -1
        self._live = Live(console=Console(stderr=True), auto_refresh=False) if sys.stderr.isatty() else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, changes: list[Change], trouble: str) -> None:
        """Show the result of one look."""
        for change in changes:
            self._say(change_line(change))
            self._say(next_step(self._watch))
        if trouble != self._trouble:
            self._say(trouble or "watch: the server answers again")
            self._trouble = trouble
        if self._live:
            self._live.update(board(self._watch, trouble), refresh=True)
        elif self._watch.state.windows != self._windows:
            say(status_line(self._watch))
        self._windows = self._watch.state.windows

    def _say(self, text: str) -> None:
        if text and self._live:
            self._live.console.print(text, markup=False, highlight=False)
        elif text:
            say(text)
