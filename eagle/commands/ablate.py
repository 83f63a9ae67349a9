"""`eagle ablate`: training methods compared on a run's data set."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from eagle.commands.invocation import DirOption, Invocation, ProfileOption, SetOption, base_folder, load
from eagle.progress import say


def ablate(
    context: typer.Context,
    folder: DirOption = None,
    arms: Annotated[str | None, typer.Option("--arms", help="Comma-separated; default: all.")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Comma-separated; default: ablate.seeds.")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Training time per arm; default: ablate.minutes.")] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Finished stage 1 (RUN/distill) that all arms go on from; default: one a seed.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Output folder; default RUN/ablate.")] = None,
    vllm: Annotated[bool, typer.Option("--vllm", help="Also count accepted tokens in vLLM.")] = False,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Train and compare methods on a run's data set, with seeds. Example: eagle ablate --dir runs/default --arms exact,continued"""
    from eagle.ablate.arms import DEFAULT, parse_arms
    from eagle.ablate.run import Ablation
    from eagle.ablate.run import ablate as run_ablation

    chosen_arms = parse_arms(arms.split(",") if arms is not None else DEFAULT)
    said = [*(overrides or ())]
    given = [f"ablate.seeds=[{seeds}]"] if seeds is not None else []
    given += [f"ablate.minutes={minutes}"] if minutes is not None else []
    config, root, chosen = load(context, profile, [*said, *given])
    base = base_folder(root, config, chosen, folder)
    typed: Invocation = context.obj
    sets = [word for override in (*typed.overrides, *said) for word in ("--set", override)]
    words = ("eagle", *(("--root", str(root)) if typed.root else ()), "--profile", chosen, *sets)
    place = out.resolve() if out else base / "ablate"
    text = run_ablation(Ablation(config, root, base, place, words, vllm, start.resolve() if start else None), chosen_arms)
    sys.stdout.write(text)
    say(f"ablate: done -> {place}")
