"""dvc.yaml mirrors the table of steps; prefect.yaml names flows and parameters that exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint

from eagle.config import Config
from eagle.steps import STEPS

ROOT = Path(__file__).parents[2]
DVC = yaml.safe_load((ROOT / "dvc.yaml").read_text())
KUBERNETES = ROOT / "deploy" / "kubernetes"
FILES = (ROOT / "prefect.yaml", KUBERNETES / "prefect.yaml")
DEPLOYMENTS = [one for file in FILES for one in yaml.safe_load(file.read_text())["deployments"]]
STAGES = [name for name in STEPS if name != "register"]


def test_the_stages_are_the_steps_but_register() -> None:
    assert list(DVC["stages"]) == STAGES
    assert DVC["metrics"] == [f"data/{name}/metrics.json" for name in STAGES]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_mirrors_its_step(name: str) -> None:
    stage, step = DVC["stages"][name], STEPS[name]
    assert stage["cmd"] == f"eagle step {name} --dir data"
    inputs = [f"data/{other}" for other in step.inputs]
    assert sorted(stage["deps"]) == sorted([*inputs, *step.code, *(["data/prompts"] if step.reads_prompts else [])])
    assert stage["params"] == ["runtime.seed", *step.sections]
    assert stage["outs"] == [f"data/{name}"]


def test_params_yaml_holds_every_key_that_a_stage_reads() -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    dumped = Config.model_validate(params).model_dump(mode="json", by_alias=True)
    for section in ("runtime", *{key.partition(".")[0] for stage in DVC["stages"].values() for key in stage["params"]}):
        assert sorted(params[section]) == sorted(dumped[section]), section


def test_outputs_and_what_lies_beside_them_are_not_for_git() -> None:
    for name in STAGES:
        for end in ("/manifest.json", ".work/key.json", ".lock", ".provenance.json"):
            path = f"data/{name}{end}"
            asked = subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False)
            if asked.returncode == 128:
                pytest.skip("not in a git work tree")
            assert asked.returncode == 0, path


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=[d["name"] for d in DEPLOYMENTS])
def test_a_deployment_names_a_flow_with_its_parameters(deployment: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    assert isinstance(flow, Flow)
    assert set(deployment["parameters"]) <= set(flow.parameters.properties)
    if "profile" in deployment["parameters"]:
        profile = deployment["parameters"]["profile"]
        assert profile == "default" or (ROOT / "profiles" / f"{profile}.yaml").is_file()
    for schedule in deployment.get("schedules", []):
        made = CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
        DeploymentScheduleCreate(schedule=made, slug=schedule["slug"])
    if "concurrency_limit" in deployment:
        assert ConcurrencyLimitConfig(**deployment["concurrency_limit"]).collision_strategy == "CANCEL_NEW"


def test_retraining_is_scheduled_without_overlap() -> None:
    for one in (d for d in DEPLOYMENTS if d["entrypoint"] == "flows/retrain.py:retrain"):
        assert one["concurrency_limit"]["limit"] == 1
        assert len(one["schedules"]) == 1


def test_dvc_finds_its_own_lock_file() -> None:
    patterns = (ROOT / ".dvcignore").read_text(encoding="utf-8").splitlines()
    assert "*.lock" not in patterns, "it would hide dvc.lock, and every stage would be checked out again"
    assert "__pycache__" in patterns
