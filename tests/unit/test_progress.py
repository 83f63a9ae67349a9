"""Plain lines of progress: what comes is named before it runs, with rate and ETA."""

from __future__ import annotations

import io

import pytest

from eagle import progress
from eagle.progress import Track


def lines(monkeypatch: pytest.MonkeyPatch, *events: tuple[float, str, float]) -> list[str]:
    """The lines of a track of 4 runs: at each time something begins (by name) or so much is done."""
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Track("bench", 4, "runs", stream=stream) as track:
        for at, name, amount in events:
            now[0] = at
            if name:
                track.begin(name)
            else:
                track.advance(amount)
    return stream.getvalue().splitlines()


def test_what_begins_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(
        monkeypatch, (0, "none", 0), (10, "", 1), (10, "K=2", 0), (11, "", 0.5), (20, "", 0.5), (20, "K=3", 0), (21, "", 2)
    ) == [
        "bench: 0/4 runs  ETA -  none",
        "bench: 1/4 runs  6.0/min  ETA 0:30  none",
        "bench: 1/4 runs  6.0/min  ETA 0:30  K=2",
        "bench: 2/4 runs  6.0/min  ETA 0:20  K=2",
        "bench: 2/4 runs  6.0/min  ETA 0:20  K=3",
        "bench: 4/4 runs  11.4/min  done in 21 s",
    ]


def test_fast_work_is_told_per_second_and_not_done_before_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, (1, "", 3), (1.1, "last", 0)) == [
        "bench: 3/4 runs  2.7/s  ETA 0:00  last",
        "bench: 3/4 runs  2.7/s  ETA 0:00",
    ]
