"""The doctor finds what a kill -9 leaves, says why mending is safe, mends it, and never touches what a live process holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from click.testing import Result
from filelock import FileLock
from typer.testing import CliRunner

from eagle import manifest
from eagle.cli import app
from eagle.config import Config
from eagle.doctor import examine as examination
from eagle.doctor.examine import examine, mend
from eagle.doctor.folders import base_findings, project_findings
from eagle.doctor.processes import DAY, server_findings, temporary_findings
from eagle.locks import owner_of, this_process
from eagle.profiles import load_config
from eagle.registry.client import create_version, place
from eagle.registry.health import store_findings
from tests.flows.fakes import make_project
from tests.unit.test_registry import MODEL, aliased, registered, runs, store_of


def finished(base: Path, name: str = "distill", content: str = "weights") -> Path:
    folder = base / name
    folder.mkdir(parents=True)
    (folder / "model.bin").write_text(content)
    manifest.write_manifest(folder, name, {"seed": 0})
    return folder


def dead_owner(path: Path) -> None:
    path.write_text(json.dumps(asdict(replace(this_process(), pid=2**22 + 1))))


def half(base: Path) -> None:
    (base / "distill.partial" / "draft").mkdir(parents=True)


def old_and_new(base: Path) -> None:
    finished(base)
    (base / "distill.old").mkdir()


def between_renames(base: Path) -> None:
    finished(base).rename(base / "distill.old")


def work_of_a_finished_step(base: Path) -> None:
    key = manifest.read_json(finished(base) / "manifest.json")["key"]
    (base / "distill.work").mkdir()
    manifest.write_json(base / "distill.work" / "key.json", key)


def without_manifest(base: Path) -> None:
    (finished(base) / "manifest.json").unlink()


def unreadable_manifest(base: Path) -> None:
    (finished(base) / "manifest.json").write_text('{"key": ')


def altered(base: Path) -> None:
    (finished(base) / "model.bin").write_text("wEights")


def file_gone(base: Path) -> None:
    (finished(base) / "model.bin").unlink()


def stale_lock(base: Path) -> None:
    dead_owner(base / "run.lock")


def temporary_file(base: Path) -> None:
    (base / "distill.lock").touch()
    (base / ".distill.provenance.json.ab1_2cde").touch()


def temporary_bench(base: Path) -> None:
    (base / "bench-mixed.lock").touch()
    (base / ".bench-mixed.x0x0x0x0").mkdir()


DAMAGES: dict[Callable[[Path], None], tuple[str, list[str]]] = {
    half: ("half-written output of step distill", ["distill.lock"]),
    old_and_new: ("former output", ["distill", "distill.lock"]),
    between_renames: ("between two renames", ["distill", "distill.lock"]),
    work_of_a_finished_step: ("checkpoints of step distill, which is complete", ["distill", "distill.lock"]),
    without_manifest: ("without a readable manifest.json", ["distill.lock", "distill.set-aside-1"]),
    unreadable_manifest: ("without a readable manifest.json", ["distill.lock", "distill.set-aside-1"]),
    altered: ("not what its manifest says: model.bin", ["distill.lock", "distill.set-aside-1"]),
    file_gone: ("not what its manifest says: model.bin", ["distill.lock", "distill.set-aside-1"]),
    stale_lock: ("stale lock: process", ["run.lock"]),
    temporary_file: ("temporary file of a step", ["distill.lock"]),
    temporary_bench: ("temporary folder of a step", ["bench-mixed.lock"]),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_leftover_is_found_explained_and_mended(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(tmp_path)
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    found = list(base_findings(tmp_path))
    what, after = DAMAGES[damage]
    assert len(found) == 1
    assert what in found[0].what
    assert found[0].safe
    assert found[0].fix
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before, "looking changes nothing"
    assert mend(found) == [True]
    assert sorted(p.name for p in tmp_path.iterdir()) == after
    assert list(base_findings(tmp_path)) == []


@pytest.mark.parametrize("lock", ["distill.lock", "run.lock"])
@pytest.mark.parametrize("damage", [half, old_and_new, between_renames, altered, without_manifest, temporary_file])
def test_nothing_of_a_live_run_is_touched(tmp_path: Path, damage: Callable[[Path], None], lock: str) -> None:
    damage(tmp_path)
    found = list(base_findings(tmp_path))
    with FileLock(tmp_path / lock):
        assert list(base_findings(tmp_path)) == []
        if lock == "distill.lock":  # taken by a run that began after the look
            before = sorted(tmp_path.rglob("*"))
            assert mend(found) == [False] * len(found)
            assert sorted(tmp_path.rglob("*")) == before


def test_a_sound_project_and_checkpoints_to_resume_from_are_no_findings(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p")
    base = root / "runs" / "r"
    finished(base)
    (base / "policy.work").mkdir()
    manifest.write_json(base / "policy.work" / "key.json", "x")
    (base / "notes").mkdir()
    (base / ".notes.20261130").touch()
    (root / "data" / "prompts").mkdir(parents=True)
    assert list(project_findings(load_config(root), root)) == []
    assert not (root / ".state").exists(), "the doctor makes no store"


def test_cache_and_pull_leftovers(tmp_path: Path) -> None:
    cache = tmp_path / ".cache"
    for folder, lock in (("features/ab.partial", "features/ab.lock"), ("bundles/m/.3.pull-abcd_123", "bundles/m/.3.lock")):
        (cache / folder).mkdir(parents=True)
        (cache / lock).touch()
    (cache / "other.partial").mkdir()  # without a lock nobody can tell
    found = list(project_findings(Config(), tmp_path))
    assert {Path(f.where).name for f in found} == {"ab.partial", ".3.pull-abcd_123"}
    assert mend(found) == [True, True]
    assert list(project_findings(Config(), tmp_path)) == []
    assert (cache / "other.partial").is_dir()


def test_temporary_folders_go_only_when_their_process_is_gone(tmp_path: Path) -> None:
    for name, parent in (("dead", 2**22 + 1), ("alive", os.getpid())):
        (tmp_path / f"eagle-vllm-{name}").mkdir()
        manifest.write_json(tmp_path / f"eagle-vllm-{name}" / "job.json", {"parent": parent})
    for name in ("eagle-vllm-fresh", "eagle-prefect-fresh", "eagle-prefect-old", "eagle-prefect-used", "eagle-reproduce-old"):
        (tmp_path / name).mkdir()
    for name in ("eagle-prefect-old", "eagle-prefect-used", "eagle-reproduce-old"):
        os.utime(tmp_path / name, (time.time() - 2 * DAY,) * 2)
    (tmp_path / "eagle-vllm-link").symlink_to(tmp_path / "eagle-vllm-dead")
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "eagle-prefect-used")}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as user:
        found = list(temporary_findings(tmp_path))
        assert {Path(f.where).name for f in found} == {"eagle-vllm-dead", "eagle-prefect-old", "eagle-reproduce-old"}
        assert mend(found) == [True, True, True]
        user.kill()
    assert (tmp_path / "eagle-prefect-used").is_dir()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like the project's temporary Prefect server and has no guard."""
    words = ["prefect", "server", "start", "--no-ui", "--no-late-runs"]
    command = ["-c", "import time; print(1, flush=True); time.sleep(600)", *words]
    environment = {**os.environ, "PREFECT_HOME": str((tmp_path / "prefect").resolve())}
    with subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_server_without_its_guard_is_ended_and_others_are_not(tmp_path: Path, server: subprocess.Popen[bytes]) -> None:
    assert list(server_findings(tmp_path / "elsewhere")) == []
    found = list(server_findings(tmp_path))
    assert [f.where for f in found] == [f"process {server.pid}"]
    assert mend(found) == [True]
    assert not psutil.pid_exists(server.pid)
    assert list(server_findings(tmp_path)) == []


def test_a_server_under_a_guard_is_left(tmp_path: Path, server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    guard = this_guard = psutil.Process()
    monkeypatch.setattr(psutil.Process, "parents", lambda _: [guard])
    monkeypatch.setattr(psutil.Process, "cmdline", _with_guard(psutil.Process.cmdline, this_guard.pid))
    assert list(server_findings(tmp_path)) == []


def _with_guard(real: Callable[[psutil.Process], list[str]], pid: int) -> Callable[[psutil.Process], list[str]]:
    return lambda process: ["python", "/x/flows/guard.py", "5"] if process.pid == pid else real(process)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a champion and a rejected version."""
    folder = make_project(tmp_path_factory.mktemp("mein Prøjekt") / "p")
    registered(folder, acceptance=2.0)
    registered(folder, acceptance=1.5)
    return folder


def doctor(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--root", str(root), "doctor", *arguments])


@pytest.fixture
def only_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other sessions left in this machine's temporary folder is not this test's."""
    monkeypatch.setattr(examination, "temporary_findings", lambda: [])


def test_mlflow_leftovers_are_found_and_mended_and_a_live_run_is_left(root: Path, only_project: None) -> None:
    store = store_of(root)
    base = root / "runs" / "r"
    mine = {"eagle.place": place(base.resolve())}
    left = store.client.create_run(store.experiment_id, tags=mine).info.run_id
    gone = store.client.create_run(store.experiment_id, tags={"eagle.place": place(root / "runs" / "removed")}).info.run_id
    other = store.client.create_run(store.experiment_id, tags={"eagle.place": "elsewhere:/runs"}).info.run_id
    foreign = store.client.create_run(store.experiment_id).info.run_id
    pending = create_version(store, MODEL, (root / "x").as_uri(), left, {"eagle.verdict": "pending"})
    store.client.set_registered_model_alias(MODEL, "challenger", pending)
    judged_elsewhere = create_version(store, MODEL, (root / "x").as_uri(), other, {"eagle.verdict": "pending"})
    store.client.set_registered_model_alias(MODEL, "previous", "2")
    with FileLock(base / "register.lock"):
        where = [f.where.removeprefix("run ").partition(" ")[0] for f in store_findings(store, MODEL)]
        assert where == [gone, MODEL], "not the run whose lock is held, nor the version that it may judge yet"
    done = doctor(root)
    assert done.exit_code == 1
    assert "4 found, 0 mended, 4 left" in done.stdout
    assert all(word in done.stdout for word in (left, gone, f"{MODEL} version {pending}", "previous 2"))
    assert runs(store)[left] == "RUNNING"
    done = doctor(root, "--fix")
    assert (done.exit_code, "4 found, 4 mended, 0 left" in done.stdout) == (0, True), done.stdout
    status = runs(store)
    assert [status[run] for run in (left, gone, other, foreign)] == ["KILLED", "KILLED", "RUNNING", "RUNNING"]
    assert store.client.get_model_version(MODEL, pending).tags["eagle.verdict"] == "abandoned"
    assert store.client.get_model_version(MODEL, judged_elsewhere).tags["eagle.verdict"] == "pending"
    assert aliased(store, "champion", "challenger", "previous") == ["1", None, None]
    assert doctor(root).stdout == "nothing found\n"


def test_a_version_that_is_not_ready_goes_unless_an_alias_holds_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle.registry import health

    store = store_of(root)
    made = create_version(store, MODEL, (root / "x").as_uri(), "", {"eagle.verdict": "rejected"})
    real = health.all_versions

    def unready(*arguments: object) -> list[object]:
        found = real(*arguments)  # type: ignore[arg-type]
        for version in found:
            if str(version.version) in ("1", made):
                version._status = "PENDING_REGISTRATION"
        return found  # type: ignore[return-value]

    monkeypatch.setattr(health, "all_versions", unready)
    found = {f.where: f for f in store_findings(store, MODEL)}
    assert found[f"{MODEL} version 1"].mend is None
    assert "rollback" in found[f"{MODEL} version 1"].fix
    assert mend([found[f"{MODEL} version {made}"]]) == [True]
    assert f"{MODEL} version {made}" not in {f.where for f in store_findings(store, MODEL)}


def test_a_step_killed_by_sigkill_is_mended_and_runs_to_the_same_result(tmp_path: Path, only_project: None) -> None:
    root = make_project(tmp_path / "p")
    base = root / "runs" / "r"
    command = [sys.executable, "-m", "tests.flows.fakes", "eagle", "--root", str(root), "step", "dataset", "--dir", str(base)]
    environment = {**os.environ, "EAGLE_FAKE": json.dumps({"dataset": {"kill_once": str(root / "marker")}})}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    owner = owner_of(base / "dataset.lock")
    assert owner is not None
    assert not owner.alive
    assert {Path(f.where).name for f in examine(load_config(root), root)} == {"dataset.partial", "dataset.lock"}
    assert doctor(root, "--fix").exit_code == 0
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert doctor(root).stdout == "nothing found\n"
    assert (base / "dataset" / "manifest.json").is_file()


def test_a_store_that_cannot_be_used_is_a_finding(root: Path, only_project: None) -> None:
    done = CliRunner().invoke(app, ["--root", str(root), "--set", "register.tracking_uri=nonsense://x", "doctor", "--fix"])
    assert done.exit_code == 1
    assert "cannot be examined" in done.stdout
