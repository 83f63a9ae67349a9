"""`dvc repro` on the tiny profile: the six stages run once, then nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import environment, run_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def dvc(folder: Path, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *argv], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_repro_makes_every_stage_and_a_second_call_runs_nothing(project: Path) -> None:
    flat = run_in(project, "eagle", "--profile", "tiny", "--set", "target.model=target", "config")
    (project / "params.yaml").write_text(flat.stdout, encoding="utf-8")
    for name in ("eagle", "kernels"):
        (project / name).symlink_to(Path(__file__).parents[2] / name)
    dvc(project, "init", "--no-scm", "-q")
    dvc(project, "repro")
    for stage in ("dataset", "distill", "policy", "tune", "bench", "bundle"):
        assert json.loads((project / "data" / stage / "manifest.json").read_text(encoding="utf-8"))["step"] == stage
    assert "up to date" in dvc(project, "repro")
