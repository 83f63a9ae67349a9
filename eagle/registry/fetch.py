"""Registered drafts by their address, `models:/NAME@ALIAS` or `models:/NAME/VERSION`: found, fetched, verified."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion

from eagle import manifest
from eagle.config import Config
from eagle.errors import ConfigError, StepFailed
from eagle.registry.client import Store, by_alias, fetch_version, open_store
from eagle.registry.promote import get_version

_ADDRESS = re.compile(r"models:/(?P<model>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


def model_hash(uri: str, config: Config, root: Path) -> str:
    """Return the hash of the bundle that `uri` points to, as it was recorded at registration. Raises as `fetch_model` does."""
    return _recorded(uri, _find(uri, open_store(config, root)))


def fetch_model(uri: str, config: Config, root: Path, into: Path) -> Path:
    """Download the bundle that `uri` points to into the folder `into` (made anew) and return where it lies.

    Raises ConfigError for a malformed address, a model, alias or version that is not there, or one that this product did
    not register; StepFailed when the files cannot be fetched or are not those that were registered.
    """
    store = open_store(config, root)
    version = _find(uri, store)
    wanted = _recorded(uri, version)
    shutil.rmtree(into, ignore_errors=True)
    folder = fetch_version(store, version, into)
    found = {entry["path"]: entry["sha256"] for entry in manifest.list_files(folder)}
    if manifest.hash_json(sorted(found.items())) != wanted:
        raise StepFailed(f"registry: the files of {uri} are not those that were registered; nothing of them was loaded")
    return folder


def _find(uri: str, store: Store) -> ModelVersion:
    parts = _ADDRESS.fullmatch(uri)
    if parts is None:
        raise ConfigError(f"'{uri}' is no address of a registered model; give models:/NAME@champion or models:/NAME/3")
    if parts["version"]:
        return get_version(store, parts["model"], parts["version"])
    found = by_alias(store, parts["model"], parts["alias"])
    if found is None:
        raise ConfigError(f"registry: nothing at {uri}: no such model, or no version has that alias; see: eagle registry history")
    return found


def _recorded(uri: str, version: ModelVersion) -> str:
    found: str | None = version.tags.get("eagle.bundle")
    if found is None:
        raise ConfigError(f"registry: {uri} was not registered by this product: its files cannot be verified")
    return found
