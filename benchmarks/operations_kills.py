"""The harness behind F6.3: every step of the tiny profile, ended by kill -9 at a random moment, mended and run again.

`FIGURES_KILLS=3 make figures ID=F6.3` for a shorter one. The steps take turns; each kill hits the step's whole process
group at a uniformly random part of the time that the step took undisturbed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import ROOT
from eagle import manifest
from eagle.profiles import load_config
from eagle.registry.client import open_store
from eagle.steps import STEPS

NAMES = tuple(STEPS)
KILLS = 40
SEED = 20261130
HASHED = ("dataset", "distill", "policy")  # what holds no timings; of the bundle, the files that vLLM loads
BUNDLE_FILES = ("bundle/config.json", "bundle/model.safetensors")


def kill_recoveries(root: Path, kills: int | None = None) -> list[dict[str, Any]]:
    """Run the uninterrupted chain once, then `kills` (default FIGURES_KILLS or 40) interrupted ones. Returns a row each.

    A row: step, after (s), state of the step's folder at the kill, found (by the doctor), recovered, and, if not, why.
    """
    number = int(os.environ.get("FIGURES_KILLS", KILLS)) if kills is None else kills
    chance = random.Random(SEED)  # noqa: S311 -- moments of a test
    whole = root / "runs" / "whole"
    seconds = {name: _step(root, whole, name) for name in NAMES}
    wanted = final_hashes(whole)
    rows = []
    for index in range(number):
        row = _one(root, index, NAMES[index % len(NAMES)], seconds, chance, wanted)
        rows.append(row)
        print(f"F6.3 {index + 1}/{number}: {row}", flush=True)
    return rows


def final_hashes(base: Path) -> dict[str, str]:
    """Return the hashes by which two runs are compared: data, both drafts, and the bundle's files that vLLM loads."""
    found = {name: str(manifest.read_json(base / name / manifest.MANIFEST)["content_hash"]) for name in HASHED}
    return found | {name: manifest.hash_file(base / "bundle" / name) for name in BUNDLE_FILES}


def _one(
    root: Path, index: int, step: str, seconds: dict[str, float], chance: random.Random, wanted: dict[str, str]
) -> dict[str, Any]:
    base = root / "runs" / f"kill-{index:02d}"
    base.mkdir(parents=True)
    for name in NAMES[: NAMES.index(step)]:
        shutil.copytree(root / "runs" / "whole" / name, base / name)
    after = _killed(root, base, step, seconds[step], chance)
    state = sorted(p.name for p in base.iterdir() if p.name.startswith((f"{step}.", f".{step}.")))
    doctor = _eagle(root, "doctor", "--fix")
    for name in NAMES[NAMES.index(step) :]:
        _step(root, base, name)
    again = _eagle(root, "doctor")
    wrong = []
    if doctor.returncode:
        wrong.append(f"doctor --fix left something: {doctor.stdout[-300:]}")
    if again.returncode:
        wrong.append(f"found after the re-run: {again.stdout[-300:]}")
    if final_hashes(base) != wanted:
        wrong.append("other hashes")
    wrong += _open_ends(root)
    row = {"step": step, "after": after, "state": state, "doctor": doctor.stdout.strip().splitlines()[-1], "recovered": not wrong}
    shutil.rmtree(base)
    return row | ({"why": wrong} if wrong else {})


def _killed(root: Path, base: Path, step: str, seconds: float, chance: random.Random) -> float:
    """Start the step and end it by SIGKILL; a step that was faster than the dice is begun anew. Returns the moment (s)."""
    while True:
        moment = chance.uniform(0.0, seconds)
        process = subprocess.Popen(_command(root, "step", step, "--dir", str(base)), cwd=ROOT, start_new_session=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return round(moment, 2)
        shutil.rmtree(base / step, ignore_errors=True)


def _open_ends(root: Path) -> list[str]:
    config = load_config(root)
    store = open_store(config, root)
    running = store.client.search_runs([store.experiment_id], "attributes.status = 'RUNNING'")
    pending = [v.version for v in store.client.search_model_versions() if v.tags.get("eagle.verdict", "pending") == "pending"]
    return [f"run {run.info.run_id} RUNNING" for run in running] + [f"version {version} pending" for version in pending]


def _step(root: Path, base: Path, name: str) -> float:
    began = time.monotonic()
    done = _eagle(root, "step", name, "--dir", str(base))
    if done.returncode:
        sys.exit(f"error: step {name} ended with {done.returncode}: {done.stderr[-1000:]}")
    return time.monotonic() - began


def _eagle(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(root, *arguments), cwd=ROOT, capture_output=True, text=True, check=False)


def _command(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "eagle", "--root", str(root), *arguments]
