"""Prefect's own commands take the files that ship: both prefect.yaml, the Kubernetes job template, the automations."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"


def prefect(api: str, *arguments: str) -> str:
    environment = {**os.environ, "PREFECT_API_URL": api, "COLUMNS": "200", "DO_NOT_TRACK": "1"}
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def ask(api: str, method: str, path: str, body: Any = None) -> Any:
    answer = httpx.request(method, f"{api}{path}", json=body, timeout=30)
    answer.raise_for_status()
    return answer.json()


def test_the_work_pools_take_the_deployments(api: str) -> None:
    prefect(api, "work-pool", "create", "eagle", "--type", "process")
    prefect(api, "deploy", "--all")
    template = str(KUBERNETES / "job-template.json")
    prefect(api, "work-pool", "create", "eagle-kubernetes", "--type", "kubernetes", "--base-job-template", template)
    prefect(api, "deploy", "--all", "--prefect-file", str(KUBERNETES / "prefect.yaml"))
    found = {f"{one['work_pool_name']}/{one['name']}": one for one in ask(api, "POST", "/deployments/filter", {})}
    assert set(found) == {"eagle/retrain", "eagle/promote", "eagle/rollback", "eagle-kubernetes/retrain-kubernetes"}
    for name in ("eagle/retrain", "eagle-kubernetes/retrain-kubernetes"):
        one = found[name]
        assert (one["global_concurrency_limit"]["limit"], one["concurrency_options"]["collision_strategy"]) == (1, "CANCEL_NEW")
        assert [(s["schedule"]["cron"], s["schedule"]["timezone"]) for s in one["schedules"]] == [("0 2 * * 0", "UTC")]
    kubernetes = found["eagle-kubernetes/retrain-kubernetes"]
    assert kubernetes["job_variables"]["claim"] == "eagle-data"
    assert kubernetes["pull_steps"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "/eagle"}}]
    names = sorted(one["name"] for one in ask(api, "POST", "/automations/filter", {}))
    assert names == ["eagle-drift", "eagle-drift-kubernetes"]


def test_a_run_without_heartbeats_is_crashed_by_the_automation(api: str, tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "automations.yaml").read_text())
    (zombie,) = content["automations"]
    assert zombie["trigger"]["within"] == 540
    zombie["trigger"]["within"] = 10
    (tmp_path / "automations.yaml").write_text(yaml.safe_dump(content))
    prefect(api, "automation", "create", "--from-file", str(tmp_path / "automations.yaml"))
    flow = ask(api, "POST", "/flows/", {"name": "retrain"})["id"]
    other = ask(api, "POST", "/flows/", {"name": "another"})["id"]
    runs = {}
    for name, owner in (("retrain", flow), ("another", other)):
        run = ask(api, "POST", "/flow_runs/", {"flow_id": owner, "state": {"type": "RUNNING"}})["id"]
        related = [{"prefect.resource.id": f"prefect.flow.{owner}", "prefect.resource.role": "flow", "prefect.resource.name": name}]
        resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        _send(api, {"event": "prefect.flow-run.heartbeat", "resource": resource, "related": related})
        runs[name] = run
    deadline = time.monotonic() + 120
    while ask(api, "GET", f"/flow_runs/{runs['retrain']}")["state"]["type"] != "CRASHED":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert "eagle doctor --fix" in ask(api, "GET", f"/flow_runs/{runs['retrain']}")["state"]["message"]
    assert ask(api, "GET", f"/flow_runs/{runs['another']}")["state"]["type"] == "RUNNING"


def _send(api: str, event: dict[str, Any]) -> None:
    from prefect.events.schemas.events import Event
    from prefect.types._datetime import now

    whole = Event.model_validate(event | {"occurred": now("UTC")}).model_dump(mode="json")
    httpx.post(f"{api}/events", json=[whole], timeout=30).raise_for_status()
