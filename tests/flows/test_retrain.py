"""The command of the retraining flow with instant steps: a whole run, a second one, a crash, refusals, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from eagle.errors import ConfigError, PreflightError
from flows import launch
from flows.launch import Launch
from tests.flows.fakes import make_project

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("flow") / "mein Prøjekt")


def start(project: Path, *arguments: str, api: str | None = None, **fakes: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "EAGLE_FAKE": json.dumps(fakes), "OMP_NUM_THREADS": "1"}
    for name in [n for n in environment if n.startswith("PREFECT_")]:
        del environment[name]
    if api:
        environment["PREFECT_API_URL"] = api
    return subprocess.Popen(
        [sys.executable, "-m", "tests.flows.fakes", "retrain", *arguments],
        cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def test_a_whole_run_then_nothing_to_do(project: Path, api: str) -> None:
    marker = project / "killed once"
    code, out, err = finish(start(project, api=api, distill={"kill_once": str(marker)}))
    assert code == 0, err
    assert marker.exists(), "the crash did not happen"
    assert err.count("distill: at work") == 2, "a crash is retried once"
    assert err.count("bench: at work") == 1, "lines appear once"
    for words in ("tokens/s", "gate: passed", "version 1, alias champion", "--speculative-config", "mlflow artifacts download"):
        assert words in out
    assert "Traceback" not in err

    began = time.monotonic()
    code, out, err = finish(start(project, api=api))
    assert code == 0, err
    assert out.count("up to date") == 7
    assert "at work" not in err
    assert time.monotonic() - began < 60


def test_ctrl_c_ends_the_step_and_the_server(project: Path, tmp_path: Path) -> None:
    process = start(project, "--run-id", "interrupted", distill={"spawn": str(tmp_path / "pids"), "sleep": 300})
    deadline = time.monotonic() + 120
    while not (tmp_path / "pids.up").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("prefect" in " ".join(p.cmdline()) for p in family)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert (project / "runs" / "interrupted" / "dataset").is_dir()
    assert not (project / "runs" / "interrupted" / "distill").exists()


def test_a_step_that_refuses_is_not_retried_and_its_exit_code_stands(project: Path, api: str) -> None:
    code, _, err = finish(start(project, "--run-id", "refused", api=api, dataset={"exit": 1}))
    assert code == 6
    assert err.count("dataset: at work") == 1
    assert err.count("the data is no good") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "distill.lerning_rate=1"], 2, "closest: 'distill.learning_rate'"),
        (["--profile", "tny"], 2, "no profile 'tny'"),
        (["--run-id", "../x"], 2, "run id"),
        (["--run-id", "x" * 300], 2, "run id"),
        (["--set", "flow.min_free_gib=1000000", "--run-id", "full"], 5, "flow.min_free_gib"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_a_bad_request_is_refused_before_prefect_is_imported(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    from flows import command

    monkeypatch.chdir(project)
    monkeypatch.setitem(sys.modules, "flows.retrain", None)  # importing it would fail
    try:
        got = command.main(arguments)
    except SystemExit as usage:
        got = int(usage.code or 0)
    assert got == code
    assert words in capsys.readouterr().err
    assert not (project / "runs" / "full").exists()  # refused before any step: nothing is left


def test_a_run_that_is_at_work_is_busy(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from flows import command

    monkeypatch.chdir(project)
    (project / "runs" / "busy").mkdir(parents=True)
    with FileLock(project / "runs" / "busy" / "run.lock"):
        assert command.main(["--run-id", "busy"]) == 4
    assert "another process is at work" in capsys.readouterr().err


def test_vllm_is_asked_for_before_the_start(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    wanted = launch.prepare(overrides=("bundle.validate_in_vllm=true",), run_id="novllm")
    wanted.base.mkdir(parents=True)
    with pytest.raises(PreflightError, match=r"bundle\.validate_in_vllm=false"):
        launch.preflight(wanted)


def test_an_interpreter_without_vllm_is_told_before_the_start(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    here = Path(sys.executable)  # a Python, and no vLLM in it
    wanted = launch.prepare(overrides=("bundle.validate_in_vllm=true", f"vllm.interpreter={here}"), run_id="notvllm")
    wanted.base.mkdir(parents=True)
    with pytest.raises(PreflightError, match=r"vllm\.interpreter: .* has no vLLM"):
        launch.preflight(wanted)


@pytest.mark.parametrize("content", ["exit 0", "echo '{}'"])
def test_a_program_that_is_no_python_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    monkeypatch.chdir(project)
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{content}\n")
    program.chmod(0o755)
    wanted = launch.prepare(overrides=("bundle.validate_in_vllm=true", f"vllm.interpreter={program}"), run_id="nopython")
    wanted.base.mkdir(parents=True, exist_ok=True)
    with pytest.raises(PreflightError, match="is no Python with vLLM"):
        launch.preflight(wanted)


@pytest.mark.parametrize(("name", "words"), [("nowhere.jsonl", "is not there"), ("profiles", "is a folder")])
def test_prompt_files_are_looked_for_before_the_start(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(project)
    (project / "profiles").mkdir(exist_ok=True)
    wanted = launch.prepare(overrides=(f"dataset.prompt_files=[{name}]",), run_id="noprompts")
    wanted.base.mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigError, match=words):
        launch.preflight(wanted)


def test_a_profile_file_is_found_by_the_steps_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "sub").mkdir(exist_ok=True)
    (project / "sub" / "mine.yaml").write_text("runtime: {seed: 7}\n")
    monkeypatch.chdir(project / "sub")
    wanted = launch.prepare("mine.yaml", ("distill.max_minutes=1",))
    assert (wanted.run_id, wanted.root, wanted.config.runtime.seed) == ("mine", project, 7)
    command = wanted.command("bench")
    assert command[command.index("--profile") + 1] == str(project / "sub" / "mine.yaml")
    assert command[command.index("--set") + 1] == "distill.max_minutes=1"
    assert "--force" not in command
    with pytest.raises(ConfigError):
        launch.prepare("mine.yaml", run_id="a/b")


def test_force_runs_every_step(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    wanted: Launch = launch.prepare(force=True)
    assert len(wanted.stale_steps()) == 7
    assert wanted.command("bench")[-1] == "--force"
