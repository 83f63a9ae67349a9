"""Figure F6.7: 30 days of hourly ticks in minutes, with five outages and three failed runs; what must never happen is counted.

The flow function, the registry, the gate and the locks are the real ones, against a real Prefect API. Stand-ins: the
clock, the six expensive steps (instant), and the scheduler's mark on a run. What Prefect does after an outage is done
here too: every missed tick is started, oldest first. A run takes hours of that clock, so ticks fall into it; those are
started in another process, as a second worker would.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.figures import Figure, Measured
from benchmarks.operations_project import WORK
from eagle.profiles import load_config
from eagle.registry.catalog import entries
from eagle.registry.client import by_alias, open_store
from eagle.registry.promote import CHAMPION
from eagle.registry.step import model_name
from eagle.steps import run_step
from flows import env
from tests.flows import fakes

DAYS, OUTAGES, FAILURES = 30, 5, 3
LONGEST_OUTAGE, LONGEST_RUN = 30, 5  # hours
SEED = 20261130
NEW = "new.jsonl"
WORDS = {"late tick, skipped": "late", "busy, skipped": "busy", "nothing new": "nothing new"}


@dataclass(frozen=True)
class Plan:
    """What happens when, in hours from the start: outages [first, last), hours at which a run fails, new data with its quality."""

    hours: int
    outages: tuple[tuple[int, int], ...]
    failures: tuple[int, ...]
    data: dict[int, float]
    lengths: dict[int, int]

    def down(self, hour: int) -> bool:
        """Whether no scheduler or worker is up at that hour."""
        return any(first <= hour < last for first, last in self.outages)

    def acceptance(self, hour: int) -> tuple[int, float]:
        """Return (hour it came at, acceptance length a draft of it has) of the newest data at that hour."""
        came = max(at for at in self.data if at <= hour)
        return came, self.data[came]


def make_plan(days: int, outages: int, failures: int) -> Plan:
    """Draw the events: new data every day, now better, now worse; outages and failed runs apart from each other."""
    chance = random.Random(SEED)  # noqa: S311 -- events of a simulation
    hours = 24 * days
    data = {24 * day: round(1.5 + 0.5 * chance.random(), 4) for day in range(days)}
    lengths = {at: chance.randint(1, LONGEST_RUN) for at in data}
    days_down = [int((number + 0.5) * days / outages) for number in range(outages)]
    starts = [24 * day + LONGEST_RUN + 3 + chance.randint(0, 4) for day in days_down]  # no run is at work then
    down = tuple((first, min(first + chance.randint(2, LONGEST_OUTAGE), hours - 1)) for first in starts)
    free = [at for at in data if at and not any(first - LONGEST_RUN <= at <= last for first, last in down)]
    return Plan(hours, down, tuple(sorted(chance.sample(free, failures))), data, lengths)


@dataclass
class World:
    """The simulation's state: its clock in hours, what became of each tick, and who is at work."""

    root: Path
    plan: Plan
    other: ProcessPoolExecutor
    began: datetime
    hour: int = 0
    outcomes: dict[int, str] = field(default_factory=dict)
    trained: list[tuple[int, float]] = field(default_factory=list)

    def due(self, hour: int) -> datetime:
        """Return the time of the tick of that hour."""
        return self.began + timedelta(hours=hour)


def simulate(root: Path, plan: Plan) -> Measured:
    """Run the plan in a fresh project at `root` and count: overlaps, ticks not accounted for, late work, a wrong champion."""
    project = fakes.make_project(
        root, dataset={"prompt_files": [NEW]}, flow={"retries": 0, "retry_delay_s": 0.0, "max_late_minutes": 60.0}
    )
    began = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=plan.hours + 1)
    with (
        _at(project),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare, (project,)) as other,
    ):
        world = World(project, plan, other, began)
        missed: list[int] = []
        while world.hour < plan.hours:
            hour = world.hour
            if plan.down(hour):
                missed.append(hour)
            else:
                for one in (*missed, hour):  # Prefect starts what was missed, oldest first
                    _tick(world, one)
                missed.clear()
            world.hour = max(world.hour, hour) + 1
        return _verdict(world, missed)


def _tick(world: World, hour: int) -> None:
    """Start the run that was due at `hour`, now, in this process."""
    if hour in world.outcomes:
        return
    came, acceptance = world.plan.acceptance(world.hour)
    (world.root / NEW).write_text(json.dumps({"prompt": f"day {came}"}) + "\n", encoding="utf-8")
    said = {name: {"heldout": str(came), "acceptance": acceptance} for name in ("dataset", "distill", "policy", "bench", "bundle")}
    fails = came in world.plan.failures and world.hour == came

    def while_it_runs(step: str) -> None:
        if step == "distill":
            for _ in range(world.plan.lengths[came]):
                world.hour += 1
                if world.hour < world.plan.hours and not world.plan.down(world.hour):
                    at = (world.due(world.hour), world.due(world.hour))
                    world.outcomes[world.hour] = world.other.submit(run_tick, str(world.root), *at).result()
        if step == "policy" and fails:
            raise _crash(step)

    os.environ["EAGLE_FAKE"] = json.dumps(said)
    start = world.hour
    world.outcomes[hour] = run_tick(str(world.root), world.due(hour), world.due(start), while_it_runs)
    if world.outcomes[hour] == "worked":
        world.trained.append((came, acceptance))


def _crash(step: str) -> Exception:
    from flows.process import StepExit

    return StepExit(step, 139, "stand-in for a crash")


def run_tick(root: str, due: datetime, now: datetime, between: Callable[[str], None] | None = None) -> str:
    """Run the flow once as the scheduler would, at `now` for the tick `due`: worked, failed, late, busy or nothing new."""
    from flows import ticks
    from flows.retrain import retrain

    def stand_in(step: str, _command: list[str], **_: Any) -> None:
        base = Path(root) / "runs" / "default"
        with _entered(Path(root)):
            if between is not None:
                between(step)
            run_step(step, load_config(Path(root)), Path(root), base)

    with (
        patch("flows.tasks.run_supervised", stand_in), patch.object(ticks, "clock", lambda: now),
        patch.object(ticks, "scheduled_run", fakes.present_run),
    ):  # fmt: skip
        state = fakes.run_scheduled(retrain, due)
    if not state.is_completed():
        return "failed" if state.is_failed() else str(state.name)
    return next((word for text, word in WORDS.items() if (state.message or "").startswith(text)), "worked")


@contextmanager
def _entered(root: Path) -> Iterator[None]:
    """Keep a mark while a step is at work; two at once leave a note."""
    mark = root / "at-work"
    try:
        mark.mkdir()
    except FileExistsError:
        (root / "overlap").touch()
        yield
        return
    try:
        yield
    finally:
        mark.rmdir()


def _verdict(world: World, missed: list[int]) -> Measured:
    plan = world.plan
    config = load_config(world.root)
    store, model = open_store(config, world.root), model_name(config)
    champion = by_alias(store, model, CHAMPION)
    found = None if champion is None else next(e for e in entries(store, model) if e.version == str(champion.version))
    worked = [hour for hour, outcome in world.outcomes.items() if outcome == "worked"]
    seen = {plan.acceptance(hour)[0] for hour, outcome in world.outcomes.items() if outcome in ("worked", "nothing new")}
    wanted = expected_champion([acceptance for _, acceptance in world.trained], config.register_.gate.min_relative_acceptance)
    wrong = {
        "overlaps": int((world.root / "overlap").exists()),
        "unaccounted": plan.hours - len(world.outcomes) - len(missed),
        "late_runs_that_worked": sum(plan.down(hour) and plan.down(hour + 1) for hour in worked),
        "data_never_trained": len(seen - {came for came, _ in world.trained}),
        "failures_missing": abs(len(plan.failures) - sum(outcome == "failed" for outcome in world.outcomes.values())),
        "wrong_champion": int(found is None or found.acceptance_length != wanted),
    }
    counts = {word: sum(outcome == word for outcome in world.outcomes.values()) for word in sorted(set(world.outcomes.values()))}
    row: dict[str, Any] = wrong | counts | {"ticks": len(world.outcomes), "outages": len(plan.outages)}
    row["champion"] = found.acceptance_length if found else None
    return Measured(sum(wrong.values()), [row])


def expected_champion(acceptances: list[float], relative: float) -> float | None:
    """Return the acceptance length of the champion after these drafts in order, each compared with the champion of its time."""
    champion: float | None = None
    for acceptance in acceptances:
        if champion is None or acceptance / champion >= relative:
            champion = acceptance
    return champion


def _prepare(root: Path) -> None:
    """In the other process: the same stand-ins and project."""
    os.chdir(root)
    fakes.install()
    env.quiet_console()


@contextmanager
def _at(project: Path) -> Iterator[None]:
    """Work in the project, with the stand-in steps and an API of its own."""
    from eagle import steps
    from flows.server import start_temporary_api

    before, table = Path.cwd(), dict(steps.STEPS)
    os.environ.pop("PREFECT_API_URL", None)
    os.environ["PREFECT_HOME"] = str(project / ".state" / "prefect")
    _prepare(project)
    start_temporary_api(project / ".state" / "prefect" / "server.log")()
    try:
        yield
    finally:
        os.chdir(before)
        steps.STEPS.update(table)


def month() -> Measured:
    """F6.7 on the whole plan; `FIGURES_DAYS=6 make figures ID=F6.7` for a shorter one."""
    days = int(os.environ.get("FIGURES_DAYS", DAYS))
    outages, failures = (max(count * days // DAYS, 1) for count in (OUTAGES, FAILURES))
    root = WORK / "ticks"
    shutil.rmtree(root, ignore_errors=True)
    measured = simulate(root, make_plan(days, outages, failures))
    why = f"{days} days, {outages} outages, {failures} failed runs (FIGURES_DAYS)"
    return measured if days == DAYS else replace(measured, why=why)


FIGURES = (
    Figure(
        "F6.7",
        "30 days of hourly ticks, 5 outages, 3 failed runs: overlaps, piled-up or lost ticks, data not trained, wrong champion",
        "",
        "==",
        0.0,
        month,
    ),
)
