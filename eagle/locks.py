"""File locks that name their owner: who holds one is said to whoever is refused, and a dead owner's name is seen.

The lock itself is the kernel's (flock), so it is free the moment its owner is gone, even by SIGKILL. What stays then is
the owner's name in the file, which `eagle doctor` reads. One owner's line is JSON: pid, host, start of the process, command.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

COMMAND_LENGTH = 200


@dataclass(frozen=True)
class Owner:
    """The process that took a lock. `started`: its start in seconds since 1970, which tells it from a later one with its pid."""

    pid: int
    host: str
    started: float
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}: {self.command}"

    @property
    def here(self) -> bool:
        """True when the process was one of this machine's."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """True when this very process runs; only to be asked on its own machine."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


def this_process() -> Owner:
    """Return this process as an owner. Settings are left out of its command: one may hold a password."""
    words = [word for word in sys.argv[1:] if "=" not in word]
    command = " ".join([Path(sys.argv[0]).name, *words])[:COMMAND_LENGTH]
    return Owner(os.getpid(), socket.gethostname(), psutil.Process().create_time(), command)


def owner_of(path: Path) -> Owner | None:
    """Return who last wrote his name into a lock file and has not taken it out; None when there is no name to be read."""
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def owned_lock(path: Path, timeout: float = 0.0, *, shared_in_process: bool = False) -> Iterator[None]:
    """Hold the lock file `path` with this process' name in it. filelock's Timeout after `timeout` seconds.

    `shared_in_process`: the same process may take it again while it holds it.
    """
    with FileLock(path, timeout=timeout, is_singleton=shared_in_process):
        me, named = this_process(), owner_of(path)
        # Without flock (some network file systems) filelock keeps its own mark in the file, which must stay.
        foreign = named is None and path.stat().st_size > 0
        if named == me or foreign:
            yield
            return
        path.write_text(json.dumps(asdict(me), ensure_ascii=False), encoding="utf-8")
        try:
            yield
        finally:
            with suppress(FileNotFoundError):  # the whole folder may have been removed meanwhile
                os.truncate(path, 0)


def is_held(path: Path) -> bool:
    """Return whether some process holds the lock file now. A file that is not there is held by nobody and is not made.

    Unless a living owner's name stands in it, the lock is taken for a moment to find out.
    """
    if not path.is_file():
        return False
    owner = owner_of(path)
    if owner is not None and owner.here and owner.alive:
        return True
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def holder(path: Path) -> str:
    """Return who holds the lock, in words for a message."""
    owner = owner_of(path)
    return "another process" if owner is None else f"another process ({owner})"


def clear_dead_owner(path: Path) -> bool:
    """Take a dead owner's name out of a lock file that nobody holds. False when somebody took the lock meanwhile."""
    try:
        with FileLock(path, timeout=0):
            os.truncate(path, 0)
            return True
    except Timeout:
        return False
