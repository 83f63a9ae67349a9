"""Prefect's API for the time of one command, when no server is set up: `prefect server start` on a loopback port.

Prefect would start one itself, but in our process group, where Ctrl-C ends it before the run's state is stored, and
a `kill -9` of the command would leave it behind. Ours is in its own session and under the guard. No Prefect import here.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from eagle.errors import PreflightError
from eagle.ports import free_port
from flows.process import GUARD

START_SECONDS = 90.0
GRACE_SECONDS = 5.0
ATTEMPTS = 3
QUIET = ("--no-ui", "--no-scheduler", "--no-late-runs", "--analytics-off", "--log-level", "ERROR")
SCHEDULING = ("--ui", "--scheduler", "--late-runs", "--analytics-off", "--log-level", "ERROR")


def start_temporary_api(log: Path) -> Callable[[], None]:
    """Start the API and set PREFECT_API_URL for this process, unless the user set it: then that one is used.

    Returns a function that waits until the API answers, so that its start overlaps with importing Prefect; it raises
    PreflightError when the server does not come up. log: where the server's own output goes.
    Call it before Prefect is imported: the server is ended at this process' exit, and exit handlers run last in, first
    out, so that Prefect's can still deliver the run's last states and lines.
    """
    if os.environ.get("PREFECT_API_URL"):
        return lambda: None
    return _start_api(log, free_port(), QUIET)


def start_scheduling_api(log: Path, port: int) -> Callable[[], None]:
    """Like `start_temporary_api`, with scheduler, automations and UI, at a fixed port: commands and `eagle watch` find it there.

    Raises PreflightError when something listens at the port already.
    """
    if os.environ.get("PREFECT_API_URL"):
        return lambda: None
    if not _is_free(port):
        raise PreflightError(
            f"schedule: port {port} is in use; if a Prefect server runs there, set PREFECT_API_URL=http://127.0.0.1:{port}/api, "
            "else give another --port"
        )
    return _start_api(log, port, SCHEDULING)


def _start_api(log: Path, port: int, options: tuple[str, ...]) -> Callable[[], None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    servers = [_start(port, log, options)]
    atexit.register(_stop, servers)
    os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"

    def wait() -> None:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            if servers[-1].poll() is not None and len(servers) < ATTEMPTS and time.monotonic() < deadline:
                servers.append(_start(port, log, options))  # two first uses may have migrated one database at once
            elif servers[-1].poll() is not None or time.monotonic() > deadline:
                raise PreflightError(f"Prefect's temporary server did not start within {START_SECONDS:.0f} s; its output: {log}")
            time.sleep(0.05)

    return wait


def _stop(servers: list[subprocess.Popen[bytes]]) -> None:
    for server in servers:
        if server.stdin is not None:
            server.stdin.close()  # the guard's signal to end the server
        server.wait()


def _start(port: int, log: Path, options: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, str(GUARD), str(GRACE_SECONDS), *command],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_behind_the_steps,
        )


def _behind_the_steps() -> None:
    """Between fork and exec: the server polls all the time, and a step's threads that wait for each other must not wait for it."""
    os.nice(19)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=5) as response:  # noqa: S310
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
