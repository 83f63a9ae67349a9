"""`python -m flows.schedule` as a user has it: its own server, real ticks, an event, a collision, cancel, crash, failure."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.flows.fakes import make_project

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")]
ROOT = Path(__file__).parents[2]
TERMINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
PATIENCE = 180.0


@dataclass
class Served:
    """A schedule at work: its project, API and process."""

    project: Path
    api: str
    process: subprocess.Popen[bytes]
    log: Path

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        for _ in range(20):  # 503: SQLite is busy; Prefect's own client asks again too
            answer = httpx.request(method, f"{self.api}{path}", json=body, timeout=30)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(0.5)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self) -> str:
        return str(self.ask("GET", "/deployments/name/retrain/retrain")["id"])

    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("POST", "/flow_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})
        return found

    def start(self, **parameters: Any) -> str:
        return str(self.ask("POST", f"/deployments/{self.deployment()}/create_flow_run", {"parameters": parameters})["id"])

    def state(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/flow_runs/{run}")["state"]
        return found

    def ended(self, run: str) -> dict[str, Any]:
        self.wait(lambda: self.state(run)["type"] in TERMINAL)
        return self.state(run)

    def wait(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)
        return found

    def artifacts(self, run: str) -> dict[str, dict[str, Any]]:
        wanted = {"flow_runs": {"id": {"any_": [run]}}}
        return {one["key"]: one for one in self.ask("POST", "/artifacts/filter", wanted)}

    def say(self, **fakes: Any) -> None:
        (self.project / "fake.json").write_text(json.dumps(fakes))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    project = make_project(tmp_path_factory.mktemp("schedule") / "mein Prøjekt")
    # Prefect starts a run up to a second before its time, so that no limit however small makes a punctual one late: the clock does
    (project / "fake.json").write_text(json.dumps({"clock": {"minutes": 90}}))
    (project / "automations.yaml").write_text((ROOT / "automations.yaml").read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PREFECT_RUNNER_POLL_FREQUENCY": "2"}
    command = [sys.executable, "-m", "tests.flows.fakes", "schedule", "--file", str(ROOT / "prefect.yaml"), "--cron", "* * * * *",
               "--profile", "default", "--port", str(port)]  # fmt: skip
    log = project / "schedule.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=project, env=environment, stdout=output, stderr=output, start_new_session=True)
    made = Served(project, f"http://127.0.0.1:{port}/api", process, log)
    try:
        made.wait(lambda: "own server and UI" in log.read_text())
        yield made
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        for one in psutil.wait_procs(family, timeout=40)[1]:
            one.kill()


def test_a_late_tick_is_skipped_and_says_so(served: Served) -> None:
    run = served.wait(lambda: next((r for r in served.runs() if r["auto_scheduled"] and r["state"]["type"] in TERMINAL), None))
    served.ask("POST", f"/deployments/{served.deployment()}/pause_deployment")
    served.say()
    assert (run["state"]["type"], run["state"]["name"]) == ("COMPLETED", "Completed")
    assert run["state"]["message"].startswith("late tick, skipped: due ")
    assert not (served.project / "runs").exists()


def test_drift_starts_a_run_and_one_at_a_time_and_cancel_ends_everything(served: Served, tmp_path: Path) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.events import emitter

    served.wait(lambda: not [r for r in served.runs() if r["state"]["type"] in ("RUNNING", "PENDING")])
    served.say(distill={"spawn": str(tmp_path / "pids"), "sleep": 600})
    before = {run["id"] for run in served.runs()}
    with temporary_settings({PREFECT_API_URL: served.api}):
        emitter("eagle.draft/127.0.0.1:8000", {})("degraded", time.time(), {})
    served.wait((tmp_path / "pids.up").exists)
    (run,) = [r["id"] for r in served.runs() if r["id"] not in before]
    assert served.state(run)["type"] == "RUNNING"

    second = served.ended(served.start())
    assert second["type"] == "CANCELLED"
    assert "concurrency limit" in second["message"]
    assert served.state(run)["type"] == "RUNNING"

    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    asked = time.monotonic()
    served.ask("POST", f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    served.wait(lambda: not any(_alive(pid) for pid in pids), 60.0)
    took = time.monotonic() - asked
    assert served.ended(run)["type"] == "CANCELLED"
    assert took < 60.0, took  # 30 s is the aim; a loaded machine is no failure
    assert (served.project / "runs" / "default" / "dataset").is_dir()
    assert not (served.project / "runs" / "default" / "distill").exists()


def test_a_killed_run_is_crashed_and_leaves_the_next_command(served: Served, tmp_path: Path) -> None:
    served.say(distill={"spawn": str(tmp_path / "pids"), "sleep": 600})
    run = served.start()
    served.wait((tmp_path / "pids.up").exists)
    step = psutil.Process(int((tmp_path / "pids").read_text().split()[0]))
    guard = step.parent()
    assert guard is not None
    victim = guard.parent()
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    assert served.ended(run)["type"] == "CRASHED"
    served.wait(lambda: not step.is_running() or step.status() == psutil.STATUS_ZOMBIE, 60.0)
    left = served.wait(lambda: served.artifacts(run).get("eagle-failure"))
    assert "eagle doctor --fix" in left["data"]
    assert "python -m flows.retrain --profile default" in left["data"]


def test_a_whole_run_shows_its_artifacts_then_nothing_is_new(served: Served) -> None:
    served.say()
    run = served.start()
    assert served.ended(run)["type"] == "COMPLETED"
    found = served.artifacts(run)
    assert set(found) == {f"eagle-{name}" for name in ("progress", "bench", "gate", "steps", "version", "report")}
    assert found["eagle-progress"]["data"] == 100
    assert "tokens/s" in found["eagle-bench"]["data"]
    assert "models:/eagle31-target-model/1" in found["eagle-version"]["data"]
    assert "# A draft" in found["eagle-report"]["data"]
    steps = {row["step"]: row["state"] for row in json.loads(found["eagle-steps"]["data"])}
    assert (steps["dataset"], steps["register"]) == ("up to date", "ran")
    assert {row["name"] for row in json.loads(found["eagle-gate"]["data"])} >= {"acceptance_length", "equal_tokens"}

    again = served.start()
    message = served.ended(again)["message"]
    assert message == "nothing new: dataset, distill, policy, tune, bench, bundle, register up to date"
    assert served.artifacts(again) == {}


def test_a_run_by_hand_at_a_folder_in_use_fails_and_says_so(served: Served) -> None:
    from filelock import FileLock

    with FileLock(served.project / "runs" / "default" / "run.lock"):
        state = served.ended(served.start())
    assert state["type"] == "FAILED"  # started by hand: whoever did wants to know
    assert "is at work" in state["message"]


def test_a_refused_step_fails_once_and_leaves_the_next_command(served: Served) -> None:
    served.say(dataset={"exit": 1})
    run = served.start(run_id="refused", overrides=["runtime.seed=7"])
    state = served.ended(run)
    assert state["type"] == "FAILED"
    assert "the data is no good" in state["message"]
    left = served.wait(lambda: served.artifacts(run).get("eagle-failure"))
    assert "--set runtime.seed=7 --run-id refused" in left["data"]
    served.say()


def test_the_zombie_automation_is_there_once(served: Served) -> None:
    found = served.ask("POST", "/automations/filter", {})
    assert sorted(one["name"] for one in found) == ["eagle-drift", "eagle-zombie-runs"]


def test_sigterm_ends_the_schedule_and_its_server(served: Served) -> None:
    family = psutil.Process(served.process.pid).children(recursive=True)
    assert any("prefect" in " ".join(_command(p)) for p in family)
    before = len(served.log.read_text())
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(90) in (0, 143), served.log.read_text()[-3000:]
    _, alive = psutil.wait_procs(family, timeout=40)
    assert alive == []
    assert "Traceback" not in served.log.read_text()[before:]  # a failed run has one, of Prefect's


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
