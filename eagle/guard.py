"""Runs one command and leaves no process behind, whatever ends it. A script of flows/process.py and eagle/serve/supervise.py.

`python -P guard.py GRACE_SECONDS COMMAND...` starts COMMAND and ends its whole tree (SIGTERM, then SIGKILL) when
  - the command itself ends (orphans, for example an engine whose parent was killed, are ended too),
  - this process gets SIGTERM or SIGINT,
  - standard input reaches its end: whoever started this is gone, even by `kill -9`.
The exit code is the command's, 128 + N when signal N ended it. Needs the standard library and psutil only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Stop(BaseException):
    """A signal arrived, or the starter is gone."""

    def __init__(self, code: int) -> None:
        self.code = code


def main(arguments: list[str]) -> int:
    """Run the guard; see the module's text for the arguments. Returns the exit code."""
    grace, command = float(arguments[0]), arguments[1:]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    _adopt_orphans()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard if LIBC else None)  # noqa: S603
        threading.Thread(target=_wait_for_eof, daemon=True).start()
        code = child.wait()
    except Stop as stop:
        code = stop.code
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_tree(grace)
    return 128 - code if code < 0 else code


def end_tree(grace: float) -> None:
    """End everything below this process: SIGTERM at once, SIGKILL after `grace` seconds, again until nothing is left."""
    deadline = time.monotonic() + grace
    told: set[int] = set()
    while alive := [p for p in psutil.Process().children(recursive=True) if _alive(p)]:
        late = time.monotonic() > deadline
        for process in alive:
            if late or process.pid not in told:
                told.add(process.pid)
                _signal(process, signal.SIGKILL if late else signal.SIGTERM)
        psutil.wait_procs(alive, timeout=0.2)
        if time.monotonic() > deadline + 60:  # uninterruptible in the kernel; nothing more can be done from here
            return


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stop(128 + number)


def _wait_for_eof() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _adopt_orphans() -> None:
    """On Linux, grandchildren whose parent dies become our children, so that they can be found and ended."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_guard() -> None:
    """Between fork and exec: should the guard itself be ended by SIGKILL, the kernel ends the command."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
