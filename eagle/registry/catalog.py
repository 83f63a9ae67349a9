"""What the registry holds, as plain data: a list of versions, all that is known of one, the differences of two."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from eagle.errors import ConfigError, closest
from eagle.registry import lineage
from eagle.registry.client import Store, by_alias
from eagle.registry.promote import get_version

PAGE = 200
LINEAGE = (lineage.TARGET, lineage.DATASET, lineage.BUNDLE, lineage.GIT, lineage.GIT_DIRTY, lineage.VLLM)
FIGURES = ("bench.", "bundle.", "policy.", "distill.", "dataset.")


@dataclass(frozen=True)
class Entry:
    """One version. acceptance_length: tokens per target step, bonus included; speedup: by batch (`b1`); created: UTC."""

    version: str
    aliases: tuple[str, ...]
    verdict: str
    status: str
    acceptance_length: float | None
    speedup: dict[str, float]
    created: datetime
    run_id: str


@dataclass(frozen=True)
class Difference:
    """One thing that two versions do not share; `kind` is setting, input, lineage or figure; None = not there."""

    kind: str
    name: str
    one: Any
    other: Any


def aliases(store: Store, model: str) -> dict[str, tuple[str, ...]]:
    """Return {version: its aliases}; empty when the model does not exist. (MLflow's searches come back without them.)"""
    try:
        found = store.client.get_registered_model(model).aliases
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return {}
        raise
    grouped: dict[str, list[str]] = {}
    for alias, version in sorted(found.items()):
        grouped.setdefault(str(version), []).append(alias)
    return {version: tuple(names) for version, names in grouped.items()}


def all_versions(store: Store, model: str) -> list[ModelVersion]:
    """Return every version of `model`, oldest first, however many there are."""
    found: list[ModelVersion] = []
    quoted, token = model.replace("'", "''"), None
    while True:
        page = store.client.search_model_versions(f"name = '{quoted}'", max_results=PAGE, page_token=token)
        found += page
        token = page.token
        if not token:
            return sorted(found, key=lambda version: int(version.version))


def entries(store: Store, model: str) -> list[Entry]:
    """Return every version with its aliases, oldest first."""
    named = aliases(store, model)
    return [_entry(version, named.get(str(version.version), ())) for version in all_versions(store, model)]


def _entry(version: ModelVersion, named: tuple[str, ...]) -> Entry:
    tags = version.tags
    acceptance = tags.get(lineage.ACCEPTANCE) or json.loads(tags.get(lineage.CANDIDATE, "{}")).get("acceptance_length")
    return Entry(
        version=str(version.version),
        aliases=named,
        verdict=tags.get(lineage.VERDICT, "none"),
        status=str(version.status),
        acceptance_length=None if acceptance is None else float(acceptance),
        speedup=json.loads(tags.get(lineage.SPEEDUP, "{}")),
        created=datetime.fromtimestamp((version.creation_timestamp or 0) / 1000, UTC),
        run_id=version.run_id or "",
    )


def find(store: Store, model: str, name: str) -> ModelVersion:
    """Return the version with that number or alias. ConfigError, with the closest valid name, when there is none."""
    if name.isdecimal():
        return get_version(store, model, name)
    found = by_alias(store, model, name.removeprefix("@"))
    if found is not None:
        return get_version(store, model, str(found.version))
    known = sorted({alias for names in aliases(store, model).values() for alias in names})
    raise ConfigError(
        f"registry: no version or alias '{name}' of {model}{closest(name, known)}; aliases: {', '.join(known) or 'none'}; "
        "versions: eagle registry list"
    )


def describe(store: Store, model: str, version: ModelVersion) -> dict[str, Any]:
    """Return all that is recorded of a version, as JSON: lineage, the gate's reasons, figures, files with hashes, the run."""
    number, tags = str(version.version), version.tags
    entry = _entry(version, aliases(store, model).get(number, ()))
    return {
        "model": model,
        "version": number,
        "aliases": list(entry.aliases),
        "status": entry.status,
        "created": entry.created.isoformat(timespec="seconds"),
        "verdict": entry.verdict,
        "decided": tags.get(lineage.DECIDED),
        "previous_champion": tags.get("eagle.previous_champion") or None,
        "reasons": json.loads(tags.get(lineage.REASONS, "[]")),
        "acceptance_length": entry.acceptance_length,
        "speedup": entry.speedup,
        "lineage": {name.removeprefix("eagle."): tags[name] for name in LINEAGE if name in tags},
        "inputs": json.loads(tags.get(lineage.INPUTS, "{}")),
        "packages": json.loads(tags.get(lineage.VERSIONS, "{}")),
        "files": json.loads(tags.get(lineage.FILES, "{}")),
        "source": version.source,
        "run_id": entry.run_id,
    }


def differences(store: Store, model: str, one: ModelVersion, other: ModelVersion) -> list[Difference]:
    """Return what the two versions do not share: lineage, input digests, settings, and the last value of each figure."""
    first, second = (describe(store, model, version) for version in (one, other))
    first_run, second_run = (_run(store, version) for version in (one, other))
    figures = [
        {name: value for name, value in run["metrics"].items() if name.startswith(FIGURES)} for run in (first_run, second_run)
    ]
    return [
        *_unequal("lineage", first["lineage"] | first["packages"], second["lineage"] | second["packages"]),
        *_unequal("input", first["inputs"], second["inputs"]),
        *_unequal("setting", first_run["params"], second_run["params"]),
        *_unequal("figure", figures[0], figures[1]),
    ]


def _run(store: Store, version: ModelVersion) -> dict[str, dict[str, Any]]:
    """Return the params and metrics of a version's run; empty when it has none or the run was deleted for good."""
    empty: dict[str, dict[str, Any]] = {"params": {}, "metrics": {}}
    if not version.run_id:
        return empty
    try:
        data = store.client.get_run(version.run_id).data
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return empty
        raise
    return {"params": data.params, "metrics": data.metrics}


def _unequal(kind: str, one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    names = sorted(one.keys() | other.keys())
    return [Difference(kind, name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]
