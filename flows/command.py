"""The command of `make run`: check the request, run the retraining flow, print a short summary. Prefect is imported last.

Exit codes: 0 done (a rejected challenger too), 2 configuration, 4 busy, 5 preflight, 6 and 7 a step failed, 130 and 143 ended.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any, cast

from eagle.errors import EagleError
from eagle.progress import say
from eagle.signals import leave
from flows import env, launch, summary
from flows.process import StepExit
from flows.server import start_temporary_api


def main(arguments: list[str] | None = None) -> int:
    """Run `python -m flows.retrain`; returns the exit code."""
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, leave)
    try:
        wanted = launch.prepare(asked.profile, tuple(asked.overrides), asked.run_id, force=asked.force)
        with launch.run_lock(wanted):
            stale = launch.preflight(wanted)
            say(f"run '{wanted.run_id}' in {wanted.base}: {', '.join(stale) if stale else 'everything is up to date'}")
            env.quiet_console()
            wait_for_api = start_temporary_api(wanted.root / wanted.config.paths.state / "prefect" / "server.log")
            from flows.retrain import retrain

            wait_for_api()
            value = cast("dict[str, Any]", retrain(wanted.profile, list(wanted.overrides), wanted.run_id, wanted.force))
    except StepExit as error:  # its own message stands above already
        say(f"step {error.step} failed; the same command, with the cause mended, continues there")
        return error.exit_code
    except EagleError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; the same command continues from the last checkpoint")
        return 130
    sys.stdout.write("\n" + summary.text(value))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.retrain", description="Train, measure, pack and register a draft.",
        epilog="example: python -m flows.retrain --profile tiny --set distill.max_minutes=1",
    )
    parser.add_argument("--profile", "-p", default="default", help="default, a name in profiles/, or a YAML file")
    parser.add_argument("--set", "-s", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--run-id", help="folder under runs/; default: the profile's name")
    parser.add_argument("--force", action="store_true", help="run every step anew")
    return parser
