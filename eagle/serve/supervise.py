"""One server process from start to end: its log, its health, and that it never outlives its caller.

The server runs below `eagle/guard.py`, in a session of its own. Ctrl-C and SIGTERM are exceptions here, which close the
guard's input; a `kill -9` of this process closes it too. The guard then ends the whole tree: SIGTERM, SIGKILL after a grace.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from eagle import guard as guarding
from eagle.errors import StepFailed
from eagle.progress import say
from eagle.signals import sigterm_raises
from eagle.target.vllm_log import last_message, log_tail, telling_line

POLL_SECONDS = 0.5
SAY_SECONDS = 5.0
KILL_SECONDS = 15.0


class Server:
    """A started server. `url` has no path; `log` is where its output goes."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._process = process
        self.url, self.log = url, log

    @property
    def pid(self) -> int:
        """The process that all of the server's processes descend from."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """The exit code (128 + N for signal N), None while it runs."""
        return self._process.poll()

    def wait_healthy(self, limit: float) -> float:
        """Wait for GET /health to answer 200; return the seconds it took. Says every five seconds what the log says.

        Raises StepFailed, with the log's telling line, when the process ends or `limit` seconds are over.
        """
        began = said = time.monotonic()
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while True:
                if self.ended is not None:
                    raise StepFailed(f"serve: vLLM ended with exit code {self.ended} while starting: {self._why()}")
                if _healthy(client, self.url):
                    return time.monotonic() - began
                now = time.monotonic()
                if now - began > limit:
                    raise StepFailed(f"serve: vLLM still starting after {limit:.0f} s (vllm.start_timeout_s), ended: {self._why()}")
                if now - said >= SAY_SECONDS:
                    said = now
                    say(f"serve: starting, {now - began:.0f} s  {last_message(self.log)[:120]}".rstrip())
                time.sleep(POLL_SECONDS)

    def wait(self) -> None:
        """Wait for the server's end. Raises StepFailed when it ends by itself with another code than 0."""
        code = self._process.wait()
        if code:
            raise StepFailed(f"serve: vLLM ended with exit code {code}: {self._why()}")

    def _why(self) -> str:
        for line in log_tail(self.log):
            say(f"  | {line[:400]}")
        return f"{telling_line(self.log)}; log: {self.log}"


@contextmanager
def running(
    command: list[str], environment: Mapping[str, str], url: str, log: Path, *, cwd: Path, grace: float
) -> Iterator[Server]:
    """Run a server for as long as the block lasts. Its output goes to `log`, replaced. After `grace` seconds it is killed."""
    with sigterm_raises(), log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 -- the interpreter is the configured one
            [sys.executable, "-P", guarding.__file__, str(grace), *command],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=dict(environment), cwd=cwd, start_new_session=True,
        )  # fmt: skip
        try:
            yield Server(process, url, log)
        finally:
            _end(process, grace)


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    assert process.stdin is not None  # noqa: S101 -- for the type checker
    process.stdin.close()
    try:
        process.wait(timeout=grace + KILL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
