"""Supervision of a step's process: its lines, its time limit, and its end together with all its children. No Prefect here."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from eagle import guard as guarding
from eagle.errors import EagleError

GUARD = Path(guarding.__file__)
GRACE_SECONDS = 10.0
REFUSED = {2, 3, 4, 5, 6, 7}
INTERRUPTED = {130}


class StepExit(EagleError):
    """A step's process did not end well. `code` is its exit code, 128 + N when signal N ended it."""

    def __init__(self, step: str, code: int, last_line: str) -> None:
        self.step, self.code, self.last_line = step, code, last_line
        how = f"was ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        super().__init__(f"step {step} {how}; its last line: {last_line or '(none)'}")

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """The code that the flow's command ends with: the step's own when it refused, 7 when it crashed."""
        return self.code if self.code in REFUSED | INTERRUPTED else 7

    @property
    def crashed(self) -> bool:
        """True for a crash (a retry may help), false when the step refused its work or was interrupted by a person."""
        return self.code not in REFUSED | INTERRUPTED


class StepTimeout(EagleError):
    """A step ran longer than flow.step_timeout_s and was ended with all its children."""

    exit_code = 7


def run_supervised(
    step: str,
    command: list[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    line: Callable[[str], None],
    grace: float = GRACE_SECONDS,
) -> None:
    """Run `command` in its own session and hand every line of its output to `line` as it comes.

    Whatever ends this call (the time limit, an exception such as KeyboardInterrupt, the death of this process even
    by SIGKILL) ends the command's whole process tree: SIGTERM, then SIGKILL after `grace` seconds.
    Raises StepExit when the command ends with a code other than 0, StepTimeout after `timeout` seconds.
    """
    guard = subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", str(GUARD), str(grace), *command],
        cwd=cwd, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )
    last = ""

    def take(text: str) -> None:
        nonlocal last
        last = text.strip() or last
        line(text)

    try:
        if not _relay(guard, time.monotonic() + timeout, take):
            raise StepTimeout(f"step {step}: not done after {timeout:.0f} s (flow.step_timeout_s); it was ended and can be resumed")
        code = guard.wait()
    finally:
        _end(guard, grace)
    if code:
        raise StepExit(step, code if code > 0 else 128 - code, last)


def _relay(guard: subprocess.Popen[bytes], deadline: float, line: Callable[[str], None]) -> bool:
    """Hand over lines until the end of the output (True) or the deadline (False)."""
    assert guard.stdout is not None  # noqa: S101
    descriptor, rest = guard.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(min(left, 1.0)):
                if guard.poll() is not None:  # something that escaped the guard still holds the pipe
                    return True
                continue
            chunk = os.read(descriptor, 65536)
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            for text in lines if chunk else [*lines, rest]:
                if text.strip():
                    line(text.decode(errors="replace").rstrip())
            if not chunk:
                return True
    return False


def _end(guard: subprocess.Popen[bytes], grace: float) -> None:
    """Close the guard's input, which makes it end what is left of the tree, and wait for it."""
    assert guard.stdin is not None  # noqa: S101
    assert guard.stdout is not None  # noqa: S101
    guard.stdin.close()
    try:
        guard.wait(timeout=grace + 15)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()
    finally:
        guard.stdout.close()
