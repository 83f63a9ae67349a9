"""Scheduled retraining on one machine: serve the deployments of prefect.yaml, with a Prefect server where none is set up.

    python -m flows.schedule
    python -m flows.schedule --cron "0 3 * * *" --timezone Europe/Berlin --profile default

Ctrl-C and SIGTERM end it, with the run that is at work; what that run has reached is kept.
Exit codes: 0 ended by a signal (143: SIGTERM while it starts), 2 configuration, 5 the server does not start, does not answer,
or its port is taken.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from eagle.errors import EagleError
from eagle.profiles import load_config, project_root
from eagle.progress import say
from eagle.signals import leave
from flows import definitions
from flows.definitions import Definition
from flows.server import start_scheduling_api

AUTOMATIONS = "automations.yaml"
PORT = 4200


def main(arguments: list[str] | None = None) -> int:
    """Run `python -m flows.schedule`; returns the exit code."""
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, leave)
    try:
        root = project_root()
        wanted = _wanted(asked, root)
        own = not os.environ.get("PREFECT_API_URL")
        wait_for_api = start_scheduling_api(root / load_config(root).paths.state / "prefect" / "server.log", asked.port)
        from flows.serving import serve

        wait_for_api()
        say(_about(wanted, own))
        automations = root / AUTOMATIONS
        serve(wanted, automations if automations.is_file() else None)
    except EagleError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("schedule: ended; a run that was at work continues at its next tick, or with: python -m flows.retrain")
    return 0


def _wanted(asked: argparse.Namespace, root: Path) -> list[Definition]:
    found = definitions.read_definitions(asked.file or root / definitions.FILE)
    wanted = [one.moved(asked.cron, asked.timezone, asked.profile, asked.overrides) for one in found]
    for one in wanted:
        definitions.check(one, root)
    return wanted


def _about(wanted: list[Definition], own: bool) -> str:
    address = os.environ["PREFECT_API_URL"]
    lines = [f"schedule: {'own server and UI' if own else 'server'} at {address.removesuffix('/api')}"]
    for one in wanted:
        ticks = ", ".join(f"'{tick.cron}' {tick.timezone}" for tick in one.schedules) or "when told to"
        name = one.entrypoint.rpartition(":")[2]
        lines.append(f"  {name}/{one.name}: {ticks}; now: PREFECT_API_URL={address} prefect deployment run {name}/{one.name}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.schedule", description="Retrain at the times that prefect.yaml says, from this machine.",
        epilog="example: python -m flows.schedule --cron '0 3 * * *' --timezone Europe/Berlin --profile default",
    )
    parser.add_argument("--file", type=Path, help=f"deployments; default: the project's {definitions.FILE}")
    parser.add_argument("--cron", help="times of the scheduled deployment, instead of the file's")
    parser.add_argument("--timezone", help="IANA name, for example Europe/Berlin")
    parser.add_argument("--profile", "-p", help="default, a name in profiles/, or a YAML file")
    parser.add_argument("--set", "-s", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--port", type=int, default=PORT, help=f"of the own server, without PREFECT_API_URL; default {PORT}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
