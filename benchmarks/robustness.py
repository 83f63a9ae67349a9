"""Figure F2.7: what a draft loses under perturbed chat templates and behind a context of 2,048 tokens.

Both parts are read from one `eagle bench --suite robustness` of the run that `benchmarks/decoding_run.py` finds (FIGURES_RUN,
FIGURES_PROFILE), measured when the first part is asked for; FIGURES_COMPARE names a second run, for example one trained with
`draft.fc_norm=false draft.norm_output=false`, whose acceptance stands beside it in the rows.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.decoding_run import find_run
from benchmarks.figures import ROOT, Figure, Measured
from eagle import manifest
from eagle.bench.robustness import OWN, measure_robustness

PROMPTS = 48


@cache
def _measured() -> tuple[dict[str, Any], str]:
    """Return robustness.json of the run and the name of its profile."""
    run, other = find_run(), os.environ.get("FIGURES_COMPARE")
    out = ROOT / "build" / "figures-robustness"
    done = measure_robustness(run.config, run.root, run.base, compare=Path(other) if other else None, prompts=PROMPTS, out=out)
    return manifest.read_json(done / "robustness.json"), run.profile


def worst_loss(result: dict[str, Any], names: list[str]) -> Measured:
    """Return the largest loss of the run's own draft among the conditions `names`, in percent; `runs` holds all of them.

    No value, and why, when a condition that was asked for has no prompts.
    """
    rows = [row for row in result["conditions"] if row["name"] in names]
    skipped = [row for row in rows if row["skipped"]]
    measured = [row for row in rows if not row["skipped"]]
    if not measured:
        return Measured(None, rows, why="; ".join(f"{row['name']}: {row['skipped']}" for row in skipped))
    worst = max(measured, key=lambda row: row["measured"][OWN]["loss"]["value"])
    loss = worst["measured"][OWN]["loss"]
    why = f"worst: {worst['name']}, 95 % interval {100 * loss['low']:.1f} to {100 * loss['high']:.1f} %"
    left = f"; left out: {', '.join(row['name'] for row in skipped)}" if skipped else ""
    return Measured(round(100 * loss["value"], 2), rows, why=why + left)


def _part(group: str, only: str | None = None) -> Measured:
    result, profile = _measured()
    perturbed = [row["name"] for row in result["conditions"] if row["group"] == group and row["against"]]
    names = [name for name in perturbed if only in (None, name)]
    found = worst_loss(result, names)
    return Measured(found.value, found.runs, found.why, profile=profile)


FIGURES = (
    Figure(
        "F2.7a", "acceptance length lost under a perturbed chat template, the worst one", "%", "<=", 10.0,
        lambda: _part("template"),
    ),
    Figure(
        "F2.7b", "acceptance length lost behind a context of 2,048 tokens", "%", "<=", 10.0,
        lambda: _part("context", "context-2048"),
    ),
)  # fmt: skip
