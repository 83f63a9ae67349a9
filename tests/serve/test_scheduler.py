"""The scheduler classes on a stand-in for vLLM's scheduler, and the contract they need in the vLLM that is installed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from eagle.serve.plugin.settings import VARIABLE

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
MODULE = "eagle.serve.plugin.scheduler"


@dataclass
class Output:
    """vLLM's SchedulerOutput, as far as the plugin reads it."""

    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_new_reqs: list[str] = field(default_factory=list)
    num_invalid_spec_tokens: dict[str, int] | None = None
    num_spec_tokens_to_schedule: int = 0

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Base:
    """vLLM's scheduler, as far as the plugin touches it: requests that never end."""

    ranks = 1
    now = 0.0  # seconds on the stand-in's clock

    def __init__(self, requests: int = 2, drafts: int = 3) -> None:
        self.num_spec_tokens = drafts
        self.dynamic_sd_lookup: Any = [drafts] * 100
        self.parallel_config = SimpleNamespace(data_parallel_size=self.ranks)
        past_prompt = {"num_prompt_tokens": 9, "num_computed_tokens": 9}
        self.requests = {f"r{i}": SimpleNamespace(spec_token_ids=[], **past_prompt) for i in range(requests)}
        self.updates = 0

    @property
    def running(self) -> list[Any]:
        return list(self.requests.values())

    def schedule(self) -> Output:
        drafts = {name: list(r.spec_token_ids) for name, r in self.requests.items() if r.spec_token_ids}
        tokens = {name: 1 + len(drafts.get(name, ())) for name in self.requests}
        return Output(tokens, drafts, num_spec_tokens_to_schedule=self.dynamic_sd_lookup[len(self.requests)])

    def update_from_output(self, scheduled: Output, output: Any) -> dict[str, int]:
        self.updates += 1
        for tokens in output.sampled_token_ids:
            del tokens[1:]  # as vLLM does at a stop
        return {"updates": self.updates}

    def update_draft_token_ids(self, drafts: Any) -> None:
        for name, ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self.requests[name].spec_token_ids = ids

    def has_unfinished_requests(self) -> bool:
        return True


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scheduler module over the stand-in, with an own metrics registry."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.logger": {"init_logger": lambda name: Logger()},
        "vllm.v1": {}, "vllm.v1.core": {}, "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": Base},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Base},
        "vllm.v1.core.sched.output": {"SchedulerOutput": Output},
    }  # fmt: skip
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    found = importlib.import_module(MODULE)
    registry = prometheus_client.CollectorRegistry()
    made = found.PidMetrics
    monkeypatch.setattr(found, "PidMetrics", lambda version, every: made(version, every, registry))
    monkeypatch.setattr(found, "perf_counter", lambda: Base.now)
    found.registry = registry
    Logger.lines.clear()
    yield found
    sys.modules.pop(MODULE, None)


class Logger:
    lines: list[str] = []

    def warning(self, text: str, *values: object) -> None:
        self.lines.append(text % values)

    info = warning

    def error(self, text: str, *, exc_info: Exception) -> None:
        self.lines.append(f"{text}: {exc_info}")


def step(scheduler: Any, accepted: int) -> int:
    """One engine step: schedule, run (every draft up to `accepted` is right), update, take the new drafts."""
    scheduled = scheduler.schedule()
    names = list(scheduler.requests)
    sampled = [[7] * (1 + min(accepted, len(scheduled.scheduled_spec_decode_tokens.get(name, ())))) for name in names]
    Base.now += 0.01 * (1.0 + 0.3 * scheduled.num_spec_tokens_to_schedule)
    output = SimpleNamespace(sampled_token_ids=sampled, req_id_to_index={name: i for i, name in enumerate(names)})
    scheduler.update_from_output(scheduled, output)
    length = scheduled.num_spec_tokens_to_schedule
    drafts = SimpleNamespace(req_ids=names, draft_token_ids=[[5] * length for _ in names])
    scheduler.update_draft_token_ids(drafts)
    return length


def test_accepted_counts_reach_the_controller_and_set_the_next_length(plugin: Any) -> None:
    scheduler = plugin.PidScheduler(2, 3)
    lengths = [step(scheduler, 3) for _ in range(80)]
    assert set(lengths[-20:]) == {3}
    assert scheduler._controller.survival[2] > 0.8
    rejected = [step(scheduler, 0) for _ in range(300)]
    assert rejected[-50:].count(0) > 40
    assert scheduler._controller.survival[0] < 0.2


def test_a_probe_of_many_requests_drafts_for_a_few(plugin: Any) -> None:
    scheduler = plugin.PidScheduler(20, 3)
    seen = set()
    for _ in range(300):
        step(scheduler, 0)
        seen.add(sum(bool(r.spec_token_ids) for r in scheduler.requests.values()))
    assert seen == {0, 4, 20}  # off, a probe, a trial at full width


def test_a_step_that_takes_a_prompt_in_drafts_one_token(plugin: Any) -> None:
    scheduler = plugin.PidScheduler(2, 3)
    assert [step(scheduler, 3) for _ in range(80)][-1] == 3
    for computed, length in ((0, 1), (5, 1), (9, 3)):  # a whole prompt, the rest of one, none
        scheduler.requests["r1"].num_computed_tokens = computed
        assert scheduler.schedule().num_spec_tokens_to_schedule == length
    del scheduler.requests["r1"].num_computed_tokens  # as if another vLLM's
    assert scheduler.schedule().num_spec_tokens_to_schedule == 3
    assert "num_computed_tokens" in Logger.lines[-1]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"version": "0.99.1"}, "0.99.1"), ({"drafts": 0}, "speculative_config"), ({"ranks": 2}, "data-parallel")],
)
def test_where_it_cannot_work_vllms_own_length_stays_with_a_warning(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], word: str
) -> None:
    if "version" in change:
        monkeypatch.setattr(plugin.vllm, "__version__", change["version"])
    monkeypatch.setattr(Base, "ranks", change.get("ranks", 1))
    scheduler = plugin.PidScheduler(2, change.get("drafts", 3))
    assert scheduler.dynamic_sd_lookup == [scheduler.num_spec_tokens] * 100
    assert any(word in line for line in Logger.lines)
    assert [step(scheduler, 1) for _ in range(5)] == [scheduler.num_spec_tokens] * 5
    assert b'eagle_pid_active{' in prometheus_client.generate_latest(plugin.registry)
    assert b"} 0.0" in prometheus_client.generate_latest(plugin.registry)


def test_a_version_can_be_let_in_by_the_settings(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.vllm, "__version__", "0.99.1")
    monkeypatch.setenv(VARIABLE, json.dumps({"versions": ["0.99"], "max_tokens": 2}))
    scheduler = plugin.AsyncPidScheduler(2, 3)
    assert max(step(scheduler, 3) for _ in range(40)) == 2


def test_a_fault_of_the_controller_does_not_end_the_server(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = plugin.PidScheduler(2, 3)
    for _ in range(5):
        step(scheduler, 3)

    def fails(*_: object) -> int:
        raise ValueError("a fault")

    monkeypatch.setattr(plugin.StepController, "next_length", fails)
    assert [step(scheduler, 1) for _ in range(4)] == [3, 3, 3, 3]
    assert scheduler.updates == 9
    assert scheduler.dynamic_sd_lookup == [3] * 100
    text = prometheus_client.generate_latest(plugin.registry).decode()
    assert 'eagle_pid_active{reason="",vllm="0.32.0"} 0.0' in text
    assert 'eagle_pid_active{reason="failed",vllm="0.32.0"} 0.0' in text
    assert Logger.lines[-1].endswith("a fault")


def test_prompts_are_no_rounds_and_spoil_no_costs(plugin: Any) -> None:
    scheduler = plugin.PidScheduler(1, 3)
    for _ in range(10):
        scheduler.update_from_output(
            Output({"new": 50}, {}, ["new"], num_spec_tokens_to_schedule=3),
            SimpleNamespace(sampled_token_ids=[[1]], req_id_to_index={"new": 0}),
        )
    assert scheduler._controller.costs.measured(1) == {}
    assert scheduler._controller.state.record is None


CONTRACT = """
import dataclasses, inspect
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from eagle.serve.plugin.scheduler import AsyncPidScheduler, PidScheduler
assert issubclass(PidScheduler, Scheduler) and issubclass(AsyncPidScheduler, AsyncScheduler)
source = inspect.getsource(Scheduler.schedule)
assert "self.dynamic_sd_lookup[" in source and "len(num_scheduled_tokens)" in source
before = source.partition("self.dynamic_sd_lookup[")[0]
assert "self.running.append(request)" in before and "request.num_computed_tokens = num_computed_tokens" in before
assert "_update_after_schedule" not in before and "self.num_prompt_tokens = " in inspect.getsource(Request)
fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
assert {"num_spec_tokens_to_schedule", "scheduled_spec_decode_tokens", "num_invalid_spec_tokens", "scheduled_new_reqs"} <= fields
for name in ("update_from_output", "update_draft_token_ids", "has_unfinished_requests"):
    assert hasattr(Scheduler, name), name
print("kept")
"""


@pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm here (make setup)")
def test_the_installed_vllm_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "eagle").symlink_to(ROOT / "eagle", target_is_directory=True)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [str(VLLM), "-P", "-c", CONTRACT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "kept", done.stderr[-2000:]
