"""What a draft step launches and what that costs the host, form by form: `eagle tune --report`, and the end of the tune step.

Without a GPU the kernels are derived from the recorded launches (`eagle.bench.launches`), and operator calls and time are the
CPU's own; with one all of it is read from torch's profiler and the clock. A CUDA graph of the loop is one launch by construction:
where there is no GPU, that has not been measured, and the table says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eagle import manifest
from eagle.bench.draft_forms import CONTEXT, Form, draft_loop, random_network
from eagle.bench.launches import StepLaunches, count
from eagle.bench.profiling import profile, wall_seconds
from eagle.config import Config
from eagle.draft.io import CONFIG, read_spec
from eagle.draft.spec import DraftSpec
from eagle.errors import StepFailed
from eagle.target.load import available_cores, pick_device, setup_torch
from kernels.tuned import TABLE

NOT_MEASURED = "not measured"
REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One form. `kernels`, `calls` and `ms` are of one draft step, `launches` of a loop of K steps; None = not measured."""

    form: Form
    kernels: float | None
    launches: float | None
    calls: float | None = None
    ms: float | None = None
    note: str = ""


def report(spec: DraftSpec, *, dtype: str, batch: int, length: int, device: str, compiled: bool) -> list[Row]:
    """Return the rows of a greedy draft of `length` tokens of `batch` rows on `device`; `compiled`: torch.compile too."""
    length = max(length, 2)  # a step is the difference between two lengths
    network = random_network(spec, dtype, device)
    counted = count(spec, batch, CONTEXT + length)
    forms: list[Form] = ["eager torch", "torch.compile", "engine without kernels"]
    forms += ["fused", "fused + graph"] if device == "cuda" else ["direct calls"]
    rows = [
        Row(form, None, None, note="tune.try_compile is false") if form == "torch.compile" and not compiled
        else _measured(form, network, batch, length, device)
        for form in forms
    ]  # fmt: skip
    return rows if device == "cuda" else _derived(rows, counted, length)


def _measured(form: Form, network: Any, batch: int, length: int, device: str) -> Row:
    with draft_loop(form, network, batch, length) as loop:
        for tokens in (1, length):
            loop(tokens)  # compiles, captures and allocates
        one, all_ = (profile(lambda tokens=tokens: loop(tokens), device) for tokens in (1, length))  # type: ignore[misc]
        short, long = (wall_seconds(lambda tokens=tokens: loop(tokens), device, REPEATS) for tokens in (1, length))  # type: ignore[misc]
    steps = length - 1
    return Row(
        form, (all_.kernels - one.kernels) / steps, all_.launches, (all_.calls - one.calls) / steps,
        max(long - short, 0.0) / steps * 1e3,
    )  # fmt: skip


def _derived(rows: list[Row], counted: StepLaunches, length: int) -> list[Row]:
    """Put the recorded launches in place of a GPU's, and the forms that only a GPU has at the end."""
    recorded = {"eager torch": counted.eager, "engine without kernels": counted.engine}
    found = []
    for row in rows:
        names = recorded.get(row.form)
        kernels = None if names is None else names.total()
        found.append(replace(row, kernels=kernels, launches=None if kernels is None else length * kernels))
    if counted.fused is None:
        return [*found, Row("fused", None, None, note="triton is not installed")]
    fused = counted.fused.total()
    return [
        *found,
        Row("fused", fused, length * fused, note="recorded on the meta device"),
        Row("fused + graph", fused, None, note="1 launch a loop on a GPU by construction; not measured here"),
    ]


def render(rows: list[Row], *, batch: int, length: int, device: str, dtype: str) -> str:
    """Return the table as text."""
    title = f"draft step on {device}, batch {batch}, {dtype}, loop of K={length}"
    table = Table(title=title, title_justify="left")
    for column in ("form", "kernels a step", "launches a loop", "operator calls a step", "ms a step", "note"):
        table.add_column(column, justify="left" if column in ("form", "note") else "right")
    for row in rows:
        numbers = (_number(value) for value in (row.kernels, row.launches, row.calls))
        table.add_row(row.form, *numbers, NOT_MEASURED if row.ms is None else f"{row.ms:.3f}", row.note)
    stream = StringIO()
    Console(file=stream, width=140, color_system=None).print(table)
    return stream.getvalue()


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.0f}"


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain JSON."""
    return [asdict(row) for row in rows]


def report_of_run(base: Path, config: Config) -> str:
    """Return the report of the draft of the run in `base` with the settings its tune step chose (else the configuration's).

    Raises StepFailed when the run has no draft.
    """
    folder = base / "policy" / "draft"
    if not (folder / CONFIG).is_file():
        raise StepFailed(f"no draft in {folder}; run: eagle step policy --dir {base}")
    tuned = _tuned(base / "tune" / "tuned.json")
    device = pick_device(config.runtime.device)
    threads = tuned.get("threads") if device == "cpu" else None
    setup_torch(threads or config.runtime.threads or available_cores(), config.runtime.seed)
    setting = {"batch": min(config.tune.batch_sizes), "length": max(config.tune.draft_tokens, 2), "device": device}
    dtype = str(tuned.get("dtype") or config.target.dtype)
    rows = report(read_spec(folder), dtype=dtype, compiled=config.tune.try_compile, **setting)  # type: ignore[arg-type]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    text = render(rows, batch=setting["batch"], length=setting["length"], device=name, dtype=dtype)  # type: ignore[arg-type]
    return text + kernels_line(base / "tune" / TABLE) + "\n"


def _tuned(path: Path) -> dict[str, Any]:
    try:
        content = manifest.read_json(path)
    except (OSError, ValueError):
        return {}  # the report does not need it
    return content if isinstance(content, dict) else {}


def kernels_line(path: Path) -> str:
    """Return one line on the tuned launches in a run's table: how many, and how much faster than the defaults."""
    content = _tuned(path)
    if not content:
        return f"kernels: no table at {path}; it is written by: eagle step tune"
    rows = content.get("rows") or []
    if not rows:
        return f"kernels: {content.get('why') or 'none tuned'}"
    gains = [row["default_ms"] / row["median_ms"] for row in rows if row.get("default_ms")]
    best = f", up to {max(gains):.2f}x faster than the default launch" if gains else ""
    return f"kernels: {len(rows)} launches tuned on {content.get('device')}{best}"
