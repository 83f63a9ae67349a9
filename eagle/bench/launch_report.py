"""What a draft step launches and what that costs the host, form by form: `eagle tune --report`, and the end of the tune step.

Without a GPU the kernels are derived from the recorded launches (`eagle.bench.launches`), and operator calls and time are the
CPU's own; with one all of it is read from torch's profiler and the clock. A CUDA graph of the loop is one launch by construction:
where there is no GPU, that has not been measured, and the table says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from eagle import manifest
from eagle.bench.draft_forms import CONTEXT, Form, draft_loop, random_network
from eagle.bench.launches import StepLaunches, count
from eagle.bench.profiling import profile, wall_seconds
from eagle.bench.text import plain
from eagle.config import Config
from eagle.draft.io import CONFIG, read_spec
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from eagle.errors import StepFailed
from eagle.target.load import available_cores, pick_device, setup_torch
from kernels.dispatch import Backend
from kernels.graphs import Capture
from kernels.tuned import TABLE

NOT_MEASURED = "not measured"
REPEATS = 5
_GPU_FORMS: tuple[Form, ...] = ("fused", "fused + graph")
_CPU_FORMS: tuple[Form, ...] = ("direct calls",)


@dataclass(frozen=True)
class Row:
    """One form. `launches` are of a loop of K steps, all else of one draft step: `kernels` on the device and their summed time
    `kernel_ms`, operator `calls` of the host, `ms` by the clock. None = not measured."""

    form: Form
    kernels: float | None
    launches: float | None
    calls: float | None = None
    ms: float | None = None
    kernel_ms: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """What is reported on: a greedy draft of `length` tokens (2 at least) of `batch` rows, 'bfloat16' or 'float32', on a device."""

    dtype: str
    batch: int
    length: int
    device: str


def report(spec: DraftSpec, setting: Setting, *, compiled: bool) -> list[Row]:
    """Return a row a form; `compiled`: torch.compile is measured too, which takes tens of seconds."""
    batch, length, device = setting.batch, max(setting.length, 2), setting.device  # a step is the difference of two lengths
    network = random_network(spec, setting.dtype, device)
    counted = count(spec, batch, CONTEXT + length)
    rows = [measure_form("eager torch", network, batch, length, device), _compiled(network, batch, length, device, compiled)]
    forms: list[Form] = ["engine without kernels", *(_GPU_FORMS if device == "cuda" else _CPU_FORMS)]
    rows += [measure_form(form, network, batch, length, device) for form in forms]
    return rows if device == "cuda" else _derived(rows, counted, length)


def _compiled(network: DraftModel, batch: int, length: int, device: str, wanted: bool) -> Row:
    if not wanted:
        return Row("torch.compile", None, None, note="tune.try_compile is false")
    try:
        return measure_form("torch.compile", network, batch, length, device)
    except RuntimeError as error:  # no working C++ compiler, above all
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Row("torch.compile", None, None, note=f"cannot be compiled here: {lines[0][:80]}")


def measure_form(
    form: Form, network: DraftModel, batch: int, length: int, device: str, *, kernels: Backend = "auto",
    capture: Capture | Literal["auto"] = "auto", repeats: int = REPEATS,
) -> Row:  # fmt: skip
    """Return the row of one form, from torch's profiler and the clock. `length`: 2 at least; the rest as in `draft_loop`."""
    with draft_loop(form, network, batch, length, kernels=kernels, capture=capture) as loop:
        for tokens in (1, length):
            loop(tokens)  # compiles, captures and allocates
        one, all_ = (profile(partial(loop, tokens), device, min(repeats, 3)) for tokens in (1, length))
        short, long = (wall_seconds(partial(loop, tokens), device, repeats) for tokens in (1, length))
    steps = length - 1
    return Row(
        form, (all_.kernels - one.kernels) / steps, all_.launches, (all_.calls - one.calls) / steps,
        max(long - short, 0.0) / steps * 1e3, (all_.device_us - one.device_us) / steps / 1e3 if device == "cuda" else None,
        "CPU only" if form == "direct calls" else "",
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


def render(rows: list[Row], setting: Setting) -> str:
    """Return the table as text."""
    title = f"draft step on {setting.device}, batch {setting.batch}, {setting.dtype}, loop of K={max(setting.length, 2)}"
    table = Table(title=title, title_justify="left")
    for column in ("form", "kernels a step", "launches a loop", "operator calls a step", "ms a step", "of it kernels", "note"):
        table.add_column(column, justify="left" if column in ("form", "note") else "right")
    for row in rows:
        numbers = (_number(value) for value in (row.kernels, row.launches, row.calls))
        times = (NOT_MEASURED if value is None else f"{value:.3f}" for value in (row.ms, row.kernel_ms))
        table.add_row(row.form, *numbers, *times, row.note)
    return "\n".join(plain(table, 140)) + "\n"


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
    dtype, batch = str(tuned.get("dtype") or config.target.dtype), min(config.tune.batch_sizes)
    setting = Setting(dtype, batch, config.tune.draft_tokens, device)
    rows = report(read_spec(folder), setting, compiled=config.tune.try_compile)
    return render(rows, setting) + kernels_line(base / "tune" / TABLE) + "\n"


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
