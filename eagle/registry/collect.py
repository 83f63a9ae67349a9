"""Garbage: versions that the gate rejected or that were never judged to the end, once they are old enough or many enough."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from eagle.errors import ConfigError, StepFailed
from eagle.registry.catalog import Entry, all_versions, entries
from eagle.registry.client import BUNDLE, Store
from eagle.registry.lineage import ABANDONED
from eagle.registry.promote import champion_stack, moves

COLLECTED = ("rejected", ABANDONED)


def garbage(store: Store, model: str, older_than: int | None, keep: int | None, at: datetime | None = None) -> list[Entry]:
    """Return the rejected and abandoned versions to delete, oldest first.

    Those created more than `older_than` days before `at` (default now), and those beyond the last `keep` of them. Never
    one that has an alias or that a rollback could make champion again. ConfigError when both limits are None.
    """
    if older_than is None and keep is None:
        raise ConfigError("registry gc: nothing says what is old: give --older-than DAYS, --keep N or both")
    reachable = set(champion_stack(moves(store, model)))
    rejected = [entry for entry in entries(store, model) if entry.verdict in COLLECTED]
    beyond = set[str]() if keep is None else {entry.version for entry in rejected[: max(len(rejected) - keep, 0)]}
    limit = None if older_than is None else (at or datetime.now(UTC)) - timedelta(days=older_than)
    return [
        entry
        for entry in rejected
        if not entry.aliases
        and entry.version not in reachable
        and (entry.version in beyond or (limit is not None and entry.created < limit))
    ]


def collect(store: Store, model: str, older_than: int | None, keep: int | None, at: datetime | None = None) -> list[Entry]:
    """Delete the `garbage` and its files, under the registry's lock; figures and evidence stay in the MLflow runs.

    Returns what was deleted. A version goes before its files, so none ever points to files that are gone.
    """
    with store.lock():
        doomed = garbage(store, model, older_than, keep, at)
        sources = {str(version.version): str(version.source) for version in all_versions(store, model)}
        for entry in doomed:
            source = sources.pop(entry.version)
            store.client.delete_model_version(model, entry.version)
            if source in sources.values() or not _uploaded(store, entry.run_id, source):
                continue
            try:
                get_artifact_repository(source, tracking_uri=store.uri).delete_artifacts()
            except (MlflowException, OSError, NotImplementedError) as error:
                raise StepFailed(
                    f"registry gc: version {entry.version} is deleted, its files at {source} are not: {error}; remove them by hand"
                ) from error
        return doomed


def _uploaded(store: Store, run_id: str, source: str) -> bool:
    """Return whether the files are the ones that the register step uploaded to this run: others are not ours to delete."""
    try:
        run = store.client.get_run(run_id)
    except MlflowException:
        return False
    return source == f"{run.info.artifact_uri}/{BUNDLE}"
