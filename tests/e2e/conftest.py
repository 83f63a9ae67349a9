"""A project of its own for each end-to-end module, in a path with a space and a non-ASCII letter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.toys import tiny_target

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


def make_project(folder: Path) -> Path:
    """Copy what a project needs beside the code (which is installed) and put a tiny target in it."""
    folder.mkdir(parents=True)
    for name in ("params.yaml", "dvc.yaml", ".dvcignore"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("profiles", "data/prompts"):
        shutil.copytree(ROOT / name, folder / name)
    tiny_target(folder / "target")
    return folder


def environment() -> dict[str, str]:
    """The environment of a run: one thread a process, the console script on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**own, "OMP_NUM_THREADS": "2", "PATH": path, "CI": "true"}


def run_in(folder: Path, *argv: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGV` in `folder` and return what it said."""
    return subprocess.run(
        [sys.executable, "-m", *argv], cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("e2e") / "mein Prøjekt")
