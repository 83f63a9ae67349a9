"""MLflow behind plain functions: the store, runs that always end, verified uploads, model versions and aliases.

Only `MlflowClient` is used, never MLflow's fluent global state, so an MLFLOW_RUN_ID or an active run in the caller's
process changes nothing. Owns where the store lies and what a run's end state is; knows nothing of gates.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from eagle import manifest
from eagle.config import Config
from eagle.errors import BusyError, PreflightError, StepFailed
from eagle.locks import holder, owned_lock
from eagle.registry.lineage import ABANDONED, DATASET, KEY, PENDING, PLACE, VERDICT
from eagle.signals import sigterm_raises

BATCH = 100
PARAM_LENGTH = 6000
DIGEST_LENGTH = 36
LOCK_SECONDS = 120.0
BUNDLE = "bundle"


@dataclass(frozen=True)
class Store:
    """An open MLflow store: its client, address, the experiment's id and the lock file beside the local state."""

    client: MlflowClient
    uri: str
    experiment_id: str
    lock_path: Path

    @contextmanager
    def lock(self, timeout: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the registry's file lock: MLflow aliases have no compare-and-set. BusyError after `timeout` seconds."""
        try:
            with owned_lock(self.lock_path, timeout):
                yield
        except Timeout:
            raise BusyError(f"registry: {holder(self.lock_path)} holds {self.lock_path}; wait for it or stop it") from None


def open_store(config: Config, root: Path) -> Store:
    """Open (and on first use create) the tracking store and the experiment.

    The default is SQLite and an artifact folder under `paths.state`, both by absolute path; `register.tracking_uri`
    names another store. Raises PreflightError when the store cannot be reached or written, StepFailed when the
    experiment was deleted.
    """
    state = root / config.paths.state
    uri = _store_uri(config.register_.tracking_uri, state, root)
    artifacts = None if uri.startswith(("http://", "https://", "databricks")) else (state / "mlartifacts").resolve().as_uri()
    try:
        state.mkdir(parents=True, exist_ok=True)
        with FileLock(state / "mlflow.migrate.lock", timeout=LOCK_SECONDS):  # two first uses would migrate one database at once
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            experiment_id = _experiment(client, config.register_.experiment, artifacts)
    except Timeout:
        raise BusyError(f"registry: another process has been setting up {state} for {LOCK_SECONDS:.0f} s; stop it") from None
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise PreflightError(f"register.tracking_uri: cannot use {uri}: {_first_line(error)}") from error
    return Store(client, uri, experiment_id, state / "registry.lock")


def _store_uri(configured: str | None, state: Path, root: Path) -> str:
    if configured is None:
        _require_writable(state)
        return f"sqlite:///{(state / 'mlflow.db').resolve()}"
    if configured.startswith("sqlite:///"):  # a relative file belongs to the project, not to the working directory
        path = root / configured.removeprefix("sqlite:///")
        _require_writable(path.parent)
        return f"sqlite:///{path.resolve()}"
    return configured


def _require_writable(folder: Path) -> None:
    try:  # MLflow itself retries an unwritable SQLite file for minutes
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"registry: cannot make {folder}: {error.strerror}; set paths.state to another folder") from None
    if not os.access(folder, os.W_OK):
        raise PreflightError(f"registry: {folder} is not writable; set paths.state to another folder")


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
    if found.lifecycle_stage == "deleted":
        raise StepFailed(
            f"register.experiment: '{name}' was deleted in MLflow; run: mlflow experiments restore "
            f"--experiment-id {found.experiment_id}, or choose another name"
        )
    return str(found.experiment_id)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def place(folder: Path) -> str:
    """Return `host:folder`, which names the place that a run was started from."""
    return f"{socket.gethostname()}:{folder}"


@contextmanager
def tracked_run(store: Store, name: str, tags: dict[str, str]) -> Iterator[str]:
    """Open an MLflow run and yield its id; it ends FINISHED, FAILED on an exception, KILLED on a signal or an exit."""
    run_id: str = store.client.create_run(store.experiment_id, tags=tags, run_name=name).info.run_id
    try:
        with sigterm_raises():
            yield run_id
    except BaseException as error:
        store.client.set_terminated(run_id, "FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    store.client.set_terminated(run_id, "FINISHED")


def close_stale_runs(store: Store, key: str, at: str) -> list[str]:
    """End as KILLED the runs that a `kill -9` left RUNNING. Returns their ids.

    They are those of the same step key, or from the same place (`place`): the caller holds the step's lock there,
    so no live process can own them. Versions that such a run had registered without a verdict are marked abandoned.
    """
    stale: set[str] = set()
    for tag, value in ((KEY, key), (PLACE, at)):
        quoted = value.replace("'", "''")
        query = f"tags.`{tag}` = '{quoted}' and attributes.status = 'RUNNING'"
        stale.update(run.info.run_id for run in store.client.search_runs([store.experiment_id], query))
    for run_id in sorted(stale):
        store.client.set_terminated(run_id, "KILLED")
        for version in store.client.search_model_versions(f"run_id = '{run_id}'"):
            if version.tags.get(VERDICT) == PENDING:
                store.client.set_model_version_tag(version.name, str(version.version), VERDICT, ABANDONED)
    return sorted(stale)


def log_params(store: Store, run_id: str, values: dict[str, Any]) -> None:
    """Log a nested dict as dotted params; values longer than MLflow's limit are cut."""
    params = [Param(key, str(value)[:PARAM_LENGTH]) for key, value in flatten(values).items()]
    for start in range(0, len(params), BATCH):
        store.client.log_batch(run_id, params=params[start : start + BATCH])


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"a.b": value}` for a nested dict; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def log_metrics(store: Store, run_id: str, values: dict[str, Any], prefix: str = "") -> None:
    """Log the finite numbers of a nested dict as `prefix.a.b`; lists become `prefix.a.0`, `.1`, ...; other values are left out."""
    metrics = []
    for key, value in flatten(values).items():
        many = {f"{key}.{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {key: value}
        metrics += [(name, float(v)) for name, v in many.items() if _is_number(v)]
    now = int(time.time() * 1000)
    _log_metrics(store, run_id, [Metric(_metric_name(prefix + name), value, now, 0) for name, value in metrics])


def log_curves(store: Store, run_id: str, rows: list[dict[str, Any]], prefix: str) -> None:
    """Log rows such as `{"step": 10, "loss": 3.1}` as metric histories `prefix.loss`; a row without a step takes its index."""
    now = int(time.time() * 1000)
    metrics = [
        Metric(_metric_name(f"{prefix}.{name}"), float(value), now, int(row.get("step", index)))
        for index, row in enumerate(rows)
        for name, value in flatten(row).items()
        if name != "step" and _is_number(value)
    ]
    _log_metrics(store, run_id, metrics)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _metric_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


def _log_metrics(store: Store, run_id: str, metrics: list[Metric]) -> None:
    for start in range(0, len(metrics), BATCH):
        store.client.log_batch(run_id, metrics=metrics[start : start + BATCH])


def log_dataset(store: Store, run_id: str, folder: Path, content_hash: str) -> None:
    """Record the dataset as the run's input; MLflow holds 36 characters of a digest, the tag holds the whole hash."""
    dataset = Dataset("dataset", content_hash[:DIGEST_LENGTH], "local", manifest.canonical({"uri": folder.resolve().as_uri()}))
    store.client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
    store.client.log_batch(run_id, tags=[RunTag(DATASET, content_hash)])


def upload_bundle(store: Store, run_id: str, folder: Path, mlmodel: Path, expected: dict[str, str], scratch: Path) -> str:
    """Upload a bundle folder, with its MLmodel file, and return its artifact URI once what comes back is byte for byte `expected`.

    expected: {path below the folder: sha256}. The files are fetched again into `scratch` (removed after) and hashed.
    Raises StepFailed, naming the file, when one is missing, extra or altered.
    """
    store.client.log_artifact(run_id, str(mlmodel), BUNDLE)
    store.client.log_artifacts(run_id, str(folder), BUNDLE)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        fetched = Path(download_artifacts(artifact_uri=f"runs:/{run_id}/{BUNDLE}", dst_path=str(scratch), tracking_uri=store.uri))
        found = {f["path"]: f["sha256"] for f in manifest.list_files(fetched)}
    except (MlflowException, OSError) as error:
        raise StepFailed(f"registry: the uploaded bundle cannot be read back: {_first_line(error)}; run the step again") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            what = "missing" if name not in found else "not part of the bundle" if name not in expected else "altered"
            raise StepFailed(f"registry: upload of the bundle failed: {name} is {what} in the artifact store; run the step again")
    return f"{store.client.get_run(run_id).info.artifact_uri}/{BUNDLE}"


def fetch_version(store: Store, version: ModelVersion, into: Path) -> Path:
    """Download the files of a model version into the folder `into` (made) and return where they lie.

    By the version's own address: a `models:/` one is looked up in MLflow's global registry, whatever the arguments say.
    """
    into.mkdir(parents=True, exist_ok=True)
    uri = store.client.get_model_version_download_uri(version.name, str(version.version))
    try:
        return Path(download_artifacts(artifact_uri=uri, dst_path=str(into), tracking_uri=store.uri))
    except (MlflowException, OSError) as error:
        raise StepFailed(f"registry: cannot fetch {version.name} version {version.version}: {uri}: {_first_line(error)}") from error


def create_version(store: Store, model: str, source: str, run_id: str, tags: dict[str, str]) -> str:
    """Register `source` as the next version of `model` (made on first use) and return the version's number as text."""
    try:
        store.client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return str(store.client.create_model_version(model, source, run_id, tags=tags).version)


def model_names(store: Store) -> list[str]:
    """Return the names of the registered models, at most 100, in order."""
    return sorted(model.name for model in store.client.search_registered_models(max_results=100))


def by_alias(store: Store, model: str, alias: str) -> ModelVersion | None:
    """Return the version that `alias` points to, or None when the model or the alias does not exist."""
    try:
        return store.client.get_model_version_by_alias(model, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def set_alias(store: Store, model: str, alias: str, version: str) -> None:
    """Point `alias` at `version` and read it back; StepFailed when another writer was faster."""
    store.client.set_registered_model_alias(model, alias, version)
    now = by_alias(store, model, alias)
    if now is None or str(now.version) != version:
        raise StepFailed(f"registry: alias '{alias}' of {model} points to version {now and now.version}, not {version}; run again")


def drop_alias(store: Store, model: str, alias: str) -> None:
    """Remove `alias` if it is there, and read that back; StepFailed when another writer set it meanwhile."""
    if by_alias(store, model, alias) is None:
        return
    store.client.delete_registered_model_alias(model, alias)
    if by_alias(store, model, alias) is not None:
        raise StepFailed(f"registry: alias '{alias}' of {model} was set again by another writer; run again")
