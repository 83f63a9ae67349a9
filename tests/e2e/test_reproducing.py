"""A version of the tiny profile made again by `eagle reproduce` in a clone of this repository: every hash is the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import environment, run_in
from tests.toys import tiny_target

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
CODE = ("eagle", "flows", "kernels", "profiles", "data/prompts")


def test_a_version_made_again_is_equal(tmp_path: Path) -> None:
    project = tmp_path / "mein Prøjekt"
    for name in CODE:
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "params.yaml", project / "params.yaml")
    shutil.copy(ROOT / ".gitignore", project / ".gitignore")
    tiny_target(project / "target")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all of it")):
        named = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *named, *words], cwd=project, check=True)
    said = ["--profile", "tiny", "--set", "target.model=target"]
    for name in ("dataset", "distill", "policy", "tune", "bench", "bundle", "register"):
        done = run_in(project, "eagle", *said, "step", name, "--dir", "runs/tiny")
        assert done.returncode == 0, done.stderr[-3000:]
    done = subprocess.run(
        [sys.executable, "-m", "eagle", *said, "reproduce", "models:/eagle31-target/1"],
        cwd=project, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("equal") == 6, done.stdout
