"""`eagle dataset`: prompts for the data set."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eagle.commands.invocation import ProfileOption, SetOption, load

app = typer.Typer(no_args_is_help=True, help="Prompts for the data set.")


@app.callback()
def _group() -> None:
    """Prompts for the data set."""


@app.command("from-traffic")
def from_traffic(
    context: typer.Context,
    log: Annotated[Path, typer.Argument(help="Request log: JSONL of OpenAI bodies, bare or wrapped; may end in .gz.")],
    out: Annotated[Path, typer.Option("--out", help="The prompt file to write.")],
    opt_out: Annotated[
        Path | None, typer.Option("--opt-out", help="File of user ids, or sha256 of user ids or prompts, one a line: never used.")
    ] = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Make prompts of a request log: sampled, masked, without duplicates. Settings: traffic.* in `eagle config`.

    Example: eagle dataset from-traffic requests.jsonl --out prompts.jsonl --set traffic.retention_days=30
    """
    from eagle.traffic.collect import OptOut, collect, read_opt_out

    config, _, _ = load(context, profile, overrides)
    report = collect(log, out, read_opt_out(opt_out) if opt_out else OptOut(), config, time.time())
    table = Table("", "rows", title=f"prompts of {log.name}", title_justify="left")
    for name, count in report.table():
        table.add_row(name, str(count))
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    setting = shlex.quote(f"dataset.prompt_files=[{json.dumps(str(out.resolve()), ensure_ascii=False)}]")
    sys.stdout.write(f"next: python -m flows.retrain --run-id traffic --set {setting}\n")
