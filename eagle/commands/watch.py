"""`eagle watch`: whether a served draft is still accepted as it was in its bundle."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from eagle.commands.invocation import DirOption, ProfileOption, SetOption, base_folder, load
from eagle.progress import say

if TYPE_CHECKING:
    from eagle.watch.run import Tell
    from eagle.watch.state import Change, State


def watch(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="The vLLM server, for example http://127.0.0.1:8000")],
    bundle: Annotated[Path | None, typer.Option("--bundle", help="The bundle it serves; default RUN/bundle/bundle.")] = None,
    folder: DirOption = None,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit with the status' code (for cron).")] = False,
    event: Annotated[bool, typer.Option("--event", help="Send each change of the status to Prefect.")] = False,
    state: Annotated[Path | None, typer.Option("--state", help="Where the evidence is kept; default .state/watch/.")] = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Tell whether a served draft is still accepted as in its bundle: 0 healthy, 10 drifting, 11 degraded, 12 unreachable.

    Example: eagle watch http://127.0.0.1:8000 --bundle runs/default/bundle/bundle --once
    """
    from eagle.bundle.reference import read_reference
    from eagle.watch.display import Screen, next_step, status_line
    from eagle.watch.run import EXIT_CODES, Watch, alone, default_state

    config, root, chosen = load(context, profile, overrides)
    served = bundle or base_folder(root, config, chosen, folder) / "bundle" / "bundle"
    reference = read_reference(served)
    path = state or default_state(root / config.paths.state / "watch", url)
    with alone(path):
        watched = Watch(url, reference, config.watch, path, _event_hook(url, served) if event else None)
        if watched.fresh:
            say(f"watch: new evidence in {path} ({watched.fresh})")
        if not once:
            with Screen(watched) as screen:
                watched.follow(screen.show)
        watched.look()
        sys.stdout.write("\n".join(filter(None, (status_line(watched), next_step(watched)))) + "\n")
        raise typer.Exit(EXIT_CODES[watched.state.status])


def _event_hook(url: str, bundle: Path) -> Tell:
    """Return a hook that sends each change to Prefect, through flows/: the library knows nothing of Prefect.

    Raises PreflightError when no Prefect server is set up.
    """
    from eagle.watch.scrape import metrics_url

    page = metrics_url(url)
    events = importlib.import_module("flows.events")
    emit = events.emitter(f"eagle.draft/{urlsplit(page).netloc}", {"url": page, "bundle": str(bundle.resolve())})

    def tell(change: Change, state: State) -> None:
        emit(change.status, change.at, {**change.model_dump(exclude={"told", "at", "status"}), "restarts": state.restarts})

    return tell
