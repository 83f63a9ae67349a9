"""`eagle registry`: what is champion, how it came about, and moving it. MLflow is imported by the command that runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eagle.commands.invocation import ProfileOption, SetOption, load
from eagle.config import Config

if TYPE_CHECKING:
    from eagle.registry.catalog import Entry
    from eagle.registry.client import Store
    from eagle.registry.promote import Move

app = typer.Typer(no_args_is_help=True, help="Registered drafts: what is champion, and how it came about.")
VersionArgument = Annotated[str, typer.Argument(help="A version's number, or an alias: champion, challenger, previous.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
WhyOption = Annotated[str, typer.Option("--why", help="Kept in the history.")]
WIDTH = 140


def _open(context: typer.Context, profile: str | None, overrides: list[str] | None) -> tuple[Store, str, Config, Path]:
    from eagle.registry.client import open_store
    from eagle.registry.step import model_name

    config, root, _ = load(context, profile, overrides)
    return open_store(config, root), model_name(config), config, root


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")


def _said(move: Move) -> str:
    by = f"  by {move.by}" if move.by else ""
    return f"{move.at}  champion  version {move.previous or '-'} -> {move.version}  {move.kind}  {move.why}{by}"


def _speed(entry: Entry) -> str:
    return ", ".join(f"{name} {value:.2f}x" for name, value in sorted(entry.speedup.items())) or "-"


@app.command("list")
def list_(
    context: typer.Context, as_json: JsonOption = False, profile: ProfileOption = None, overrides: SetOption = None
) -> None:
    """List the versions with aliases, verdict, acceptance length and speed, oldest first. Example: eagle registry list"""
    from eagle.registry.catalog import entries

    store, model, _, _ = _open(context, profile, overrides)
    found = entries(store, model)
    if as_json:
        _write_json([asdict(entry) for entry in found])
        return
    if not found:
        sys.stdout.write(f"no version of {model} is registered yet; next: make run\n")
        return
    table = Table(title=model, title_justify="left")
    for column in ("version", "aliases", "verdict", "acceptance length", "speed-up", "registered (UTC)", "state"):
        table.add_column(column, overflow="fold")
    for entry in found:
        acceptance = "-" if entry.acceptance_length is None else f"{entry.acceptance_length:.3f}"
        date = entry.created.strftime("%Y-%m-%d %H:%M")
        state = "" if entry.status == "READY" else entry.status
        table.add_row(entry.version, ", ".join(entry.aliases), entry.verdict, acceptance, _speed(entry), date, state)
    _console().print(table)


@app.command()
def show(
    context: typer.Context,
    version: VersionArgument,
    as_json: JsonOption = False,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Show all that is recorded of a version: lineage, reasons, files with hashes. Example: eagle registry show champion"""
    from eagle.registry.catalog import describe, find
    from eagle.registry.gate import Reason

    store, model, _, _ = _open(context, profile, overrides)
    found = describe(store, model, find(store, model, version))
    if as_json:
        _write_json(found)
        return
    lines = []
    for name, value in found.items():
        if name == "reasons":
            lines += ["reasons:", *(f"  {Reason(**reason).line()}" for reason in value)]
        elif isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}  {entry}" for key, entry in value.items())]
        else:
            shown = ", ".join(value) if isinstance(value, list) else value
            lines.append(f"{name}: {'-' if shown in (None, '') else shown}")
    sys.stdout.write("\n".join(lines) + "\n")


@app.command()
def history(context: typer.Context, profile: ProfileOption = None, overrides: SetOption = None) -> None:
    """List the gate's decisions and the champion's moves, oldest first. Example: eagle registry history"""
    from eagle.registry.promote import decisions, moves

    store, model, _, _ = _open(context, profile, overrides)
    decided, moved = decisions(store, model), moves(store, model)
    if not decided and not moved:
        sys.stdout.write(f"no version of {model} is registered yet; next: make run\n")
    for decision in decided:
        failed = ", ".join(f"{r['name']} {r['value']} (bound {r['bound']})" for r in decision.reasons if not r["ok"])
        sys.stdout.write(f"{decision.at}  gate  version {decision.version}  {decision.verdict}  {failed}\n")
    for move in moved:
        sys.stdout.write(f"{_said(move)}\n")


@app.command()
def diff(
    context: typer.Context,
    one: VersionArgument,
    other: VersionArgument,
    as_json: JsonOption = False,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Show settings, data and figures that two versions do not share. Example: eagle registry diff champion challenger"""
    from eagle.registry.catalog import differences, find

    store, model, _, _ = _open(context, profile, overrides)
    first, second = find(store, model, one), find(store, model, other)
    found = differences(store, model, first, second)
    if as_json:
        _write_json([asdict(difference) for difference in found])
        return
    if not found:
        sys.stdout.write(f"versions {first.version} and {second.version} of {model} do not differ\n")
        return
    table = Table(title=f"{model}: version {first.version} and version {second.version}", title_justify="left")
    for column in ("what", "name", f"version {first.version}", f"version {second.version}"):
        table.add_column(column, overflow="fold")
    for row in found:
        table.add_row(row.kind, row.name, *("-" if value is None else str(value) for value in (row.one, row.other)))
    _console().print(table)


@app.command()
def promote(
    context: typer.Context,
    version: VersionArgument,
    why: WhyOption = "",
    force: Annotated[bool, typer.Option("--force", help="Also when the gate did not pass it; needs --why.")] = False,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Make a version champion. Example: eagle registry promote 3 --why 'shadow test passed'"""
    from eagle.registry import promote as aliases
    from eagle.registry.catalog import find

    store, model, _, _ = _open(context, profile, overrides)
    number = str(find(store, model, version).version)
    sys.stdout.write(f"{_said(aliases.promote(store, model, number, why=why, force=force))}\n")


@app.command()
def rollback(context: typer.Context, why: WhyOption = "", profile: ProfileOption = None, overrides: SetOption = None) -> None:
    """Make the former champion champion again. Example: eagle registry rollback --why 'acceptance fell'"""
    from eagle.registry import promote as aliases

    store, model, _, _ = _open(context, profile, overrides)
    sys.stdout.write(f"{_said(aliases.rollback(store, model, why=why))}\n")


@app.command()
def gc(
    context: typer.Context,
    older_than: Annotated[int | None, typer.Option("--older-than", min=0, help="Days since it was registered.")] = None,
    keep: Annotated[int | None, typer.Option("--keep", min=0, help="The last N rejected versions stay, older ones go.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run/--yes", help="Only list (the default), or delete.")] = True,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Delete old rejected versions and their files, never one with an alias. Example: eagle registry gc --keep 5 --yes"""
    from eagle.registry.collect import collect, garbage

    store, model, _, _ = _open(context, profile, overrides)
    found = (garbage if dry_run else collect)(store, model, older_than, keep)
    done = "would be deleted (do it: --yes)" if dry_run else "deleted"
    for entry in found:
        sys.stdout.write(f"version {entry.version}  {entry.verdict}  {entry.created:%Y-%m-%d}  {done}\n")
    if not found:
        sys.stdout.write(f"nothing of {model} is to be deleted\n")


@app.command()
def pull(
    context: typer.Context,
    version: VersionArgument,
    to: Annotated[Path | None, typer.Option("--to", help="Folder to make; default CACHE/bundles/<model>/<version>.")] = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Fetch a version's files, checked by hash; prints the folder. Example: eagle registry pull champion --to draft"""
    from eagle.progress import say
    from eagle.registry.catalog import find
    from eagle.registry.pull import pull as fetch

    store, model, config, root = _open(context, profile, overrides)
    found = find(store, model, version)
    folder = to.resolve() if to else root / config.paths.cache / "bundles" / model / str(found.version)
    fetched = fetch(store, found, folder)
    say(f"{model} version {found.version}: {'fetched and checked' if fetched else 'there already, checked'}")
    sys.stdout.write(f"{folder}\n")
