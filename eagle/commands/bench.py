"""`eagle bench`: speculation methods side by side, in the reference engine or through vLLM's server."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from eagle.commands.invocation import DirOption, ProfileOption, SetOption, base_folder, load
from eagle.config import Method
from eagle.errors import ConfigError, closest
from eagle.progress import say


def bench(
    context: typer.Context,
    suite: Annotated[
        str, typer.Option("--suite", help="default, heldout, mixed, load, robustness, or a JSONL file of prompts.")
    ] = "default",
    engine: Annotated[
        Literal["reference", "vllm"], typer.Option("--engine", help="This project's engine, or vLLM serving the run's bundle.")
    ] = "reference",
    folder: DirOption = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Comma-separated; default: all that can be measured.")] = None,
    batches: Annotated[
        str | None, typer.Option("--batch", help="Comma-separated batch sizes; vllm: requests at once. Default 1,32; vllm 1,8,32.")
    ] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="At most this many prompts of the suite.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Interleaved turns.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder; default RUN/bench-<suite>, vllm RUN/served-<suite>.")
    ] = None,
    compare_with: Annotated[
        Path | None, typer.Option("--compare", help="robustness only: the run folder of a second draft.")
    ] = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Compare speculation methods with the drafts of a run. Example: eagle bench --suite default --dir runs/default

    --engine vllm starts vLLM servers with the run's bundle and measures them from outside, by HTTP.
    --suite robustness measures acceptance only, of the run's draft, under perturbed templates, other languages, code and long
    contexts; --methods, --batch and --rounds do not matter there.
    """
    if suite == "robustness":
        if engine == "vllm":
            raise ConfigError("--suite robustness: it is measured in the reference engine; leave --engine out")
        from eagle.bench.robustness import measure_robustness

        config, root, chosen = load(context, profile, overrides)
        base = base_folder(root, config, chosen, folder)
        done = measure_robustness(config, root, base, compare=compare_with, prompts=prompts, out=out)
        say(f"bench: done -> {done}; next: read {shlex.quote(str(done / 'robustness.md'))}")
        return
    if compare_with is not None:
        raise ConfigError("--compare: only the suite 'robustness' compares two runs' drafts; add --suite robustness")
    if suite == "load" and engine == "reference" and methods is not None:
        raise ConfigError("--methods: the suite 'load' compares none and eagle31-pid only; leave it out, or name another suite")
    levels = _sizes(batches if batches is not None else ("1,32" if engine == "reference" else "1,8,32"))
    said = [f"bench.batch_sizes={levels}", f"bench.rounds={rounds}", "bench.temperatures=[0.0]"]
    config, root, chosen = load(context, profile, [*said, *(overrides or ())])
    base = base_folder(root, config, chosen, folder)
    if engine == "vllm":
        from eagle.servebench.session import bench_served

        done = bench_served(config, root, base, suite, prompts, out, methods)
        say(f"bench: done -> {done}; next: eagle serve {shlex.quote(str(base / 'bundle' / 'bundle'))}")
        return
    from eagle.bench.compare import available_methods, compare, find_sources

    wanted = available_methods(find_sources(base), base) if methods is None else _methods(methods)
    config, root, _ = load(context, profile, [*said, f"bench.methods=[{', '.join(wanted)}]", *(overrides or ())])
    done = compare(config, root, base, suite, prompts, out)
    say(f"bench: done -> {done}; next: eagle bench --suite load --dir {shlex.quote(str(base))}")


def _methods(text: str) -> list[Method]:
    """Return the methods of `--methods`. ConfigError names the closest one for a name that is none."""
    valid: dict[str, Method] = {method: method for method in get_args(Method)}
    names = [name for part in text.split(",") if (name := part.strip())]
    wrong = next((name for name in names if name not in valid), None)
    if wrong is not None or not names:
        what = "it names none" if wrong is None else f"there is no method '{wrong}'{closest(wrong, valid)}"
        raise ConfigError(f"--methods: {what}; methods: {', '.join(valid)}")
    return [valid[name] for name in names]


def _sizes(text: str) -> list[int]:
    """Return the numbers of `--batch`. Raises ConfigError for what is none."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError(f"--batch: '{text}': must be whole numbers from 1 on, separated by commas, for example 1,32")
    return sizes
