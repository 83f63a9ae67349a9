"""Figures F4.2 to F4.4: read from what the GPU script measured (`python -m benchmarks.gpu.run`), null where nobody has yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figures import RESULTS, Figure, Measured
from eagle import manifest

GPU = RESULTS / "gpu.json"
MISSING = "not yet measured: no GPU; on one run: python -m benchmarks.gpu.run"
LARGE = 64 << 20  # bytes an operation must move for its time to be bandwidth, not the microseconds of a launch


def reading(section: str, value: Callable[[list[dict[str, Any]]], tuple[float, str]], path: Path = GPU) -> Measured:
    """Return the figure that `value` makes of a section's rows, with one line on them; None and why where it cannot be made."""
    try:
        result = manifest.read_json(path)
        rows = result["sections"][section]["rows"]
        if result["dry_run"]:
            return Measured(None, [], f"{path.name} is of a dry run; on a GPU run: python -m benchmarks.gpu.run")
        number, why = value(rows)
    except FileNotFoundError:
        return Measured(None, [], MISSING)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        return Measured(None, [], f"{path.name}: {section} is damaged or cut short ({error!r}); run: python -m benchmarks.gpu.run")
    return Measured(number, rows, f"{result['device']}, {result['date']}: {why}")


def _form(rows: list[dict[str, Any]], batch: int, form: str) -> dict[str, Any]:
    for row in rows:
        if (row["batch"], row["form"]) == (batch, form):
            return row
    raise KeyError(f"{form}, batch {batch}")


def overhead_of(form: str) -> Callable[[list[dict[str, Any]]], tuple[float, str]]:
    """F4.2: time of a draft step in which no kernel runs, in `form` over eager torch, batch 1."""

    def value(rows: list[dict[str, Any]]) -> tuple[float, str]:
        ours, eager = _form(rows, 1, form), _form(rows, 1, "eager torch")
        shown = f"{1e3 * ours['overhead_ms']:.0f} us against {1e3 * eager['overhead_ms']:.0f} us a step"
        return ours["overhead_ms"] / eager["overhead_ms"], shown

    return value


def against_compile(rows: list[dict[str, Any]]) -> tuple[float, str]:
    """F4.4: draft step by torch.compile over ours, the worse of all batch sizes."""
    batches = sorted({row["batch"] for row in rows})
    ratios = {b: _form(rows, b, "torch.compile")["ms"] / _form(rows, b, "fused + graph")["ms"] for b in batches}
    return min(ratios.values()), ", ".join(f"batch {b}: {ratio:.2f}x" for b, ratio in ratios.items())


def bandwidth(rows: list[dict[str, Any]]) -> tuple[float, str]:
    """F4.3: bandwidth over the measured copy's of the operations that move 64 MiB or more, the lowest."""
    large = [row for row in rows if row["gb_s"] * row["ms"] * 1e6 >= LARGE]
    if not large:
        raise ValueError("no operation that moves 64 MiB")
    least = min(large, key=lambda row: float(row["of_copy"]))
    return least["of_copy"], f"{least['problem']}; {len(large)} operations move 64 MiB or more"


FIGURES = [
    Figure(
        "F4.2a", "GPU: launch overhead of a draft step, fused against eager torch, batch 1", "x", "<=", 0.60,
        lambda: reading("launches", overhead_of("fused")),
    ),
    Figure(
        "F4.2b", "GPU: the same, fused as a graph", "x", "<=", 0.15,
        lambda: reading("launches", overhead_of("fused + graph")),
    ),
    Figure(
        "F4.3", "GPU: bandwidth of the operations that move 64 MiB or more over a copy's, the lowest", "x", ">=", 0.80,
        lambda: reading("bandwidth", bandwidth),
    ),
    Figure(
        "F4.4", "GPU: draft step by torch.compile over fused as a graph, the worse of batch 1 and 32", "x", ">=", 1.0,
        lambda: reading("launches", against_compile),
    ),
]  # fmt: skip
