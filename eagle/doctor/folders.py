"""Step folders, temporary folders and lock files below a project: what is there that no live process will finish.

A step's lock is the truth: whoever works at a folder holds it, and the kernel frees it when he dies.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import partial as bind
from pathlib import Path

from eagle import manifest
from eagle.config import Config
from eagle.doctor.finding import Finding, under_lock
from eagle.locks import clear_dead_owner, is_held, owner_of
from eagle.steps import OPTIONAL_STEPS, STEPS, WORK_KEY

RUN_LOCK = "run.lock"
ASIDE = ".set-aside-"
NAMES = (*STEPS, *OPTIONAL_STEPS)
# `.NAME.provenance.json.xxxxxxxx`, `.NAME.xxxxxxxx`, `.NAME.pull-xxxxxxxx`: what tempfile makes beside NAME
_TEMPORARY = re.compile(r"\.(?P<name>.+?)(\.provenance\.json)?\.(pull-)?(?!\d{8}$)[a-z0-9_]{8}")


def project_findings(config: Config, root: Path) -> Iterator[Finding]:
    """Yield the findings of all runs, of DVC's outputs, of the cache and of the state folder."""
    runs, cache, state = (root / place for place in (config.paths.runs, config.paths.cache, config.paths.state))
    for base in (*sorted(p for p in _children(runs) if p.is_dir()), root / "data"):
        yield from base_findings(base)
    for folder in (cache, *sorted(p for p in cache.glob("**/") if p != cache and not _inside_model(p, cache))):
        yield from _partial_folders(folder)
        yield from _temporary(folder, "fetch or conversion")
        yield from _dead_names(folder)
    yield from _dead_names(state)


def base_findings(base: Path) -> Iterator[Finding]:
    """Yield the findings of one folder of step outputs; none while a flow is at work in it."""
    if is_held(base / RUN_LOCK):
        return
    for name in NAMES:
        lock = base / f"{name}.lock"
        if is_held(lock):
            continue
        yield from _step_leftovers(base, name, lock)
        yield from _step_folder(base / name, lock)
    yield from _temporary(base, "step")
    yield from _dead_names(base)


def _step_leftovers(base: Path, name: str, lock: Path) -> Iterator[Finding]:
    final, half, old, work = base / name, base / f"{name}.partial", base / f"{name}.old", base / f"{name}.work"
    if half.is_dir():
        yield Finding(
            f"half-written output of step {name}", str(half),
            "nobody holds the step's lock, and an output counts only after its rename", "removes it; the next run writes it anew",
            under_lock(lock, bind(_remove, half)),
        )  # fmt: skip
    if old.is_dir() and final.exists():
        yield Finding(
            f"former output of step {name}, replaced already", str(old), "the new output stands beside it",
            "removes it", under_lock(lock, bind(_remove, old)),
        )  # fmt: skip
    elif old.is_dir():
        yield Finding(
            f"output of step {name}, caught between two renames", str(old), "it is complete and nothing took its place",
            f"gives it its name {name} back", under_lock(lock, bind(_give_back, old, final)),
        )  # fmt: skip
    made = manifest.read_manifest(final)
    if work.is_dir() and made is not None and _key_of(work) == made["key"]:
        yield Finding(
            f"checkpoints of step {name}, which is complete", str(work), "the finished output was made from the same key",
            "removes them", under_lock(lock, bind(_remove, work)),
        )  # fmt: skip


def _step_folder(folder: Path, lock: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        return
    made = manifest.read_manifest(folder)
    why = "no step reads it any more, and it is kept beside"
    if made is None:
        yield Finding(
            f"output of step {folder.name} without a readable {manifest.MANIFEST}", str(folder), why,
            f"renames it to {folder.name}{ASIDE}N; the next run makes it anew", under_lock(lock, bind(_set_aside, folder)),
        )  # fmt: skip
        return
    wrong = manifest.altered_file(folder, made)
    if wrong:
        yield Finding(
            f"output of step {folder.name} is not what its manifest says: {wrong}", str(folder), why,
            f"renames it to {folder.name}{ASIDE}N; the next run makes it anew", under_lock(lock, bind(_set_aside, folder)),
        )  # fmt: skip


def _partial_folders(folder: Path) -> Iterator[Finding]:
    for half in sorted(folder.glob("*.partial")):
        lock = half.with_suffix(".lock")
        if half.is_dir() and lock.is_file() and not is_held(lock):
            yield Finding(
                "half-written cache folder", str(half), "nobody holds its lock, and it counts only after its rename",
                "removes it; it is made again when needed", under_lock(lock, bind(_remove, half)),
            )  # fmt: skip


def _temporary(folder: Path, of: str) -> Iterator[Finding]:
    for path in sorted(_children(folder)):
        found = _TEMPORARY.fullmatch(path.name)
        if found is None:
            continue
        locks = [folder / f"{found['name']}.lock", folder / f".{found['name']}.lock"]
        known = [lock for lock in locks if lock.is_file()]
        if known and not any(map(is_held, known)):
            yield Finding(
                f"temporary {'folder' if path.is_dir() else 'file'} of a {of} that was killed", str(path),
                f"nobody holds {known[0].name}", "removes it", under_lock(known[0], bind(_remove, path)),
            )  # fmt: skip


def _dead_names(folder: Path) -> Iterator[Finding]:
    for path in sorted(folder.glob("*.lock")) + sorted(folder.glob(".*.lock")):
        owner = owner_of(path)
        if owner is not None and not is_held(path):
            yield Finding(
                f"stale lock: {owner} is gone", str(path), "the kernel freed the lock when its owner died",
                "takes the dead owner's name out", bind(clear_dead_owner, path),
            )  # fmt: skip


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _inside_model(folder: Path, cache: Path) -> bool:
    """Hub snapshots and converted models are many small folders that hold nothing of ours."""
    chain = [folder, *folder.parents]
    below = chain[: chain.index(cache)]
    return cache / "hub" in below or any((place / "config.json").is_file() for place in below)


def _key_of(work: Path) -> object:
    try:
        return manifest.read_json(work / WORK_KEY)
    except (OSError, ValueError):
        return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _give_back(old: Path, final: Path) -> None:
    if not final.exists():
        old.rename(final)


def _set_aside(folder: Path) -> None:
    number = 1
    while (place := folder.with_name(f"{folder.name}{ASIDE}{number}")).exists():
        number += 1
    folder.rename(place)
