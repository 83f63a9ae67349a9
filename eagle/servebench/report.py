"""served.json as a table for the terminal, and as CSV."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from eagle.bench.text import csv_text, plain, spread_text


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
            str(row["concurrency"]), row["name"], spread_text(row["tokens_per_second"], 1), spread_text(row["speedup"], 2, "x"),
            f"{row['ttft_ms']['p50']:.0f} / {row['ttft_ms']['p95']:.0f}",
            f"{row['itl_ms']['p50']:.1f} / {row['itl_ms']['p95']:.1f}",
            "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
            "" if row["mean_draft_tokens"] is None else f"{row['mean_draft_tokens']:.1f}",
            f"{row['memory_bytes'] / 2**30:.2f} GiB",
        )  # fmt: skip
    return "\n".join([*plain(table, width), "", *_notes(found)]) + "\n"


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
        gain = "" if row["speedup"] is None else f", {spread_text(row['speedup'], 2, 'x')}"
        speed = spread_text(row["tokens_per_second"], 1)
        lines.append(f"vllm bench serve, {row['concurrency']} at once, {row['name']}: {speed} tokens/s{gain}")
    return lines


def to_csv(found: dict[str, Any]) -> str:
    """Return the rows as CSV: spreads as three columns, single runs and lists left out."""
    return csv_text(found["rows"], ("acceptance_by_position",))
