"""The form of the committed figures: complete rows, verdict computed from the value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import spine
from benchmarks.figures import Figure, Measured

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KEYS = {"id", "what", "value", "unit", "bound", "holds", "runs", "command", "machine", "versions", "commit", "date"}


@pytest.mark.parametrize("figure", spine.FIGURES, ids=lambda f: f.id)
def test_a_committed_figure_is_complete_and_its_verdict_follows_from_its_value(figure: Figure) -> None:
    path = RESULTS / f"{figure.id}.json"
    if not path.is_file():
        pytest.skip(f"not measured yet: make figures ID={figure.id}")
    row = json.loads(path.read_text(encoding="utf-8"))
    assert set(row) >= KEYS
    assert row["holds"] == (figure.holds(row["value"]) and not row.get("broken", False) if row["value"] is not None else None)
    assert row["value"] is not None or row["why"]
    assert row["holds"] is not False or row.get("why"), "a figure that falls short says what was tried"


def test_holds_compares() -> None:
    figure = Figure("F0", "x", "s", "<=", 2.0, lambda: Measured(1.0))
    assert [figure.holds(v) for v in (1.0, 2.0, 2.1, None)] == [True, True, False, None]
