"""PNG plots of bench.json. Figures are drawn without a display and without matplotlib's global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eagle.bench.workload import arm_name

_SIZE = (6.4, 4.0)
_DPI = 150


def draw_all(bench: dict[str, Any], folder: Path) -> list[str]:
    """Draw acceptance_by_position.png, speed_by_batch.png and, of adaptive methods, draft_length.png; returns the names."""
    plots = {"acceptance_by_position.png": _acceptance(bench), "speed_by_batch.png": _speed(bench)}
    chosen = [row for row in bench["rows"] if row.get("chosen")]
    if chosen:
        plots["draft_length.png"] = _lengths(chosen)
    for name, figure in plots.items():
        FigureCanvasAgg(figure)
        figure.savefig(folder / name, dpi=_DPI, metadata={"Software": None})
    return list(plots)


def _acceptance(bench: dict[str, Any]) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    for entry in bench["acceptance"]:
        shares = entry["acceptance_by_position"]
        name = arm_name(entry["method"], entry["draft_tokens"])
        label = f"{name}, T={entry['temperature']:g}: length {entry['acceptance_length']:.2f}"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    longest = max((len(entry["acceptance_by_position"]) for entry in bench["acceptance"]), default=1)
    axes.set_xticks(range(1, longest + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of drafts accepted up to here")
    axes.set_title("Acceptance by position")
    axes.grid(alpha=0.3)
    if bench["acceptance"]:
        axes.legend()
    return figure


def _speed(bench: dict[str, Any]) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    temperature = bench["rows"][0]["temperature"]
    rows = [row for row in bench["rows"] if row["temperature"] == temperature]
    batches = sorted({row["batch"] for row in rows})
    arms = list(dict.fromkeys((row["method"], row["draft_tokens"]) for row in rows))
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        mine = {row["batch"]: row["tokens_per_second"] for row in rows if (row["method"], row["draft_tokens"]) == arm}
        places = [batches.index(batch) + (number - (len(arms) - 1) / 2) * width for batch in mine]
        speeds = [value["median"] for value in mine.values()]
        below = [value["median"] - value["min"] for value in mine.values()]
        above = [value["max"] - value["median"] for value in mine.values()]
        axes.bar(places, speeds, width, yerr=[below, above], capsize=3, label=arm_name(*arm))
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens/s (median; bars: min to max)")
    axes.set_title(f"Speed, T={temperature:g}, {bench['dtype']}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return figure


def _lengths(rows: list[dict[str, Any]]) -> Figure:
    """The draft length that each adaptive arm chose, step by step, in its last turn."""
    figure = Figure(figsize=(_SIZE[0], 1.0 + 1.6 * len(rows)), layout="constrained")
    for axes, row in zip(figure.subplots(len(rows), squeeze=False)[:, 0], rows, strict=True):
        axes.step(range(len(row["chosen"])), row["chosen"], where="mid", linewidth=0.9)
        axes.set_ylim(-0.5, row["draft_tokens"] + 0.5)
        name = arm_name(row["method"], row["draft_tokens"])
        axes.set_title(f"{name}, batch {row['batch']}, T={row['temperature']:g}", fontsize=9)
        axes.set_ylabel("K")
        axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    return figure
