"""served.json as a table for the terminal, and as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def _range(value: dict[str, Any] | None, digits: int, unit: str = "") -> str:
    if value is None:
        return ""
    return f"{value['median']:.{digits}f}{unit} [{value['min']:.{digits}f}..{value['max']:.{digits}f}]"


def render(found: dict[str, Any], width: int = 150) -> str:
    """Return the table and the lines under it as plain text."""
    title = (
        f"{found['engine']}, OpenAI server; median [min..max] of {found['turns']} interleaved turns; {found['dtype']}; "
        f"{found['max_new_tokens']} new tokens, {found['prompts']} prompts"
    )
    table = Table(title=Text(title), title_justify="left", show_edge=False)
    for head in ("requests at once", "speculation"):
        table.add_column(head, no_wrap=True)
    for head in ("tokens/s", "speed-up", "TTFT ms p50 / p95", "ITL ms p50 / p95", "accepted", "drafted", "memory"):
        table.add_column(head, justify="right", no_wrap=True)
    former = None
    for row in found["rows"]:
        if former not in (None, row["concurrency"]):
            table.add_section()
        former = row["concurrency"]
        table.add_row(
            str(row["concurrency"]), row["name"], _range(row["tokens_per_second"], 1), _range(row["speedup"], 2, "x"),
            f"{row['ttft_ms']['p50']:.0f} / {row['ttft_ms']['p95']:.0f}",
            f"{row['itl_ms']['p50']:.1f} / {row['itl_ms']['p95']:.1f}",
            "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
            "" if row["mean_draft_tokens"] is None else f"{row['mean_draft_tokens']:.1f}",
            f"{row['memory_bytes'] / 2**30:.2f} GiB",
        )  # fmt: skip
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)  # noqa: S101 -- for the type checker
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join([*lines, "", *_notes(found)]) + "\n"


def _notes(found: dict[str, Any]) -> list[str]:
    equal = found["equality"]
    lines = []
    for method, share in equal["equal"].items():
        lines.append(
            f"greedy equality of {method} with none, {equal['dtype']}, {equal['concurrency']} at once: {100 * share:.2f} % of "
            f"{equal['tokens']} tokens"
        )
    for miss in equal["mismatches"][:5]:
        lines.append(
            f"  differs: {miss['method']}, turn {miss['turn']}, token {miss['position']}, top-2 logit gap {miss['logit_gap']:.2e}"
        )
    for row in found["client"]:
        gain = "" if row["speedup"] is None else f", {_range(row['speedup'], 2, 'x')}"
        lines.append(
            f"vllm bench serve, {row['concurrency']} at once, {row['name']}: {_range(row['tokens_per_second'], 1)} tokens/s{gain}"
        )
    return lines


def to_csv(found: dict[str, Any]) -> str:
    """Return the rows as CSV: spreads as three columns, single runs left out."""
    flat = []
    for row in found["rows"]:
        entry: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, dict):
                entry |= {f"{name}_{key}": number for key, number in value.items() if key != "runs"}
            elif value is not None and not isinstance(value, list):
                entry[name] = value
        flat.append(entry)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for entry in flat for name in entry)), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()
