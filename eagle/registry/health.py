"""What a killed process left in MLflow: runs RUNNING without an owner, versions that nobody will judge, aliases half moved."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial as bind
from pathlib import Path

from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from eagle.doctor.finding import Finding, under_lock
from eagle.locks import is_held
from eagle.registry import lineage
from eagle.registry.catalog import aliases, all_versions
from eagle.registry.client import Store, by_alias, drop_alias
from eagle.registry.promote import CHALLENGER, CHAMPION, PREVIOUS, READY, moves, previous_of, settle


def store_findings(store: Store, model: str) -> Iterator[Finding]:
    """Yield the findings of the experiment's runs and of the model's versions and aliases.

    A run of another machine, or one that was not started by this product, is left alone: nothing here can tell whether
    its process lives.
    """
    for run in store.client.search_runs([store.experiment_id], "attributes.status = 'RUNNING'"):
        lock = _lock_of(run)
        if lock is not None and not is_held(lock):
            yield Finding(
                "MLflow run RUNNING without a process", f"run {run.info.run_id} ({run.info.run_name})",
                f"nobody holds {lock}, which its process would", "ends it as KILLED",
                bind(_end_run, store, run.info.run_id, lock),
            )  # fmt: skip
    for version in all_versions(store, model):
        yield from _version_findings(store, model, version)
    yield from _alias_findings(store, model)


def _lock_of(run: Run) -> Path | None:
    """Return the lock that the run's process holds for as long as it lives; None when that cannot be told from here."""
    host, _, folder = run.data.tags.get(lineage.PLACE, "").partition(":")
    return Path(folder) / "register.lock" if folder and host == socket.gethostname() else None


def _end_run(store: Store, run_id: str, lock: Path) -> bool:
    end = bind(store.client.set_terminated, run_id, "KILLED")
    if lock.parent.is_dir():
        return under_lock(lock, end)()
    end()  # the run's whole folder was removed, and its lock with it
    return True


def _version_findings(store: Store, model: str, version: ModelVersion) -> Iterator[Finding]:
    number, where = str(version.version), f"{model} version {version.version}"
    if version.status != READY:
        named = aliases(store, model).get(number, ())
        if named:
            yield Finding(
                f"model version is {version.status}, not {READY}", where, f"its alias {', '.join(named)} would point to nothing",
                "cannot: move the alias first (eagle registry rollback), then run the doctor again", None,
            )  # fmt: skip
        else:
            yield Finding(
                f"model version is {version.status}, not {READY}", where, "its files never arrived whole and no alias points to it",
                "deletes the version; its run stays", bind(_delete, store, model, number),
            )  # fmt: skip
    elif version.tags.get(lineage.VERDICT, lineage.PENDING) == lineage.PENDING and not _being_judged(store, version):
        yield Finding(
            "model version without a verdict", where, "the process that would have judged it is gone, and only the gate promotes",
            f"marks it {lineage.ABANDONED} and takes the alias {CHALLENGER} from it", bind(_abandon, store, model, number),
        )  # fmt: skip


def _being_judged(store: Store, version: ModelVersion) -> bool:
    """Return whether a process that may live is at this version: its run is RUNNING and not known to be without an owner."""
    if not version.run_id:
        return False
    try:
        run = store.client.get_run(version.run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    lock = _lock_of(run)
    return run.info.status == "RUNNING" and (lock is None or is_held(lock))


def _delete(store: Store, model: str, number: str) -> bool:
    with store.lock():
        if number in aliases(store, model):
            return False
        store.client.delete_model_version(model, number)
        return True


def _abandon(store: Store, model: str, number: str) -> bool:
    with store.lock():
        now = store.client.get_model_version(model, number)
        if now.tags.get(lineage.VERDICT, lineage.PENDING) != lineage.PENDING:
            return False
        store.client.set_model_version_tag(model, number, lineage.VERDICT, lineage.ABANDONED)
        challenger = by_alias(store, model, CHALLENGER)
        if challenger is not None and str(challenger.version) == number:
            drop_alias(store, model, CHALLENGER)
        return True


def _alias_findings(store: Store, model: str) -> Iterator[Finding]:
    champion, previous = (by_alias(store, model, alias) for alias in (CHAMPION, PREVIOUS))
    history = moves(store, model)
    last, wanted = (history[-1].version if history else None), previous_of(store, model)
    held = None if previous is None else str(previous.version)
    if champion is not None and (str(champion.version) != last or held != wanted):
        yield Finding(
            f"champion is version {champion.version} and previous {held or 'none'}, the history says {last or 'none'} and "
            f"{wanted or 'none'}", model, "champion itself is not moved", "writes the move down and points previous where it says",
            bind(_settle, store, model),
        )  # fmt: skip


def _settle(store: Store, model: str) -> bool:
    settle(store, model)
    return True
