"""The settings and the data that a version was made with, kept whole with its MLflow run (params are cut there and are text)."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from eagle.errors import ConfigError
from eagle.registry import lineage
from eagle.registry.client import Store
from eagle.steps import StepContext

FILE = "settings.json"
OUTSIDE = ("dataset", "distill")  # the steps that read files from outside the pipeline


@dataclass(frozen=True)
class Recorded:
    """What is recorded of a version. commit: git's hash, None = made outside a work tree; dirty: with uncommitted changes.

    config: all settings as JSON, in the form of that commit. outside: {step: {what: hash}} of target, prompts, replayed
    data and warm start. inputs: {step: content hash}; files: {path in the bundle: sha256}; packages: {name: version}.
    """

    model: str
    version: str
    commit: str | None
    dirty: bool
    config: dict[str, Any]
    outside: dict[str, dict[str, str]]
    inputs: dict[str, str]
    files: dict[str, str]
    packages: dict[str, str]


def log_settings(store: Store, run_id: str, context: StepContext) -> None:
    """Keep the whole configuration, and the hashes of what the steps read from outside, as settings.json of the run."""
    outside = {name: lineage.read_manifest(context.inputs[name])["parts"].get("extra", {}) for name in OUTSIDE}
    config = context.config.model_dump(mode="json", by_alias=True)
    store.client.log_dict(run_id, {"config": config, "outside": outside}, FILE)


def recorded(store: Store, version: ModelVersion) -> Recorded:
    """Return what is recorded of a version. ConfigError when its settings were not kept: it is older, or of another product."""
    tags, name = version.tags, f"{version.name} version {version.version}"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            uri = f"runs:/{version.run_id}/{FILE}"
            path = Path(download_artifacts(artifact_uri=uri, dst_path=scratch, tracking_uri=store.uri))
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (MlflowException, OSError, ValueError):
            raise ConfigError(f"registry: {name} has no {FILE} in its run: it was registered without; register it again") from None
    return Recorded(
        model=str(version.name), version=str(version.version), commit=tags.get(lineage.GIT),
        dirty=tags.get(lineage.GIT_DIRTY) == "true", config=settings["config"], outside=settings["outside"],
        inputs=json.loads(tags.get(lineage.INPUTS, "{}")), files=json.loads(tags.get(lineage.FILES, "{}")),
        packages=json.loads(tags.get(lineage.VERSIONS, "{}")),
    )  # fmt: skip
