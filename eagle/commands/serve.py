"""`eagle serve`: the target with a draft on vLLM."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from eagle.commands.invocation import ProfileOption, SetOption, load
from eagle.errors import ConfigError
from eagle.progress import say


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

    config, root, _ = load(context, profile, [*(overrides or ()), *([f"serve.port={port}"] if port is not None else [])])
    try:
        more = tuple(shlex.split(vllm_args))
    except ValueError as error:
        raise ConfigError(f"--vllm-args: {vllm_args}: {str(error).lower()}; quote as in a shell") from None
    folder = find_bundle(bundle, champion, config, root)
    wanted = launch.want(folder, config, root, draft_tokens=draft_tokens, more=more)
    for note in wanted.speculation.notes:
        say(f"serve: {note}")
    if only_print:
        sys.stdout.write(f"{launch.print_command(wanted)}\n")
        return
    with launch.serving(wanted) as server:
        sys.stdout.write(f"{launch.curl_line(wanted)}\n")
        sys.stdout.flush()
        server.wait()
