"""A registered bundle on this disk: `models:/NAME@ALIAS` or `models:/NAME/VERSION`, fetched once and checked by hash."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from mlflow.entities.model_registry import ModelVersion

from eagle import manifest
from eagle.errors import ConfigError, StepFailed
from eagle.registry.client import Store, by_alias, fetch_version
from eagle.registry.promote import CHAMPION, get_version

SCHEME = "models:/"
_ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


@dataclass(frozen=True)
class Pulled:
    """A bundle folder and the model version that it is."""

    folder: Path
    model: str
    version: str


def champion_address(model: str) -> str:
    """Return the address of a model's champion."""
    return f"{SCHEME}{model}@{CHAMPION}"


def pull(store: Store, address: str, cache: Path) -> Pulled:
    """Return the bundle at `address` below `cache`/bundles, fetched if it is not there; one copy for each content.

    A copy that is there is hashed again, and replaced when it was changed. Raises ConfigError for an address that means
    nothing or names no version, StepFailed when the fetched files are not those that were registered.
    """
    version = _find(store, address)
    wanted = version.tags.get("eagle.bundle")
    if not wanted:
        raise ConfigError(f"{address}: version {version.version} was not registered by this pipeline; give the bundle's folder")
    folder = cache / "bundles" / wanted[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder.is_dir() and _content(folder) == wanted):
            _fetch(store, version, folder, wanted)
    return Pulled(folder, str(version.name), str(version.version))


def _find(store: Store, address: str) -> ModelVersion:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ConfigError(f"'{address}' is no model address; write models:/NAME@champion or models:/NAME/3")
    if match["version"]:
        return get_version(store, match["name"], match["version"])
    found = by_alias(store, match["name"], match["alias"])
    if found is None:
        raise ConfigError(
            f"registry: no model '{match['name']}' with alias '{match['alias']}' in {store.uri}; "
            "`eagle registry history` lists what there is, `make run` makes one"
        )
    return found


def _content(folder: Path) -> str:
    """The hash that the register step kept of a bundle's files."""
    return manifest.hash_json(sorted((f["path"], f["sha256"]) for f in manifest.list_files(folder)))


def _fetch(store: Store, version: ModelVersion, folder: Path, wanted: str) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        fetched = fetch_version(store, version, partial)
        if _content(fetched) != wanted:
            raise StepFailed(
                f"registry: the files of {version.name} version {version.version} are not those that were registered; "
                "register the bundle again, or serve another version"
            )
        shutil.rmtree(folder, ignore_errors=True)
        fetched.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
