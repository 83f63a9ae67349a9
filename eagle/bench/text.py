"""Measurements as plain text: tables for terminal and file, spreads, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def plain(table: Table, width: int) -> list[str]:
    """Return a table as lines without colours, at most `width` wide."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, markup=False, highlight=False).print(table)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def spread_text(value: dict[str, Any] | None, digits: int, unit: str = "") -> str:
    """Return 'median [min..max]' of a `measure.Spread`; '' for None."""
    if value is None:
        return ""
    return f"{value['median']:.{digits}f}{unit} [{value['min']:.{digits}f}..{value['max']:.{digits}f}]"


def csv_text(rows: Sequence[dict[str, Any]], left_out: Collection[str] = ()) -> str:
    """Return rows as CSV: a mapping becomes a column a key but for its `runs`, None and `left_out` columns are dropped."""
    flat = [_flat(row, left_out) for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in flat for name in row)), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: dict[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict) and name not in left_out:
            flat |= {f"{name}_{key}": number for key, number in value.items() if key != "runs"}
        elif value is not None and name not in left_out:
            flat[name] = value
    return flat
