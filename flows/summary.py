"""What a finished run says of itself: steps and seconds, the bench table, the gate, the model version, the next commands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.steps import STEPS


def result(base: Path, run_id: str, seconds: dict[str, float | None]) -> dict[str, Any]:
    """Return the flow's value: small JSON. seconds: {step: seconds, or None when it was up to date}."""
    registered = registration(base)
    return {
        "run_id": run_id,
        "folder": str(base),
        "steps": seconds,
        **{name: registered[name] for name in ("model", "version", "alias", "verdict", "uri")},
    }


def bench_table(base: Path) -> str:
    """Return the bench step's table as text."""
    return (base / "bench" / "table.txt").read_text(encoding="utf-8").rstrip()


def registration(base: Path) -> dict[str, Any]:
    """Return what the register step wrote of the version, the gate and the store."""
    found: dict[str, Any] = manifest.read_json(base / "register" / "registration.json")
    return found


def report(base: Path) -> str:
    """Return the report of a run as Markdown: the gate, then the model card."""
    card = base / "bundle" / "bundle" / "README.md"
    gate = "\n".join(f"- {line.strip()}" for line in gate_lines(base))
    text = card.read_text(encoding="utf-8")
    body = text.partition("\n---\n")[2] if text.startswith("---\n") else text  # the front matter is for model hubs
    return f"{gate}\n\n{body.strip()}\n"


def gate_rows(base: Path) -> list[dict[str, Any]]:
    """Return the gate's checks as rows: name, value, bound, better, ok, note."""
    return list(registration(base)["reasons"])


def gate_lines(base: Path) -> list[str]:
    """Return the gate's verdict and its checks, a line each."""
    registered = registration(base)
    head = f"gate: {registered['verdict']}; {registered['model']} version {registered['version']}, alias {registered['alias']}"
    return [head, *(f"  {line}" for line in registered["lines"])]


def text(value: dict[str, Any]) -> str:
    """Return the summary of a flow's value for the terminal."""
    base = Path(value["folder"])
    width = max(map(len, STEPS))
    lines = [f"run '{value['run_id']}' in {base}"]
    for name, seconds in value["steps"].items():
        lines.append(f"  {name:<{width}}  {'up to date' if seconds is None else f'{seconds:8.1f} s'}")
    registered = registration(base)
    lines += ["", bench_table(base), "", *gate_lines(base), "", "serve it:", f"  {registered['serve']}", ""]
    fetch = f"MLFLOW_TRACKING_URI={shlex.quote(registered['tracking_uri'])} .venv/bin/mlflow artifacts download -u {value['uri']}"
    if value["verdict"] == "passed":
        lines.append(f"next: run the serve command, or fetch the files anywhere:\n  {fetch}")
    else:
        lines.append("next: see the failed checks above; more data and training: make run PROFILE=full")
    return "\n".join(lines) + "\n"
