"""Measure the kernels on a GPU, in under 6 minutes: `python -m benchmarks.gpu.run`.

Writes benchmarks/results/gpu.json, which the figures F4.2 to F4.4 read, and gpu.txt, a table. The file is written anew after
every row and each section has a share of the time, so whatever was done is there whenever it ends. Without a GPU it ends with
one line and code 5; `--dry-run` runs all sections at tiny shapes on CPU in Triton's interpreter, to prove the script: its numbers
mean nothing and are written only where --out says.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.lab import Lab
    from benchmarks.gpu.sections import Section

MINUTES = 5.5
COLUMNS = {
    "copy": ("ms", "gb_s"),
    "correctness": ("op", "dtype", "rows", "error", "holds"),
    "launches": ("batch", "form", "kernels", "launches", "ms", "kernel_ms", "overhead_ms"),
    "tuning": ("problem", "default_ms", "median_ms", "gain", "timed", "launches"),
    "bandwidth": ("problem", "ms", "gb_s", "of_copy", "compile_ms", "liger_ms"),
    "rounds": ("target", "batch", "form", "draft_step_ms", "verify_ms", "target_step_ms", "round_ms", "speedup", "why"),
}


def measure(lab: Lab, sections: Sequence[Section], minutes: float, out: Path) -> dict[str, Any]:
    """Run the sections, each within its share of `minutes`; `out` holds what is done after every row. Returns all of it."""
    from benchmarks.gpu.sections import free
    from eagle import manifest
    from eagle.progress import say

    result = {**_about(lab), "sections": {}}
    whole = sum(section.share for section in sections)
    for section in sections:
        began = lab.clock()
        lab.deadline = began + 60.0 * minutes * section.share / whole
        entry: dict[str, Any] = {"rows": [], "complete": False, "seconds": 0.0}
        result["sections"][section.name] = entry
        for row in section.run(lab):
            entry["rows"].append(row)
            entry["seconds"] = round(lab.clock() - began, 1)
            manifest.write_json(out, _finite(result))
            if lab.late:
                break
        else:
            entry["complete"] = True
        manifest.write_json(out, _finite(result))
        cut = "" if entry["complete"] else ", cut short by its share of the time"
        say(f"gpu: {section.name}: {len(entry['rows'])} rows in {entry['seconds']:.0f} s{cut}")
        free(lab)
    return result


def _about(lab: Lab) -> dict[str, Any]:
    import torch

    from benchmarks.figures import ROOT, machine
    from eagle import manifest

    cuda = lab.device == "cuda"
    return {
        "dry_run": lab.dry, "device": torch.cuda.get_device_name() if cuda else "cpu, interpreted", "machine": machine(),
        "cuda": torch.version.cuda, "versions": manifest.versions(), "commit": manifest.git_state(ROOT)["sha"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _finite(value: Any) -> Any:
    """JSON has no infinity: an error without bound is written as a word."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def render(result: dict[str, Any]) -> str:
    """Return all sections as tables."""
    from rich.console import Console
    from rich.table import Table

    stream = StringIO()
    console = Console(file=stream, width=180, color_system=None)
    note = " - a dry run on CPU: these numbers mean nothing" if result["dry_run"] else ""
    console.print(f"{result['device']}, {result['date']}{note}", highlight=False, markup=False)
    for name, section in result["sections"].items():
        console.print(name if section["complete"] else f"{name} (cut short by its share of the time)")
        table = Table()
        for column in COLUMNS[name]:
            table.add_column(column)
        for row in section["rows"]:
            table.add_row(*(_cell(row.get(column)) for column in COLUMNS[name]))
        console.print(table)
    return stream.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description="measure the kernels on a GPU")
    parser.add_argument("--dry-run", action="store_true", help="all sections at tiny shapes on CPU, in Triton's interpreter")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"time for all sections (default {MINUTES:g})")
    parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/results/gpu.json)")
    parser.add_argument("--only", action="append", choices=sorted(COLUMNS), help="only this section; repeatable")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes: must be above 0")
    if options.dry_run and options.out is None:
        parser.error("--dry-run: say where its numbers go: --out FILE (they must not pass for a measurement)")
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: they are one or the other for good
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        sys.stderr.write("error: no CUDA device here: run this on a GPU, or prove the script with --dry-run --out FILE\n")
        return 5
    from benchmarks.figures import RESULTS
    from benchmarks.gpu.lab import Lab
    from benchmarks.gpu.sections import SECTIONS
    from eagle import manifest

    began = time.monotonic()
    lab = Lab("cpu" if options.dry_run else "cuda", options.dry_run)
    chosen = [section for section in SECTIONS if not options.only or section.name in options.only]
    out = options.out or RESULTS / "gpu.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    text = render(measure(lab, chosen, options.minutes, out))
    manifest.write_text(out.with_suffix(".txt"), text)
    sys.stdout.write(text)
    sys.stderr.write(f"gpu: {time.monotonic() - began:.0f} s -> {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
