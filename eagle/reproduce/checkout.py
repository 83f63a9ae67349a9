"""A commit checked out beside the work tree, in a git worktree of a temporary folder, gone when the block ends."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle.errors import ConfigError, PreflightError
from eagle.registry.settings import Recorded

CODE = "eagle/steps.py"


def require_commit(recorded: Recorded, root: Path) -> str:
    """Return the commit that the version was made at. ConfigError, one line, when it cannot be checked out as it was."""
    name = f"{recorded.model} version {recorded.version}"
    if recorded.commit is None:
        raise ConfigError(f"reproduce: {name} records no commit: it was made outside a git work tree; only its settings are known")
    if recorded.dirty:
        raise ConfigError(
            f"reproduce: {name} was made with uncommitted changes on top of {recorded.commit[:12]}, which are lost; "
            "commit, then retrain"
        )
    if _git(root, "cat-file", "-e", f"{recorded.commit}^{{commit}}").returncode:
        raise ConfigError(
            f"reproduce: commit {recorded.commit[:12]} of {name} is not in the repository at {root}; "
            f"fetch it: git fetch origin {recorded.commit}"
        )
    return recorded.commit


@contextmanager
def checked_out(commit: str, root: Path, folder: Path) -> Iterator[Path]:
    """Yield the project's folder at `commit`, checked out below `folder` (not there yet); afterwards git forgets it.

    Raises ConfigError when that commit holds no pipeline (a project apart from its code), PreflightError when git fails.
    """
    added = _git(root, "worktree", "add", "--detach", str(folder), commit)
    if added.returncode:
        raise PreflightError(f"reproduce: git cannot check out {commit[:12]}: {added.stderr.strip().splitlines()[-1]}")
    try:
        project = folder / _git(root, "rev-parse", "--show-prefix").stdout.strip()
        if not (project / CODE).is_file():
            raise ConfigError(f"reproduce: commit {commit[:12]} holds no {CODE} in {root}: the pipeline's code is kept elsewhere")
        yield project
    finally:
        _git(root, "worktree", "remove", "--force", str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        _git(root, "worktree", "prune")


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    git = shutil.which("git")
    if git is None:
        raise PreflightError("reproduce: git is not installed, and the code of that time is needed")
    return subprocess.run([git, *arguments], cwd=root, capture_output=True, text=True, check=False)  # noqa: S603
