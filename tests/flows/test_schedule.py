"""What is decided before anything runs: late ticks, the deployments of a prefect.yaml, back-off, the next command."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eagle.errors import ConfigError, PreflightError
from flows import definitions, hooks, schedule, server, ticks
from flows.definitions import Definition, read_definitions
from tests.flows.fakes import make_project

ROOT = Path(__file__).parents[2]
DUE = datetime(2026, 11, 29, 2, tzinfo=UTC)


@given(st.floats(0.0, 1e6), st.floats(0.01, 1e5))
def test_a_tick_is_late_only_beyond_the_limit(minutes: float, limit: float) -> None:
    said = ticks.too_late(DUE, DUE + timedelta(minutes=minutes), limit)
    if minutes > limit + 1e-6:
        assert said is not None
        assert said.startswith("late tick, skipped: due 2026-11-29 02:00 UTC")
        assert "flow.max_late_minutes" in said
    elif minutes < limit - 1e-6:
        assert said is None


def test_only_what_a_schedule_started_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ticks.scheduled_run() is None
    assert ticks.lateness(1e-6) is None


def test_the_projects_own_deployments_are_read_and_serve() -> None:
    from prefect.client.schemas.objects import ConcurrencyLimitConfig
    from prefect.events import DeploymentEventTrigger

    from flows import events
    from flows.serving import arguments

    found = {one.name: one for one in read_definitions(ROOT / "prefect.yaml")}
    assert list(found) == ["retrain", "promote", "rollback"]
    made = arguments(found["retrain"])
    assert made["flow"].name == "retrain"
    limit = made["concurrency_limit"]
    assert isinstance(limit, ConcurrencyLimitConfig)
    assert (limit.limit, limit.collision_strategy) == (1, "CANCEL_NEW")
    assert [(s.cron, s.timezone, s.slug) for s in made["schedules"]] == [("0 2 * * 0", "UTC", "weekly")]
    (trigger,) = made["triggers"]
    assert isinstance(trigger, DeploymentEventTrigger)
    assert trigger.expect == {f"{events.PREFIX}.drifting", f"{events.PREFIX}.degraded"}
    assert trigger.match.model_dump() == {"prefect.resource.id": f"{events.PREFIX}/*"}
    assert arguments(found["promote"])["schedules"] is None


def test_the_command_line_moves_what_is_scheduled_only() -> None:
    first, second, _ = read_definitions(ROOT / "prefect.yaml")
    moved = first.moved("0 3 * * *", "Europe/Berlin", "smoke", ["distill.max_minutes=1"])
    assert [(t.cron, t.timezone, t.slug) for t in moved.schedules] == [("0 3 * * *", "Europe/Berlin", "weekly")]
    assert moved.parameters == {"profile": "smoke", "overrides": ["distill.max_minutes=1"]}
    assert second.moved("0 3 * * *", "Europe/Berlin", "smoke", []) == second
    assert first.moved(None, None, None, []) == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedules": [{"crom": "* * * * *"}]}, "schedules.0"),
        ({"schedule": [{"cron": "* * * * *"}]}, "schedule"),
        ({"concurrency_limit": {"limit": 0}}, "concurrency_limit.limit"),
        ({"concurrency_limit": {"collision_strategy": "CANCEL_OLD"}}, "concurrency_limit.collision_strategy"),
        ({"entrypoint": "flows.retrain"}, "entrypoint"),
        ({"parameters": None}, "parameters"),
    ],
)
def test_a_deployment_that_cannot_be_used_is_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    whole = {"name": "retrain", "entrypoint": "flows/retrain.py:retrain"} | change
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [whole]}))
    with pytest.raises(ConfigError) as caught:
        read_definitions(tmp_path / "prefect.yaml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("a: [", "not valid YAML"), ("{}", "no deployments"), ("deployments: []", "no deployments")]
)
def test_a_file_without_deployments_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_definitions(tmp_path / "p.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        read_definitions(tmp_path / "none.yaml")


def scheduled(**changes: Any) -> Definition:
    whole = {"name": "retrain", "entrypoint": "flows/retrain.py:retrain", "schedules": [{"cron": "0 2 * * 0"}]}
    return Definition.model_validate(whole | changes)


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        (scheduled(schedules=[{"cron": "0 2 * * 0", "timezone": "Europe/Berlim"}]), "closest: 'Europe/Berlin'"),
        (scheduled(parameters={"profile": "ful"}), "no profile 'ful'"),
        (scheduled(parameters={"overrides": ["flow.retrys=1"]}), "closest: 'flow.retries'"),
    ],
)
def test_what_would_fail_at_its_hour_fails_now(definition: Definition, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        definitions.check(definition, ROOT)


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        (scheduled(schedules=[{"cron": "61 2 * * 0"}]), "cron"),
        (scheduled(triggers=[{"type": "event", "threshold": "many"}]), "threshold"),
        (scheduled(entrypoint="flows/nowhere.py:retrain"), "no module flows.nowhere"),
        (scheduled(entrypoint="flows/retrain.py:JITTER"), "has no flow 'JITTER'"),
    ],
)
def test_what_prefect_refuses_is_one_line(definition: Definition, words: str) -> None:
    from flows.serving import arguments

    with pytest.raises(ConfigError) as caught:
        arguments(definition)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_taken_port_and_a_bad_request_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    project = make_project(tmp_path / "p")
    monkeypatch.chdir(project)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(server, "_start", lambda *_: pytest.fail("a server was started"))
    assert schedule.main([]) == 2
    assert "prefect.yaml" in capsys.readouterr().err
    asked = ["--file", str(ROOT / "prefect.yaml"), "--profile", "default"]
    assert schedule.main([*asked, "--timezone", "Mars/Base"]) == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert schedule.main([*asked, "--port", str(port)]) == 5
    assert f"port {port} is in use" in capsys.readouterr().err


def test_a_server_that_is_set_up_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    server.start_scheduling_api(tmp_path / "log", 1)()
    assert not (tmp_path / "log").exists()


def test_no_server_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from flows.serving import serve

    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}),
        pytest.raises(PreflightError, match="did not take the deployments"),
    ):
        serve([scheduled()], None)


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ({}, "python -m flows.retrain"),
        ({"profile": "full", "overrides": [], "run_id": None, "force": True}, "python -m flows.retrain --profile full"),
        (
            {"profile": "default", "overrides": ["target.model=my model"], "run_id": "night-1"},
            "python -m flows.retrain --profile default --set 'target.model=my model' --run-id night-1",
        ),
    ],
)
def test_the_next_command_continues_the_run(parameters: dict[str, Any], line: str) -> None:
    assert hooks.command(parameters) == line


def test_retries_wait_longer_each_time() -> None:
    from prefect.tasks import exponential_backoff

    from flows.tasks import bring_up_to_date

    made = bring_up_to_date.with_options(retries=3, retry_delay_seconds=exponential_backoff(10.0), retry_jitter_factor=0.2)
    assert made.retry_delay_seconds == [10.0, 20.0, 40.0]
    assert made.retry_condition_fn is bring_up_to_date.retry_condition_fn
