"""Fetching a registered draft: one copy, checked by hash, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from filelock import Timeout
from mlflow.entities.model_registry import ModelVersion

from eagle import manifest
from eagle.errors import BundleError, BusyError, ConfigError, StepFailed
from eagle.locks import holder, owned_lock
from eagle.registry import lineage
from eagle.registry.client import Store, fetch_version
from eagle.registry.mlmodel import FILE

LOCK_SECONDS = 600.0
TEMPORARY = ".pull-"


def pull(store: Store, version: ModelVersion, destination: Path, *, replace: bool = False) -> bool:
    """Bring the files of a version to `destination`. Returns False when they were there already, True when fetched.

    They are fetched beside it, hashed, and renamed, so `destination` is complete or not there. Raises BundleError when
    a fetched file is not the registered one, ConfigError when `destination` holds something else (with `replace` that is
    removed once the right files are there), StepFailed when the
    version records no hashes or cannot be fetched, BusyError when another process fetches to the same place.
    """
    name = f"{version.name} version {version.version}"
    destination.parent.mkdir(parents=True, exist_ok=True)
    lock = destination.with_name(f".{destination.name}.lock")
    try:
        with owned_lock(lock, LOCK_SECONDS):
            if destination.exists():
                wrong = _wrong_file(destination, version)
                if wrong and not replace:
                    raise ConfigError(f"registry pull: {destination} is not {name} ({wrong}); remove it or give another --to")
                if not wrong:
                    return False
            scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}{TEMPORARY}", dir=destination.parent))
            try:
                fetched = fetch_version(store, version, scratch / "files")
                wrong = _wrong_file(fetched, version)
                if wrong:
                    raise BundleError(
                        f"registry pull: {name} is damaged in the artifact store ({wrong}); nothing was written; "
                        "promote or pull another version: eagle registry list"
                    )
                _settle_on_disk(fetched)
                shutil.rmtree(destination, ignore_errors=True)
                fetched.rename(destination)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            return True
    except Timeout:
        raise BusyError(f"registry pull: {holder(lock)} fetches to {destination}; wait for it or give another --to") from None


def _wrong_file(folder: Path, version: ModelVersion) -> str | None:
    """Return what of `folder` is not as registered, in words, or None."""
    if not folder.is_dir():
        return "not a folder"
    found = {f["path"]: f["sha256"] for f in manifest.list_files(folder)}
    recorded = version.tags.get(lineage.FILES)
    if recorded is None:  # registered before every file's hash was kept: one hash over the draft's own
        bundle = version.tags.get(lineage.BUNDLE)
        if bundle is None:
            raise StepFailed(f"registry pull: version {version.version} records no hashes; it was not registered by this product")
        own = sorted((path, digest) for path, digest in found.items() if path != FILE)
        return None if manifest.hash_json(own) == bundle else "its files have another hash than was registered"
    wanted: dict[str, str] = json.loads(recorded)
    for path in sorted(wanted.keys() | found.keys()):
        if path not in found:
            return f"{path} is missing"
        if path not in wanted:
            return f"{path} is not part of it"
        if found[path] != wanted[path]:
            return f"{path} is altered"
    return None


def _settle_on_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
