"""Figure F6.4: `dvc repro` in two clean clones of this repository's last commit, tiny profile: the same md5 of every output.

`tune` and `bench` hold times, and so do the files of the bundle that tell them: of the bundle, the files that vLLM loads
are compared; `tune` and `bench` are listed, not compared.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.figures import ROOT, Figure, Measured
from benchmarks.operations_kills import BUNDLE_FILES, HASHED
from benchmarks.operations_project import WORK
from eagle import manifest
from tests.toys import tiny_target

TIMED = ("tune", "bench")


def clones() -> Measured:
    """F6.4: outputs whose md5 differs between two clones."""
    found = [_repro(WORK / "clones" / name) for name in ("one", "two")]
    names = sorted(found[0].keys() | found[1].keys())
    rows = [{"output": name, "md5": [each.get(name) for each in found]} for name in names]
    differing = sum(row["md5"][0] != row["md5"][1] for row in rows)
    commit = manifest.git_state(ROOT)
    why = "uncommitted changes are not in the clones" if commit["dirty"] else None
    return Measured(differing, [*rows, {"not_compared": list(TIMED), "commit": commit["sha"]}], why)


def _repro(folder: Path) -> dict[str, str]:
    """Clone, set the tiny profile and a tiny target, `dvc repro`; return {output: md5}: DVC's for folders, ours for files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run(["git", "clone", "--quiet", str(ROOT), str(folder)], ROOT)
    tiny_target(folder / "target")
    flat = _run([sys.executable, "-m", "eagle", "--profile", "tiny", "--set", "target.model=target", "--set", "runtime.threads=1",
                 "config"], folder)  # fmt: skip
    (folder / "params.yaml").write_text(flat, encoding="utf-8")
    _run([sys.executable, "-m", "dvc", "repro", "--quiet"], folder)
    lock = yaml.safe_load((folder / "dvc.lock").read_text(encoding="utf-8"))
    outputs = {out["path"]: out["md5"] for stage in lock["stages"].values() for out in stage["outs"]}
    kept: dict[str, str] = {f"data/{name}": outputs[f"data/{name}"] for name in HASHED}
    files = {f"data/bundle/{name}": folder / "data" / "bundle" / name for name in BUNDLE_FILES}
    return kept | {name: hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() for name, path in files.items()}


def _run(command: list[str], folder: Path) -> str:
    """Run a command with the folder's own code first and the scripts of this environment on PATH. Returns its output."""
    environment: dict[str, Any] = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command[:4])} ended with {done.returncode} in {folder}: {(done.stdout + done.stderr)[-1000:]}")
    return done.stdout


FIGURES = (Figure("F6.4", "`dvc repro` in two clean clones, tiny profile: outputs with another md5", "", "==", 0.0, clones),)
