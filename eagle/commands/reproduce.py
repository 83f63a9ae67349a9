"""`eagle reproduce`: a registered version made again at its commit, and compared by hash."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eagle.commands.invocation import ProfileOption, SetOption, load
from eagle.errors import ConfigError

SHOWN = 16


def reproduce(
    context: typer.Context,
    address: Annotated[str, typer.Argument(help="The version: models:/NAME/3 or models:/NAME@champion.")],
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep the outputs in this folder, which is not there yet.")] = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Make a version again from its commit, settings and data; 0 only when all hashes are equal, else 1.

    Takes as long as the run took. Example: eagle reproduce models:/eagle31-SmolLM2-135M-Instruct/3
    """
    from eagle.registry.client import open_store
    from eagle.registry.fetch import find_version
    from eagle.registry.settings import recorded
    from eagle.reproduce.run import reproduce as run_again

    config, root, _ = load(context, profile, overrides)
    if keep is not None and keep.exists():
        raise ConfigError(f"--keep {keep}: it exists; name a new folder")
    store = open_store(config, root)
    found = recorded(store, find_version(address, store))
    made = run_again(store, found, root, keep.resolve() if keep else None)
    table = Table(title=f"{found.model} version {found.version}, made again at {(found.commit or '')[:12]}", title_justify="left")
    for column in ("what", "registered", "made again", ""):
        table.add_column(column, overflow="fold")
    for row in made.rows:
        shown = ("-" if value is None else value[:SHOWN] for value in (row.then, row.now))
        table.add_row(row.what, *shown, "equal" if row.equal else "different")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    for name, (then, now) in made.packages.items():
        sys.stdout.write(f"{name}: {then or '-'} then, {now or '-'} now\n")
    if not made.equal:
        raise typer.Exit(1)
