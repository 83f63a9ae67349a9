"""The whole flow on a tiny target: bad rows, every output, a second call, kill -9 and resume, bad configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import environment, run_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
STEPS = ["dataset", "distill", "policy", "tune", "bench", "bundle", "register"]
BAD_ROWS = [
    (b'{"prompt": "Name three rivers of Europe."}', None),
    (b'{"messages": []}', "conversation"),
    (b'{"messages": [{"role": "assistant", "content": "hello"}]}', "assistant"),
    (b'{"prompt": 42}', "string"),
    (b'{"prompt": "' + b"long " * 20000 + b'"}', "long"),
    (b'{"prompt": "caf\xff"}', "UTF-8"),
    (b'{"prompt": "truncated', "JSON"),
]
OVERRIDES = ["--profile", "tiny", "--set", "target.model=target", "--set", "dataset.prompt_files=[mine.jsonl, empty.jsonl]"]


@pytest.fixture(scope="module")
def finished(project: Path) -> Path:
    (project / "mine.jsonl").write_bytes(b"\n".join(row for row, _ in BAD_ROWS))
    (project / "empty.jsonl").write_bytes(b"")
    done = run_in(project, "flows.retrain", *OVERRIDES)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "vllm" in done.stdout.lower()
    return project / "runs" / "tiny"


def test_every_step_left_a_complete_folder(finished: Path) -> None:
    for name in STEPS:
        made = json.loads((finished / name / "manifest.json").read_text(encoding="utf-8"))
        assert made["step"] == name
        assert (finished / name / "metrics.json").is_file()
    leftovers = [p.name for p in finished.iterdir() if p.suffix in {".partial", ".work", ".old"}]
    assert leftovers == []


def test_bad_rows_are_quarantined_with_file_row_and_reason(finished: Path) -> None:
    lines = (finished / "dataset" / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    found = {(Path(q["file"]).name, q["row"]): q["reason"] for q in map(json.loads, lines)}
    for number, (_, word) in enumerate(BAD_ROWS, start=1):
        if word is None:
            assert ("mine.jsonl", number) not in found
        else:
            assert word.lower() in found[("mine.jsonl", number)].lower()
    assert any(name == "empty.jsonl" for name, _ in found)


def test_not_validated_in_vllm_is_never_champion(finished: Path) -> None:
    made = json.loads((finished / "register" / "registration.json").read_text(encoding="utf-8"))
    assert made["version"]
    assert made["alias"] == "challenger"


def test_a_second_call_runs_no_step(finished: Path) -> None:
    before = {name: (finished / name / "manifest.json").stat().st_mtime_ns for name in STEPS}
    done = run_in(finished.parents[1], "flows.retrain", *OVERRIDES)
    assert done.returncode == 0, done.stderr[-4000:]
    assert {name: (finished / name / "manifest.json").stat().st_mtime_ns for name in STEPS} == before


def test_a_bad_configuration_starts_nothing(project: Path) -> None:
    done = run_in(project, "flows.retrain", "--profile", "tiny", "--set", "distill.lerning_rate=1", "--run-id", "never")
    assert done.returncode == 2
    assert "closest: 'distill.learning_rate'" in done.stderr
    assert not (project / "runs" / "never").exists()


def test_kill_9_in_distill_then_the_same_command_ends_with_the_same_weights(finished: Path) -> None:
    project = finished.parents[1]
    more = [*OVERRIDES, "--set", "distill.stages=[{depth: 1, steps: 30}]", "--set", "distill.max_minutes=30"]
    whole = run_in(project, "eagle", "step", "dataset", "--dir", "runs/whole", *OVERRIDES)
    assert whole.returncode == 0, whole.stderr[-2000:]
    whole = run_in(project, "eagle", "step", "distill", "--dir", "runs/whole", *more)
    assert whole.returncode == 0, whole.stderr[-2000:]

    command = [sys.executable, "-m", "flows.retrain", *more, "--run-id", "killed"]
    process = subprocess.Popen(command, cwd=project, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = project / "runs" / "killed" / "distill.work"
    deadline = time.monotonic() + 300
    while not (checkpoints.is_dir() and any(checkpoints.rglob("*.safetensors"))):
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs([c for c in children if "eagle" in _command(c)], timeout=30)
    assert alive == [], "a killed flow must not leave its step running"
    assert not (project / "runs" / "killed" / "distill").exists()

    again = run_in(project, *command[2:])
    assert again.returncode == 0, again.stderr[-4000:]
    one, two = (project / "runs" / name / "distill" for name in ("whole", "killed"))
    assert (one / "draft" / "model.safetensors").read_bytes() == (two / "draft" / "model.safetensors").read_bytes()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
