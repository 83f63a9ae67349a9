"""One line of a request log to the prompt that it asked: OpenAI's bodies, bare or in the wrappers that loggers put round.

Accepted bodies: chat completions (`messages`), completions (`prompt`, a text), responses (`input`, a text or messages;
`instructions`). Accepted wrappers: an object that holds the body, or its JSON text, under one of `WRAPPERS`, up to three
deep: {"request": {...}, "time": ...}, {"body": "{...}"}, OpenAI's batch files ({"custom_id", "url", "body"}).
The user and the time are looked for in the wrappers and the body under `USER_KEYS` and `TIME_KEYS`.

Of a conversation the system message and the first user message are used: the answers are made anew, and every request
of a conversation repeats its beginning, which duplicates then fold into one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from eagle.dataset.readers import BadRow

WRAPPERS = ("request", "body", "request_body", "requestBody", "payload", "data", "params", "json", "input")
USER_KEYS = ("user", "user_id", "userId", "end_user", "safety_identifier")
TIME_KEYS = (
    "time", "timestamp", "@timestamp", "ts", "datetime", "created_at", "created", "start_time", "startTime", "request_time",
)  # fmt: skip
BODIES = ("messages", "prompt", "input")
_DEPTH = 3
_SECONDS_UNTIL = 1e11  # larger numbers are milli-, micro- or nanoseconds


@dataclass(frozen=True)
class LoggedRequest:
    """What a log line asked: messages in front of the answer, who asked (all names found), when (Unix seconds, or None)."""

    system: str | None
    user: str
    users: tuple[str, ...]
    time: float | None


def parse_line(line: bytes) -> LoggedRequest:
    """Return the request of a line. BadRow with the reason when it holds none that a prompt can be made of."""
    try:
        content = json.loads(line.decode("utf-8"))  # of bytes it would guess UTF-16, line by line, and garble them
    except RecursionError:
        raise BadRow("invalid JSON: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadRow(f"invalid UTF-8: byte {error.start + 1} of the line") from None
    except ValueError as error:
        raise BadRow(f"invalid JSON: {getattr(error, 'msg', 'unreadable number')}") from None
    layers = list(_layers(content))
    system, user = _prompt(layers[-1])
    return LoggedRequest(system, user, _users(layers), _time(layers))


def _layers(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the wrappers from the outside in, the body last."""
    for _ in range(_DEPTH + 1):
        if not isinstance(content, dict):
            raise BadRow(f"not an object: {type(content).__name__}")
        yield content
        if any(key in content and not isinstance(content[key], dict) for key in BODIES):
            return
        key = next((k for k in WRAPPERS if content.get(k)), None)
        if key is None:
            raise BadRow(f"no request: none of {', '.join(BODIES)} is a key, here or under {', '.join(WRAPPERS)}")
        content = content[key]
        if isinstance(content, str):
            try:
                content = json.loads(content)
            except (ValueError, RecursionError):
                raise BadRow(f"invalid JSON: the text under {key}") from None
    raise BadRow(f"no request: wrapped more than {_DEPTH} deep")


def _prompt(body: dict[str, Any]) -> tuple[str | None, str]:
    if "messages" in body:
        return _first_turn(body["messages"], None)
    if isinstance(body.get("input"), str | list):
        system = _text(body["instructions"], "instructions") if body.get("instructions") is not None else None
        return (system, body["input"]) if isinstance(body["input"], str) else _first_turn(body["input"], system)
    if not isinstance(body.get("prompt"), str):
        raise BadRow(f"non-string content: prompt is {type(body.get('prompt')).__name__}")
    return None, body["prompt"]


def _first_turn(messages: Any, system: str | None) -> tuple[str | None, str]:
    if not isinstance(messages, list):
        raise BadRow(f"not a list of messages: {type(messages).__name__}")
    for at, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow(f"bad message: message {at} is not an object")
        role = message.get("role")
        if role in ("system", "developer"):
            text = _text(message.get("content"), f"content of message {at}")
            system = text if system is None else f"{system}\n\n{text}"
        elif role == "user":
            return system or None, _text(message.get("content"), f"content of message {at}")
        else:
            raise BadRow(f"starts with another role: message {at} is neither system's nor the user's")
    raise BadRow("no user message")


def _text(value: Any, what: str) -> str:
    if isinstance(value, list) and value:
        kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
        if not all(kind in ("text", "input_text") for kind in kinds):
            raise BadRow(f"not only text: {what} has images, sound, files or parts of no known type")
        value = "".join(part["text"] if isinstance(part.get("text"), str) else "" for part in value)
    if not isinstance(value, str):
        raise BadRow(f"non-string content: {what} is {'missing' if value is None else type(value).__name__}")
    return value


def _users(layers: list[dict[str, Any]]) -> tuple[str, ...]:
    places = [*layers, *(found for layer in layers if isinstance(found := layer.get("metadata"), dict))]
    named = (place[key] for place in places for key in USER_KEYS if key in place)
    return tuple(dict.fromkeys(str(user) for user in named if isinstance(user, str | int) and str(user)))


def _time(layers: list[dict[str, Any]]) -> float | None:
    """Return the first time that can be read: a number since 1970 (seconds to nanoseconds), or ISO 8601 (UTC without a zone)."""
    for layer in layers:
        for key in TIME_KEYS:
            if (found := _instant(layer.get(key))) is not None:
                return found
    return None


def _instant(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                moment = datetime.fromisoformat(value.strip())
            except ValueError:
                return None
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e20:
        return None
    while value >= _SECONDS_UNTIL:
        value /= 1000
    return float(value)
