"""`make figures [ID=F1.1]`: measure the figures and write benchmarks/results/ID.json and the table README.md.

Owns the form of a result (architecture: id, what, value, unit, bound, holds, runs, command, machine, versions, commit,
date). What is measured, and how, is in one module per issue (`benchmarks/spine.py`, `benchmarks/decoding.py`). `holds` is
computed from the value. `make figures ID=F1.2` measures F1.2a and F1.2b.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from eagle import manifest
from eagle.errors import closest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODULES = (
    "benchmarks.spine",
    "benchmarks.ablation",
    "benchmarks.quality",
    "benchmarks.decoding",
    "benchmarks.kernels",
    "benchmarks.peers.compare",
    "benchmarks.operations",
    "benchmarks.robustness",
    "benchmarks.served",
    "benchmarks.serving",
    "benchmarks.soak",
)


@dataclass(frozen=True)
class Measured:
    """What a measurement gives back: the value, every single run behind it, and one line on what was tried if it falls short."""

    value: float | bool | None
    runs: list[Any] = field(default_factory=list)
    why: str | None = None
    broken: bool = False  # a bound beside the value's own (memory, disk) was not held: `why` says which
    profile: str | None = None  # the profile that the measured draft was made with, where the figure can be of several


@dataclass(frozen=True)
class Figure:
    """One figure: `op` and `limit` decide whether it holds."""

    id: str
    what: str
    unit: str
    op: Literal["<=", ">=", "=="]
    limit: float
    measure: Callable[[], Measured]
    tried: str | None = None  # shown when the figure falls short: what was tried to reach it

    def holds(self, value: float | bool | None) -> bool | None:
        """Compare the value with the bound; None when there is no value."""
        if value is None:
            return None
        return {"<=": value <= self.limit, ">=": value >= self.limit, "==": value == self.limit}[self.op]


def machine() -> dict[str, Any]:
    """Return what the timing depends on: processor, cores that this process may use, memory."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.system(),
    }


def measure(figure: Figure) -> dict[str, Any]:
    """Measure one figure and write its JSON. Returns the row."""
    measured = figure.measure()
    row = {
        "id": figure.id,
        "what": figure.what,
        "value": measured.value,
        "unit": figure.unit,
        "bound": f"{figure.op} {figure.limit:g}",
        "broken": measured.broken,
        "holds": figure.holds(measured.value) and not measured.broken if measured.value is not None else None,
        "runs": measured.runs,
        "command": f"make figures ID={figure.id}" + (f" PROFILE={measured.profile}" if measured.profile else ""),
        "machine": machine(),
        "versions": manifest.versions(),
        "commit": manifest.git_state(ROOT)["sha"],
        "date": datetime.now(UTC).date().isoformat(),
    }
    why = "; ".join(filter(None, (measured.why, figure.tried if row["holds"] is False else None)))
    if why:
        row["why"] = why
    if measured.profile:
        row["profile"] = measured.profile
    manifest.write_json(RESULTS / f"{figure.id}.json", row)
    return row


def write_table(figures: dict[str, Figure]) -> None:
    """Write benchmarks/results/README.md: the JSON files that are there, and which figures are not measured yet."""
    rows = [
        manifest.read_json(RESULTS / f"{f.id}.json") if (RESULTS / f"{f.id}.json").is_file() else _unmeasured(f)
        for f in sorted(figures.values(), key=_place)
    ]
    lines = [
        "# Figures",
        "",
        "Written by `make figures`; one JSON file a figure holds every run, the machine, the versions and the commit.",
        "",
        "| id | what | value | bound | holds | date | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        holds = {True: "yes", False: "**no**", None: "not measured"}[row["holds"]]
        value = "-" if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
        cells = (row["id"], row["what"], value, f"{row['bound']} {row['unit']}".strip(), holds, row["date"], row.get("why", ""))
        lines.append(f"| {' | '.join(cells)} |")
    manifest.write_text(RESULTS / "README.md", "\n".join(lines) + "\n")


def _place(figure: Figure) -> tuple[int, int, str]:
    """Return what puts F2.10 behind F2.9 and F2.9 behind F2.8a."""
    issue, _, rest = figure.id.removeprefix("F").partition(".")
    number = rest.rstrip("abc")
    return int(issue), int(number), rest


def _unmeasured(figure: Figure) -> dict[str, Any]:
    return {
        "id": figure.id,
        "what": figure.what,
        "value": None,
        "unit": figure.unit,
        "bound": f"{figure.op} {figure.limit:g}",
        "holds": None,
        "date": "",
        "why": f"not measured yet: make figures ID={figure.id}",
    }


def _named(name: str, figures: dict[str, Figure]) -> list[str]:
    """Return the figure of that id, or all parts of one (F1.2: F1.2a, F1.2b). Exits when there is none."""
    found = [id_ for id_ in figures if name in (id_, id_.rstrip("abc"))]
    if not found:
        sys.exit(f"error: no figure '{name}'{closest(name, figures)}; figures: {', '.join(figures)}")
    return found


def main() -> None:
    """Measure the figures named on the command line, or all of them."""
    figures: dict[str, Figure] = {f.id: f for name in MODULES for f in importlib.import_module(name).FIGURES}
    wanted = [found for name in sys.argv[1:] for found in _named(name, figures)] or list(figures)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        row = measure(figures[name])
        print(f"{row['id']}: {row['what']}: {row['value']} {row['unit']} (bound {row['bound']}, holds: {row['holds']})")
        write_table(figures)


if __name__ == "__main__":
    main()
