"""The hook of `eagle watch --event`: a change of a draft's status as a Prefect event, for automations to act on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event, Resource
from prefect.settings import get_current_settings

from eagle.errors import PreflightError, StepFailed

PREFIX = "eagle.draft"


def emitter(resource: str, payload: dict[str, Any]) -> Callable[[str, float, dict[str, Any]], None]:
    """Return emit(status, at, details): sends the event `eagle.draft.<status>` about `resource` at Unix time `at`.

    The event is posted, not queued: when emit returns, the server has it. `payload` is in every event. Raises
    PreflightError when no Prefect server is set up (an event to nobody starts nothing); emit raises StepFailed when
    the server does not take the event.
    """
    if not get_current_settings().api.url:
        raise PreflightError("watch: --event needs a Prefect server; set PREFECT_API_URL, for example http://127.0.0.1:4200/api")

    def emit(status: str, at: float, details: dict[str, Any]) -> None:
        event = Event(
            occurred=datetime.fromtimestamp(at, UTC),
            event=f"{PREFIX}.{status}",
            resource=Resource({"prefect.resource.id": resource, "prefect.resource.name": resource.rpartition("/")[2]}),
            payload={**payload, **details},
        )
        try:
            with get_client(sync_client=True) as client:
                client.request("POST", "/events", json=[event.model_dump(mode="json")])
        except httpx.HTTPError as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise StepFailed(f"watch: Prefect did not take the event {event.event} ({why})") from None

    return emit
