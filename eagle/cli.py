"""The command line: thin. Parses, loads the configuration, calls the library, turns errors into exit codes.

Exit codes: 0 done, 1 failure, 2 usage or configuration, 3 gate rejected, 4 busy, 5 preflight, 6 bundle invalid,
7 step failed, 130/143 ended by a signal.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from eagle import __version__
from eagle.config import Config
from eagle.errors import EagleError
from eagle.profiles import load_config, project_root
from eagle.progress import say
from eagle.signals import leave

if TYPE_CHECKING:
    from eagle.registry.promote import Move

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
target_app = typer.Typer(no_args_is_help=True, help="The served model.")
bundle_app = typer.Typer(no_args_is_help=True, help="vLLM-ready draft bundles.")
app.add_typer(target_app, name="target")
app.add_typer(bundle_app, name="bundle")
registry_app = typer.Typer(no_args_is_help=True, help="Registered drafts: what is champion, and how it came about.")
app.add_typer(registry_app, name="registry")

ProfileOption = Annotated[str | None, typer.Option("--profile", "-p", help="default, a name in profiles/, or a YAML file.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", "-s", help="Override: section.key=value. Repeatable.")]
DirOption = Annotated[Path | None, typer.Option("--dir", help="Folder of the step outputs; default runs/<profile>.")]


@dataclass(frozen=True)
class Invocation:
    """What the global options said; commands add their own on top."""

    root: Path | None
    profile: str | None
    overrides: tuple[str, ...]


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


def _load(context: typer.Context, profile: str | None, overrides: list[str] | None) -> tuple[Config, Path, str]:
    said: Invocation = context.obj
    root = said.root.resolve() if said.root else project_root()
    name = profile or said.profile or "default"
    return load_config(root, name, (*said.overrides, *(overrides or ()))), root, name


def _base(root: Path, config: Config, profile: str, given: Path | None) -> Path:
    return given.resolve() if given else root / config.paths.runs / Path(profile).stem


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

    config, root, chosen = _load(context, profile, overrides)
    run_step(name, config, root, _base(root, config, chosen, folder), force=force)


@app.command()
def plan(context: typer.Context, folder: DirOption = None, profile: ProfileOption = None, overrides: SetOption = None) -> None:
    """Show what a run would do, and why; starts nothing. Example: eagle --profile full plan"""
    from eagle.plan import make_plan

    config, root, chosen = _load(context, profile, overrides)
    base = _base(root, config, chosen, folder)
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


@app.command()
def bench(
    context: typer.Context,
    suite: Annotated[str, typer.Option("--suite", help="default, heldout, mixed, load, or a JSONL file of prompts.")] = "default",
    folder: DirOption = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Comma-separated; default: all that can be measured.")] = None,
    batches: Annotated[str, typer.Option("--batch", help="Comma-separated batch sizes.")] = "1,32",
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="At most this many prompts of the suite.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Interleaved turns.")] = 5,
    out: Annotated[Path | None, typer.Option("--out", help="Output folder; default RUN/bench-<suite>.")] = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Compare speculation methods with the drafts of a run. Example: eagle bench --suite default --dir runs/default"""
    from eagle.bench.compare import available_methods, compare, find_sources

    said = [f"bench.batch_sizes=[{batches}]", f"bench.rounds={rounds}", "bench.temperatures=[0.0]"]
    config, root, chosen = _load(context, profile, [*said, *(overrides or ())])
    base = _base(root, config, chosen, folder)
    wanted = ",".join(available_methods(find_sources(base), base)) if methods is None else methods
    config, root, _ = _load(context, profile, [*said, f"bench.methods=[{wanted}]", *(overrides or ())])
    done = compare(config, root, base, suite, prompts, out)
    say(f"bench: done -> {done}; next: eagle bench --suite load --dir {shlex.quote(str(base))}")


@app.command()
def serve(
    context: typer.Context,
    bundle: Annotated[str | None, typer.Argument(help="Bundle folder, or models:/NAME@champion, or models:/NAME/3.")] = None,
    champion: Annotated[bool, typer.Option("--champion", help="Serve the champion of the configured target.")] = False,
    port: Annotated[int | None, typer.Option("--port", help="Instead of serve.port.")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option("--draft-tokens", min=0, max=16, help="This fixed draft length; 0 = no speculation.")
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the command; start nothing.")] = False,
    vllm_args: Annotated[str, typer.Option("--vllm-args", help="More arguments for vLLM, as one text.")] = "",
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Serve the target with a draft on vLLM. Example: eagle serve runs/default/bundle/bundle"""
    from eagle.serve import launch
    from eagle.serve.resolve import find_bundle

    config, root, _ = _load(context, profile, [*(overrides or ()), *([f"serve.port={port}"] if port is not None else [])])
    folder = find_bundle(bundle, champion, config, root)
    wanted = launch.want(folder, config, root, draft_tokens=draft_tokens, more=tuple(shlex.split(vllm_args)))
    for note in wanted.speculation.notes:
        say(f"serve: {note}")
    if only_print:
        sys.stdout.write(f"{launch.print_command(wanted)}\n")
        return
    with launch.serving(wanted) as server:
        sys.stdout.write(f"{launch.curl_line(wanted)}\n")
        sys.stdout.flush()
        server.wait()


@app.command("config")
def show_config(context: typer.Context, profile: ProfileOption = None, overrides: SetOption = None) -> None:
    """Print the effective configuration as YAML. Example: eagle --set draft.layers=1 config"""
    config, _, _ = _load(context, profile, overrides)
    sys.stdout.write(yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True))


@target_app.command("fetch-demo")
def fetch_demo(context: typer.Context) -> None:
    """Convert the demo target (SmolLM2-135M-Instruct) from its installed package, once. Example: eagle target fetch-demo"""
    from eagle.target.demo import ensure_demo, verify_demo

    config, root, _ = _load(context, None, None)
    folder = ensure_demo(root / config.paths.cache)
    verify_demo(folder)
    sys.stdout.write(f"{folder}\n")


@bundle_app.command("validate")
def bundle_validate(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="The bundle folder.")],
    target: Annotated[
        Path | None, typer.Option("--target", help="Target folder to check the widths and the vocabulary against.")
    ] = None,
) -> None:
    """Check a bundle against vLLM's contract. Example: eagle bundle validate runs/default/bundle/bundle"""
    from eagle.bundle.validate import check_bundle

    report = check_bundle(path, target)
    sys.stdout.write(f"{report}\n")


def _said(move: Move) -> str:
    return f"{move.at}  champion  version {move.previous or '-'} -> {move.version}  {move.kind}  {move.why}"


@registry_app.command("history")
def registry_history(context: typer.Context, profile: ProfileOption = None, overrides: SetOption = None) -> None:
    """List the gate's decisions and the champion's moves, oldest first. Example: eagle registry history"""
    from eagle.registry.client import open_store
    from eagle.registry.promote import decisions, moves
    from eagle.registry.step import model_name

    config, root, _ = _load(context, profile, overrides)
    store, model = open_store(config, root), model_name(config)
    decided, moved = decisions(store, model), moves(store, model)
    if not decided and not moved:
        sys.stdout.write(f"no version of {model} is registered yet; next: make run\n")
    for decision in decided:
        failed = ", ".join(f"{r['name']} {r['value']} (bound {r['bound']})" for r in decision.reasons if not r["ok"])
        sys.stdout.write(f"{decision.at}  gate  version {decision.version}  {decision.verdict}  {failed}\n")
    for move in moved:
        sys.stdout.write(f"{_said(move)}\n")


@registry_app.command("promote")
def registry_promote(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="The model version that becomes champion.")],
    why: Annotated[str, typer.Option("--why", help="Kept in the history.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Also when the gate did not pass it.")] = False,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Make a version champion. Example: eagle registry promote 3 --why 'shadow test passed'"""
    from eagle.registry import promote as aliases
    from eagle.registry.client import open_store
    from eagle.registry.step import model_name

    config, root, _ = _load(context, profile, overrides)
    move = aliases.promote(open_store(config, root), model_name(config), version, why=why, force=force)
    sys.stdout.write(f"{_said(move)}\n")


@registry_app.command("rollback")
def registry_rollback(
    context: typer.Context,
    why: Annotated[str, typer.Option("--why", help="Kept in the history.")] = "",
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Make the former champion champion again. Example: eagle registry rollback --why 'acceptance fell'"""
    from eagle.registry import promote as aliases
    from eagle.registry.client import open_store
    from eagle.registry.step import model_name

    config, root, _ = _load(context, profile, overrides)
    move = aliases.rollback(open_store(config, root), model_name(config), why=why)
    sys.stdout.write(f"{_said(move)}\n")


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
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
