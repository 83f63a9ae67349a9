"""Registered drafts by their address, `models:/NAME@ALIAS` or `models:/NAME/VERSION`: found, fetched, verified."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion

from eagle.config import Config
from eagle.errors import ConfigError, closest
from eagle.registry import lineage
from eagle.registry.client import Store, by_alias, model_names, open_store
from eagle.registry.promote import CHAMPION, get_version
from eagle.registry.pull import pull

_ADDRESS = re.compile(r"models:/(?P<model>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>[0-9]{1,9}))")


def model_hash(uri: str, config: Config, root: Path) -> str:
    """Return the hash of the bundle that `uri` points to, as it was recorded at registration. Raises as `fetch_model` does."""
    return _recorded(uri, find_version(uri, open_store(config, root)))


def fetch_model(uri: str, config: Config, root: Path, into: Path) -> Path:
    """Download the bundle that `uri` points to into the folder `into` (made anew) and return where it lies.

    Raises ConfigError for a malformed address, a model, alias or version that is not there, or one that this product did
    not register; BundleError when the files are not those that were registered, else as `eagle.registry.pull.pull`.
    """
    store = open_store(config, root)
    version = find_version(uri, store)
    _recorded(uri, version)
    shutil.rmtree(into, ignore_errors=True)
    pull(store, version, into)
    return into


@dataclass(frozen=True)
class Pulled:
    """A bundle folder and the model version that it is."""

    folder: Path
    model: str
    version: str


def champion_address(model: str) -> str:
    """Return the address of a model's champion."""
    return f"models:/{model}@{CHAMPION}"


def cached(store: Store, uri: str, cache: Path) -> Pulled:
    """Return the bundle at `uri` below `cache`/bundles, fetched if it is not there; one copy for each content.

    A copy that is there is hashed again, and replaced when it was changed. Raises as `fetch_model`.
    """
    version = find_version(uri, store)
    folder = cache / "bundles" / _recorded(uri, version)[:16]
    pull(store, version, folder, replace=True)
    return Pulled(folder, str(version.name), str(version.version))


def find_version(uri: str, store: Store) -> ModelVersion:
    """Return the version at `uri`. ConfigError for a malformed address, and where no such model, alias or version is."""
    parts = _ADDRESS.fullmatch(uri)
    if parts is None:
        raise ConfigError(f"'{uri}' is no address of a registered model; give models:/NAME@champion or models:/NAME/3")
    if parts["version"]:
        return get_version(store, parts["model"], parts["version"])
    found = by_alias(store, parts["model"], parts["alias"])
    if found is None:
        raise ConfigError(f"registry: nothing at {uri}: {_missing(store, parts['model'], parts['alias'])}")
    return found


def _missing(store: Store, model: str, alias: str) -> str:
    """Say what is not there, and what is."""
    known = model_names(store)
    if model not in known:
        there = f"models here: {', '.join(known)}" if known else "the registry is empty: make run registers a draft"
        return f"no model '{model}'{closest(model, known)}; {there}"
    aliases = sorted(store.client.get_registered_model(model).aliases)
    there = f"aliases: {', '.join(aliases)}" if aliases else "no version has one"
    make = "; to make one: eagle registry promote VERSION --why '...'" if alias == CHAMPION else ""
    return f"'{model}' has no alias '{alias}'{closest(alias, aliases)}; {there}{make}"


def _recorded(uri: str, version: ModelVersion) -> str:
    found: str | None = version.tags.get(lineage.BUNDLE)
    if found is None:
        raise ConfigError(f"registry: {uri} was not registered by this product: its files cannot be verified")
    return found
