"""The figures of operations. Here: F6.3, F6.5 and F6.6, recovery from kill -9, promotion under readers, registrations side by side.

F6.1 and F6.2 are in operations_overhead, F6.4 in operations_clones, F6.7 in operations_ticks. All of them work in
build/figures-operations, on a project of their own with a tiny random target; no training of note.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from benchmarks import operations_clones, operations_overhead, operations_ticks
from benchmarks.figures import ROOT, Figure, Measured
from benchmarks.operations_kills import kill_recoveries
from benchmarks.operations_project import WORK, fill_inputs, make_project
from eagle import manifest
from eagle.profiles import load_config
from eagle.registry import lineage
from eagle.registry.catalog import all_versions
from eagle.registry.client import by_alias, open_store
from eagle.registry.promote import CHAMPION, moves, promote
from eagle.registry.step import model_name
from eagle.steps import run_step

MOVES, READS, COMMANDS = 100, 1000, 5
PROCESSES, REGISTRATIONS = 4, 20
PATIENCE = 1800.0


def promotion() -> Measured:
    """F6.5: seconds of the promote and rollback commands, the slowest of five each; every concurrent read must be complete."""
    root = make_project(WORK / "promotion")
    config = load_config(root)
    for number, acceptance in enumerate((1.6, 1.8)):
        run_step("register", config, root, fill_inputs(root, f"r{number}", acceptance))
    seconds = {"promote": _timed(root, "promote", "1"), "rollback": _timed(root, "rollback")}
    for _ in range(COMMANDS - 1):
        seconds["promote"] += _timed(root, "promote", "1")
        seconds["rollback"] += _timed(root, "rollback")
    read = read_during_moves(root, MOVES, READS)
    value = max(max(times) for times in seconds.values())
    broken = f"{read['incomplete']} of {read['reads']} reads saw no complete version" if read["incomplete"] else None
    return Measured(round(value, 2), [{"seconds": seconds, **read}], broken, broken=broken is not None)


def _timed(root: Path, *arguments: str) -> list[float]:
    command = [sys.executable, "-m", "eagle", "--root", str(root), "registry", *arguments, "--why", "figure F6.5"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-500:]}")
    return [round(time.monotonic() - began, 2)]


def read_during_moves(root: Path, wanted_moves: int, reads: int) -> dict[str, Any]:
    """Move `champion` between versions 1 and 2 while another process reads it; the two keep step, so that they overlap.

    Returns moves, reads, incomplete (reads without a champion, or whose files are not the registered ones), versions seen.
    """
    config = load_config(root)
    store, model = open_store(config, root), model_name(config)
    context = multiprocessing.get_context("spawn")
    done, moved = context.Value("q", 0), context.Value("q", 0)
    results = context.Queue()
    reader = context.Process(target=_read, args=(root, reads, wanted_moves, done, moved, results))
    reader.start()
    before, deadline = len(moves(store, model)), time.monotonic() + PATIENCE
    for number in range(wanted_moves):
        champion = by_alias(store, model, CHAMPION)
        promote(store, model, "1" if champion is not None and str(champion.version) == "2" else "2", why="figure F6.5")
        moved.value = number + 1
        while done.value * wanted_moves < reads * number and reader.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
    found: dict[str, Any] = results.get(timeout=max(deadline - time.monotonic(), 1.0))
    reader.join()
    return {"moves": len(moves(store, model)) - before, **found}


def _read(
    root: Path, reads: int, wanted_moves: int, done: Synchronized[int], moved: Synchronized[int], results: Any
) -> None:
    """The reader: resolve `champion`, hash the files that it points to, compare. Goes on until all moves are made."""
    config = load_config(root)
    store, model = open_store(config, root), model_name(config)
    incomplete, seen = 0, set[str]()
    while done.value < reads or moved.value < wanted_moves:
        champion = by_alias(store, model, CHAMPION)
        incomplete += champion is None or not _complete(champion)
        if champion is not None:
            seen.add(str(champion.version))
        done.value += 1
    results.put({"reads": done.value, "incomplete": incomplete, "versions": sorted(seen)})


def _complete(version: Any) -> bool:
    folder = Path(unquote(urlparse(version.source).path))
    found = manifest.canonical({f["path"]: f["sha256"] for f in manifest.list_files(folder)})
    return version.status == "READY" and version.tags.get(lineage.VERDICT) == "passed" and found == version.tags[lineage.FILES]


def registrations() -> Measured:
    """F6.6: registrations lost or made twice when four processes run the register step five times each."""
    root = make_project(WORK / "registrations")
    return register_side_by_side(root, PROCESSES, REGISTRATIONS)


def register_side_by_side(root: Path, processes: int, number: int) -> Measured:
    """Register `number` bundles in `processes` processes on a store that does not exist yet, and count what is wrong."""
    bases = [fill_inputs(root, f"r{i:02d}", 1.5 + i / 100) for i in range(number)]
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    workers = [context.Process(target=_register, args=(root, bases[i::processes])) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    config = load_config(root)
    store, model = open_store(config, root), model_name(config)
    versions = all_versions(store, model)
    made = [manifest.read_json(base / "register" / "registration.json") for base in bases if (base / "register").is_dir()]
    pairs = {(one["version"], one["run_id"]) for one in made}
    stored = {(str(version.version), version.run_id) for version in versions}
    statuses = [store.client.get_run(str(version.run_id)).info.status for version in versions]
    wrong = {
        "lost": number - len(pairs & stored),
        "twice": len(versions) - len(pairs),
        "unjudged": sum(version.tags[lineage.VERDICT] not in ("passed", "rejected") for version in versions),
        "runs_not_finished": sum(status != "FINISHED" for status in statuses),
        "processes_failed": sum(worker.exitcode != 0 for worker in workers),
    }
    champion = by_alias(store, model, CHAMPION)
    row = {
        **wrong, "versions": len(versions), "champion_is_last_moved": champion is not None
        and str(champion.version) == moves(store, model)[-1].version, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    return Measured(sum(abs(count) for count in wrong.values()), [row], broken=not row["champion_is_last_moved"])


def _register(root: Path, bases: list[Path]) -> None:
    config = load_config(root)
    for base in bases:
        run_step("register", config, root, base)


def recoveries() -> Measured:
    """F6.3: of the random kill -9, how many ended, after `eagle doctor --fix` and a re-run, with the uninterrupted hashes (%)."""
    root = make_project(WORK / "kills")
    rows = kill_recoveries(root)
    shutil.rmtree(root / "runs", ignore_errors=True)
    good = sum(row["recovered"] for row in rows)
    why = f"{len(rows)} kills (FIGURES_KILLS)" if len(rows) != 40 else None
    return Measured(round(100.0 * good / len(rows), 2), rows, why)


FIGURES = (
    *operations_overhead.FIGURES,
    Figure(
        "F6.3",
        "random kill -9 over all steps: same final hashes after `eagle doctor --fix` and a re-run",
        "%",
        "==",
        100.0,
        recoveries,
    ),
    *operations_clones.FIGURES,
    Figure(
        "F6.5",
        "promote or rollback as a command, the slowest (and 1,000 reads during 100 moves: always a complete version)",
        "s",
        "<=",
        5.0,
        promotion,
    ),
    Figure("F6.6", "20 registrations from 4 processes: lost, made twice, unjudged or left open", "", "==", 0.0, registrations),
    *operations_ticks.FIGURES,
)
