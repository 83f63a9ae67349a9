"""bench.json as a table for the terminal and as CSV."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from eagle.bench.text import csv_text, plain, spread_text
from eagle.bench.workload import LABELS, arm_name

Bench = dict[str, Any]


def render(bench: Bench, width: int = 180) -> str:
    """Return the table and the lines under it as plain text."""
    table = Table(title=Text(_title(bench)), title_justify="left", show_edge=False)
    for head in ("batch", "T", "speculation"):
        table.add_column(head, no_wrap=True)
    for head in ("tokens/s", "speed-up", "predicted", "TTFT ms", "ITL ms p50 / p95", "accepted", "drafted"):
        table.add_column(head, justify="right", no_wrap=True)
    former = None
    for row in bench["rows"]:
        group = (row["batch"], row["temperature"])
        if former not in (None, group):
            table.add_section()
        former = group
        table.add_row(
            str(row["batch"]),
            f"{row['temperature']:g}",
            arm_name(row["method"], row["draft_tokens"]),
            spread_text(row["tokens_per_second"], 1),
            spread_text(row["speedup"], 2, "x"),
            "" if row.get("predicted_speedup") is None else f"{row['predicted_speedup']:.2f}x",
            f"{row['ttft_ms']['median']:.0f}",
            f"{row['itl_ms']['p50']:.1f} / {row['itl_ms']['p95']:.1f}",
            "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
            "" if row["mean_draft_tokens"] is None else f"{row['mean_draft_tokens']:.1f}",
        )
    return "\n".join([*plain(table, width), "", *_notes(bench)]) + "\n"


def _title(bench: Bench) -> str:
    return (
        f"median [min..max] of {bench['turns']} interleaved turns; {bench['dtype']}, {bench['threads']} threads, "
        f"{bench['device']}; {bench['max_new_tokens']} new tokens"
    )


def _notes(bench: Bench) -> list[str]:
    lines = []
    for entry in bench["acceptance"]:
        by_position = " ".join(f"{share:.2f}" for share in entry["acceptance_by_position"])
        lines.append(
            f"acceptance length {arm_name(entry['method'], entry['draft_tokens'])}, T={entry['temperature']:g}: "
            f"{entry['acceptance_length']:.2f}, "
            f"bonus token included; by position {by_position} ({bench['prompts']} prompts)"
        )
    equal = bench["equality"]
    batches = " and ".join(f"batch {batch}" for batch in sorted({run["batch"] for run in equal["runs"]}))
    lines.append(f"greedy equality, float32, {batches}: {100 * equal['equal_tokens']:.2f} % of {equal['tokens']} tokens")
    for miss in equal["mismatches"][:3]:
        lines.append(
            f"  differs: {miss['method']}, batch {miss['batch']}, prompt {miss['prompt']}, token {miss['position']}, "
            f"top-2 logit gap {miss['logit_gap']:.2e}"
        )
    cost, memory = bench["cost_ratio"], bench["memory"]
    if cost["median"] is not None:
        lines.append(
            f"draft step / target step, batch {cost['batch']}: c = {cost['median']:.3f} [{cost['min']:.3f}..{cost['max']:.3f}]"
        )
    if memory is not None:
        shares = ", ".join(f"{LABELS[m]} {100 * share:.1f} %" for m, share in bench["memory_by_method"].items())
        lines.append(
            f"memory overhead, of the target's weights and KV cache ({memory['batch']} x {memory['max_length']} tokens): {shares}"
        )
    for entry in bench["replay"]:
        fixed, best = 100 * entry["regret_to_best_fixed"], 100 * entry["regret_to_oracle"]
        lines.append(
            f"replay of {entry['rounds']} rounds, batch {entry['batch']}: best fixed K = {entry['best_fixed_k']}; "
            f"PID's regret to it {fixed:.1f} %, to the best K of every round {best:.1f} %"
        )
    for entry in bench["recommended"]:
        name = arm_name("eagle31" if entry["draft_tokens"] else "none", entry["draft_tokens"])
        gain = f"{entry['speedup']:.2f}x" if entry["draft_tokens"] else "speculation does not pay"
        sure = "" if entry["sure"] else "; not in every turn"
        lines.append(f"recommended at batch {entry['batch']}: {name} ({gain}{sure})")
    return lines


def to_csv(bench: Bench) -> str:
    """Return the rows as CSV: spreads as three columns, `runs` and lists left out."""
    return csv_text(bench["rows"], ("chosen", "lengths"))
