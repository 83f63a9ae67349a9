"""Figures F6.1 and F6.2: what the flow costs over the steps run by hand, and what a scheduled tick with nothing new costs."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.figures import ROOT, Figure, Measured
from benchmarks.operations_project import WORK, make_project
from eagle.ports import free_port
from eagle.steps import STEPS

ROUNDS = 3
TICKS = 3
RUN_SECONDS = 20 * 60.0
MAX_SHARE = 3.0
MAX_MIB = 600.0
PATIENCE = 600.0
SAMPLE_SECONDS = 0.1
HOOKED = "flows.retrain"


def overhead() -> Measured:
    """F6.1: seconds that `python -m flows.retrain` takes longer than the seven steps by hand, median of interleaved rounds."""
    root = make_project(WORK / "overhead")
    rows = []
    for number in range(ROUNDS):
        base = str(root / "runs" / f"hand-{number}")
        by_hand = sum(_timed(root, "eagle", "--root", str(root), "step", name, "--dir", base) for name in STEPS)
        by_flow = _timed(root, HOOKED, "--run-id", f"flow-{number}")
        rows.append({"by_hand": round(by_hand, 2), "by_flow": round(by_flow, 2), "overhead": round(by_flow - by_hand, 2)})
    value = statistics.median(row["overhead"] for row in rows)
    share = 100.0 * value / RUN_SECONDS
    why = f"{share:.2f} % of a run of 20 minutes"
    return Measured(round(value, 2), rows, why, broken=share > MAX_SHARE)


def _timed(root: Path, *arguments: str) -> float:
    began = time.monotonic()
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return time.monotonic() - began


def environment() -> dict[str, str]:
    """Return this process' environment without Prefect's settings, and with this checkout's code first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def empty_tick() -> Measured:
    """F6.2: seconds from a tick's time to its end, the slowest of three, with nothing new; and the memory of all processes."""
    root = make_project(WORK / "tick")
    _timed(root, HOOKED)
    port = free_port()
    command = [sys.executable, "-m", "flows.schedule", "--file", str(ROOT / "prefect.yaml"), "--cron", "* * * * *",
               "--profile", "default", "--port", str(port)]  # fmt: skip
    log = root / "schedule.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=root, env=environment(), stdout=output, stderr=output, start_new_session=True)
    try:
        memory = Memory(process.pid)
        rows = _wait_for_ticks(f"http://127.0.0.1:{port}/api", process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    peak = memory.stop()
    broken = peak["all_mib"] >= MAX_MIB
    return Measured(max(row["seconds"] for row in rows), [*rows, peak], f"{peak['all_mib']:.0f} MiB at most", broken=broken)


def _wait_for_ticks(api: str, process: subprocess.Popen[bytes], log: Path) -> list[dict[str, Any]]:
    """Return a row for each of the first ticks: seconds from its time to its end, seconds of its process' work, what it said."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"error: flows.schedule ended with {process.returncode}: {log.read_text(encoding='utf-8')[-1000:]}")
        done = _ended(api)
        if len(done) >= TICKS:
            return [_row(run) for run in done[:TICKS]]
        time.sleep(2.0)
    sys.exit(f"error: fewer than {TICKS} ticks in {PATIENCE:.0f} s; see {log}")


def _ended(api: str) -> list[dict[str, Any]]:
    wanted = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}}, "sort": "START_TIME_ASC"}
    try:
        answer = httpx.post(f"{api}/flow_runs/filter", json=wanted, timeout=30)
    except httpx.HTTPError:  # the server is starting
        return []
    return [run for run in answer.json() if run["auto_scheduled"]] if answer.status_code == httpx.codes.OK else []


def _row(run: dict[str, Any]) -> dict[str, Any]:
    due, began, ended = (datetime.fromisoformat(run[name]) for name in ("expected_start_time", "start_time", "end_time"))
    return {
        "seconds": round((ended - due).total_seconds(), 2),
        "running": round((ended - began).total_seconds(), 2),
        "state": run["state"]["name"],
        "message": run["state"]["message"],
    }


class Memory:
    """Samples the resident memory of a process and everything below it, until `stop`. Pages shared by two count twice."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stopped, self._peak = pid, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Return the peak in MiB."""
        self._stopped.set()
        self._thread.join()
        return {"all_mib": round(self._peak / 2**20, 1)}

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, _resident(self._pid))


def _resident(pid: int) -> int:
    total = 0
    try:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            total += _memory(process)
    except psutil.NoSuchProcess:
        return total
    return total


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


FIGURES = (
    Figure(
        "F6.1",
        "the flow over the seven steps by hand, tiny profile (bound also 3 % of a 20-minute run)",
        "s",
        "<=",
        20.0,
        overhead,
    ),
    Figure(
        "F6.2",
        "a scheduled tick with nothing new, from its time to its end (bound also 600 MiB, all processes together)",
        "s",
        "<=",
        15.0,
        empty_tick,
    ),
)
