"""Alias moves and their history. Every move of `champion` happens under the registry's lock and is written down.

MLflow keeps no history of aliases, so each move is one tag of the registered model, `eagle.move.000001` and on,
holding JSON. What the gate said of a version is kept as tags of that version. The alias `previous` follows each move:
it is the version that `rollback` would make champion, and is absent when there is none.
"""

from __future__ import annotations

import getpass
import json
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from eagle import manifest
from eagle.config import GateConfig
from eagle.errors import ConfigError, GateRejected, StepFailed
from eagle.registry.client import Store, by_alias, drop_alias, set_alias
from eagle.registry.gate import Candidate, Verdict, evaluate
from eagle.registry.lineage import CANDIDATE, DECIDED, REASONS, VERDICT

CHAMPION = "champion"
CHALLENGER = "challenger"
PREVIOUS = "previous"
READY = "READY"
MOVE = "eagle.move."


@dataclass(frozen=True)
class Move:
    """One move of the alias `champion`: from `previous` (None for the first) to `version`, when, why and by whom."""

    version: str
    previous: str | None
    kind: Literal["gate", "manual", "forced", "rollback", "outside"]
    why: str
    at: str
    by: str = ""


@dataclass(frozen=True)
class Decision:
    """What the gate said of one version."""

    version: str
    verdict: str
    reasons: list[dict[str, Any]]
    previous: str | None
    at: str
    run_id: str


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def author() -> str:
    """Return `user@host` of this process; the user's number where it has no name (containers)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


class ChampionMoved(StepFailed):
    """Another process moved the alias `champion` while a candidate was being compared with its former holder."""


@dataclass(frozen=True)
class Champion:
    """The champion that a candidate is compared with; `figures` None when its bundle does not fit the present target."""

    version: str
    figures: Candidate | None


def recorded_candidate(version: ModelVersion) -> Candidate:
    """Return the figures recorded with a version when it was registered; StepFailed when it was not registered by this product."""
    text = version.tags.get(CANDIDATE)
    if text is None:
        raise StepFailed(
            f"registry: {version.name} version {version.version} is champion but was not registered by this product, so there is "
            "nothing to compare with; remove its alias or set register.model_name"
        )
    return Candidate.from_dict(json.loads(text))


def decide(store: Store, model: str, version: str, candidate: Candidate, gate: GateConfig, against: Champion | None) -> Verdict:
    """Judge `version` against the champion, record the verdict on it, and move `champion` to it when it passed.

    Raises ChampionMoved when the champion is not (or no longer) `against`, BusyError when the registry stays locked.
    """
    with store.lock():
        champion = by_alias(store, model, CHAMPION)
        previous = None if champion is None else str(champion.version)
        if previous != (against.version if against else None):
            raise ChampionMoved(f"registry: version {previous} of {model} became champion meanwhile; run: eagle step register")
        verdict = evaluate(candidate, against.figures if against else None, gate)
        record = {
            VERDICT: verdict.word,
            REASONS: manifest.canonical([asdict(reason) for reason in verdict.reasons]),
            "eagle.previous_champion": previous or "",
            DECIDED: now(),
        }
        for key, value in record.items():
            store.client.set_model_version_tag(model, version, key, value)
        if verdict.passed:
            why = "; ".join(reason.line() for reason in verdict.reasons)
            _move(store, model, Move(version, previous, "gate", why, now(), author()))
    return verdict


def promote(store: Store, model: str, version: str, *, why: str = "", force: bool = False) -> Move:
    """Move `champion` to `version` by hand. One that the gate rejected or never judged needs `force` and `why`; both are kept.

    Raises ConfigError when there is no such version, it is champion already or a forced move has no `why`, GateRejected
    when it did not pass and `force` is off, StepFailed when its upload never ended (status not READY).
    """
    with store.lock():
        target = get_version(store, model, version)
        verdict = target.tags.get(VERDICT, "none")
        if verdict != "passed" and not force:
            raise GateRejected(
                f"registry: {model} version {version} has the verdict '{verdict}'; its reasons: eagle registry show {version}; "
                "to promote it all the same: --force --why '...'"
            )
        if verdict != "passed" and not why.strip():
            raise ConfigError(f"registry: version {version} has the verdict '{verdict}': a forced promotion needs --why '...'")
        if target.status != READY:
            raise StepFailed(f"registry: {model} version {version} is {target.status}, not {READY}; run: eagle doctor --fix")
        champion = by_alias(store, model, CHAMPION)
        previous = None if champion is None else str(champion.version)
        if previous == version:
            raise ConfigError(f"registry: {model} version {version} is champion already")
        return _move(store, model, Move(version, previous, "manual" if verdict == "passed" else "forced", why, now(), author()))


def rollback(store: Store, model: str, *, why: str = "") -> Move:
    """Move `champion` back to the version before it; again and again goes further back. No files move.

    Raises StepFailed when there is no earlier champion, or it was deleted.
    """
    with store.lock():
        stack = champion_stack(_settled_moves(store, model))
        if len(stack) < 2:
            raise StepFailed(f"registry: {model} has no earlier champion to go back to")
        get_version(store, model, stack[-2])
        return _move(store, model, Move(stack[-2], stack[-1], "rollback", why, now(), author()))


def champion_stack(history: list[Move]) -> list[str]:
    """Return the versions that `rollback` would go through, the present champion last."""
    stack: list[str] = []
    for move in history:
        if move.kind == "rollback":
            stack.pop()
        else:
            stack.append(move.version)
    return stack


def get_version(store: Store, model: str, version: str) -> ModelVersion:
    """Return a model version; ConfigError when the model or the version does not exist."""
    try:
        return store.client.get_model_version(model, version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ConfigError(f"registry: no version '{version}' of model '{model}'; `eagle registry list` lists them") from None


def moves(store: Store, model: str) -> list[Move]:
    """Return the moves of `champion`, oldest first; empty when the model does not exist."""
    try:
        tags = store.client.get_registered_model(model).tags
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return []
        raise
    return [Move(**json.loads(tags[key])) for key in sorted(tags) if key.startswith(MOVE)]


def decisions(store: Store, model: str) -> list[Decision]:
    """Return what the gate said of every version of `model`, oldest first."""
    found = []
    for version in store.client.search_model_versions(f"name = '{model}'", max_results=1000):
        tags = version.tags
        found.append(
            Decision(
                str(version.version), tags.get(VERDICT, "none"), json.loads(tags.get(REASONS, "[]")),
                tags.get("eagle.previous_champion") or None, tags.get(DECIDED, ""), version.run_id or "",
            )
        )
    return sorted(found, key=lambda decision: int(decision.version))


def _settled_moves(store: Store, model: str) -> list[Move]:
    """Return the moves after writing down one that was made elsewhere (MLflow's UI, or a crash just before the record)."""
    history = moves(store, model)
    champion = by_alias(store, model, CHAMPION)
    last = history[-1].version if history else None
    if champion is not None and str(champion.version) != last:
        found = Move(str(champion.version), last, "outside", "found at the next move", now())
        history.append(_record(store, model, history, found))
    return history


def _record(store: Store, model: str, history: list[Move], move: Move) -> Move:
    store.client.set_registered_model_tag(model, f"{MOVE}{len(history) + 1:06d}", manifest.canonical(asdict(move)))
    return move


def _move(store: Store, model: str, move: Move) -> Move:
    history = _settled_moves(store, model)
    set_alias(store, model, CHAMPION, move.version)
    _record(store, model, history, move)
    _point_previous(store, model, champion_stack([*history, move]))
    return move


def _point_previous(store: Store, model: str, stack: list[str]) -> None:
    if len(stack) > 1:
        set_alias(store, model, PREVIOUS, stack[-2])
    else:
        drop_alias(store, model, PREVIOUS)


def previous_of(store: Store, model: str) -> str | None:
    """Return the version that the recorded moves make `previous`, whatever the alias says."""
    stack = champion_stack(moves(store, model))
    return stack[-2] if len(stack) > 1 else None


def settle(store: Store, model: str) -> None:
    """Write down a move made elsewhere and point `previous` where the moves say, as after a crash within a move."""
    with store.lock():
        _point_previous(store, model, champion_stack(_settled_moves(store, model)))
