"""The figures of operations, small: readers during moves, registrations side by side, and what counts as wrong in each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import operations, operations_kills, operations_overhead, operations_ticks
from benchmarks.figures import ROOT
from benchmarks.operations import read_during_moves, register_side_by_side
from benchmarks.operations_kills import final_hashes, kill_recoveries
from benchmarks.operations_project import fill_inputs, make_project
from eagle.profiles import load_config
from eagle.registry.client import open_store
from eagle.registry.step import model_name
from eagle.steps import run_step
from tests.flows import fakes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project on whose fresh store two processes registered four bundles at once."""
    folder = make_project(tmp_path_factory.mktemp("mein Prøjekt") / "p")
    measured = register_side_by_side(folder, 2, 4)
    assert measured.value == 0, measured.runs
    assert not measured.broken
    assert measured.runs[0]["versions"] == 4
    return folder


def test_readers_see_a_complete_version_during_moves(root: Path) -> None:
    found = read_during_moves(root, 6, 30)
    assert found["moves"] == 6
    assert found["reads"] >= 30
    assert found["incomplete"] == 0
    assert set(found["versions"]) >= {"1", "2"}


def test_an_incomplete_version_is_seen_as_such(root: Path) -> None:
    config = load_config(root)
    version = open_store(config, root).client.get_model_version(model_name(config), "3")
    assert operations._complete(version)
    stored = Path(operations.unquote(operations.urlparse(version.source).path)) / "config.json"
    text = stored.read_text()
    stored.write_text(text + " ")
    assert not operations._complete(version)
    stored.write_text(text)


def test_a_lost_registration_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "fill_inputs", lambda root, name, acceptance: root / "runs" / name)  # those of the fixture
    monkeypatch.setattr(operations, "_register", _nothing)
    config = load_config(root)
    store, model = open_store(config, root), model_name(config)
    store.client.delete_model_version(model, "4")
    measured = register_side_by_side(root, 2, 4)
    assert measured.runs[0]["lost"] == 1
    assert measured.value
    run_step("register", config, root, fill_inputs(root, "again", 1.4))


def _nothing(*_: Any) -> None:
    return None


@pytest.mark.e2e
def test_killed_steps_recover_to_the_same_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself, with instant steps: one killed run of each of the first two."""
    project = fakes.make_project(tmp_path / "p")
    monkeypatch.setattr(operations_kills, "_command", lambda root, *said: [
        sys.executable, "-m", "tests.flows.fakes", "eagle", "--root", str(root), *said
    ])  # fmt: skip
    rows = kill_recoveries(project, 2)
    assert [(row["step"], row["recovered"]) for row in rows] == [("dataset", True), ("distill", True)], rows
    whole = project / "runs" / "whole"
    before = final_hashes(whole)
    (whole / "bundle" / "bundle" / "config.json").write_text("[]")
    assert final_hashes(whole) != before


@pytest.mark.e2e
def test_three_simulated_days_with_an_outage_and_a_failed_run(tmp_path: Path) -> None:
    """In a process of its own: Prefect reads where its API is when it is imported."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.operations_ticks import make_plan, simulate\n"
        "if __name__ == '__main__':\n"
        "    found = simulate(Path(sys.argv[1]), make_plan(3, 1, 1)); print(found.value, found.runs)\n"
        "    row = found.runs[0]\n"
        "    assert found.value == 0 and row['late'] and row['busy'] and row['failed'] == 1 and row['worked'] >= 3, row\n"
    )
    script = tmp_path / "simulate.py"
    script.write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path / "home")}
    command = [sys.executable, str(script), str(tmp_path / "p")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_plan_keeps_outages_and_failed_runs_apart() -> None:
    plan = operations_ticks.make_plan(30, 5, 3)
    assert (plan.hours, len(plan.outages), len(plan.failures), len(plan.data)) == (720, 5, 3, 30)
    assert not any(plan.down(hour) for at in plan.failures for hour in range(at, at + operations_ticks.LONGEST_RUN + 1))
    assert all(plan.acceptance(at + 1) == (at, quality) for at, quality in plan.data.items())


def test_the_expected_champion_is_the_last_that_was_good_enough() -> None:
    assert operations_ticks.expected_champion([], 0.98) is None
    assert operations_ticks.expected_champion([1.6, 1.5, 1.59, 2.0, 1.9], 0.98) == 2.0


def test_the_memory_of_a_tree_counts_its_children() -> None:
    child = "x = bytearray(200 << 20); import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        memory, deadline = operations_overhead.Memory(process.pid), time.monotonic() + 60
        while memory._peak < 200 << 20 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert memory.stop()["all_mib"] >= 200
    finally:
        os.killpg(process.pid, 9)
        process.wait()
