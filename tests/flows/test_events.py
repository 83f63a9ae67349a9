"""The hook of `eagle watch --event` against a real Prefect server: the event is there when the hook returns."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from eagle.errors import PreflightError, StepFailed


def events_of(api: str, name: str) -> list[dict[str, Any]]:
    answer = httpx.post(f"{api}/events/filter", json={"filter": {"event": {"name": [name]}}}, timeout=30)
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["events"]
    return found


def test_a_change_becomes_an_event(api: str) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.events import emitter

    with temporary_settings({PREFECT_API_URL: api}):
        emit = emitter("eagle.draft/127.0.0.1:8000", {"url": "http://127.0.0.1:8000/metrics"})
        emit("degraded", time.time(), {"acceptance_length": 1.2})
        deadline = time.monotonic() + 60  # stored by the server's own queue
        while not (found := events_of(api, "eagle.draft.degraded")) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert len(found) == 1
    assert found[0]["resource"]["prefect.resource.id"] == "eagle.draft/127.0.0.1:8000"
    assert found[0]["payload"] == {"url": "http://127.0.0.1:8000/metrics", "acceptance_length": 1.2}


def test_a_server_that_is_gone_is_one_line() -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from flows.events import emitter

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
        emit = emitter("eagle.draft/x", {})
        with pytest.raises(StepFailed, match="^watch: Prefect did not take the event eagle.draft.drifting"):
            emit("drifting", time.time(), {})


def test_no_server_at_all_is_refused() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.events import emitter

    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(PreflightError, match="PREFECT_API_URL"):
        emitter("eagle.draft/x", {})
