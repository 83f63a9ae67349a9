"""What processes left: Prefect servers whose starter is gone, and temporary folders of this user that nobody uses."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial as bind
from pathlib import Path

import psutil

from eagle import manifest
from eagle.doctor.finding import Finding

SERVER = ("server", "start", "--no-ui", "--no-late-runs")  # how flows/server.py starts one; a user's own has a UI
GUARD = "guard.py"
STOP_SECONDS = 10.0
DAY = 86400.0


def server_findings(state: Path) -> Iterator[Finding]:
    """Yield the temporary Prefect servers of the project with this state folder that no guard watches over any more."""
    home = str((state / "prefect").resolve())
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            ours = "prefect" in words and all(word in words for word in SERVER) and process.environ().get("PREFECT_HOME") == home
            if not ours or any(Path(word).name == GUARD for parent in process.parents() for word in parent.cmdline()):
                continue
        except psutil.Error:  # ended meanwhile, or another user's
            continue
        yield Finding(
            "temporary Prefect server whose command is gone", f"process {process.pid}",
            "the guard that ends it with its command is dead, so nobody talks to it", "ends it: SIGTERM, then SIGKILL",
            bind(_end, process),
        )  # fmt: skip


def _end(process: psutil.Process) -> bool:
    try:
        family = [process, *process.children(recursive=True)]
        for member in family:
            member.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
        for member in alive:
            member.kill()
    except psutil.NoSuchProcess:
        return True
    return not psutil.wait_procs(alive, timeout=STOP_SECONDS)[1]


def temporary_findings(folder: Path | None = None) -> Iterator[Finding]:
    """Yield this user's leftovers in the system's folder for temporary files (or in `folder`).

    A vLLM job's folder when the process that made it is gone; a Prefect home of a test session, and the checkout of an
    `eagle reproduce`, when nothing was written in it for a day and no process names it.
    """
    place = folder or Path(tempfile.gettempdir())
    for path in sorted(place.glob("eagle-vllm-*")):
        if _mine(path) and _job_is_over(path):
            yield Finding(
                "working folder of a vLLM job that was killed", str(path), "the process that made it is gone and none works in it",
                "removes it", bind(_remove, path),
            )  # fmt: skip
    for pattern, what in (("eagle-prefect-*", "Prefect home of a session"), ("eagle-reproduce-*", "folder of an eagle reproduce")):
        for path in sorted(place.glob(pattern)):
            if _mine(path) and _quiet_since(path) > DAY and not _in_use(path):
                yield Finding(
                    f"temporary {what} that was killed", str(path),
                    "nothing was written in it for a day and no process works with it", "removes it", bind(_remove, path),
                )  # fmt: skip


def _mine(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()


def _job_is_over(path: Path) -> bool:
    try:
        parent = int(manifest.read_json(path / "job.json")["parent"])
    except (OSError, ValueError, KeyError, TypeError):
        return _quiet_since(path) > DAY and not _in_use(path)  # killed before it wrote its job
    return not psutil.pid_exists(parent) and not _in_use(path)


def _quiet_since(path: Path) -> float:
    """Return the seconds since the last write below `path`."""
    return time.time() - max(p.lstat().st_mtime for p in (path, *path.rglob("*")))


def _in_use(path: Path) -> bool:
    """Return whether a process works in the folder, was started with it, or has it as its Prefect home."""
    where = str(path)
    for process in psutil.process_iter():
        try:
            if where in process.cwd() or any(where in word for word in process.cmdline()):
                return True
            if process.environ().get("PREFECT_HOME", "").startswith(where):
                return True
        except psutil.Error:
            continue
    return False


def _remove(path: Path) -> bool:
    shutil.rmtree(path)
    return True
