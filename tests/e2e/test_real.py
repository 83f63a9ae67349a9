"""End to end on the real 135M target with vLLM, with a small budget (profile smoke)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import ROOT, environment, make_project, run_in

VLLM = ("--set", f"vllm.interpreter={ROOT / '.venv-vllm/bin/python'}")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.real,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not (ROOT / ".venv-vllm" / "bin" / "python").exists(), reason="no .venv-vllm here (make setup)"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = make_project(tmp_path_factory.mktemp("real") / "project")
    done = run_in(project, "flows.retrain", "--profile", "smoke", *VLLM, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for word in ("champion", "--speculative", "tokens/s"):
        assert word in done.stdout, done.stdout
    return project / "runs" / "smoke"


def test_vllm_loaded_the_bundle_and_its_text_is_the_targets_own(finished: Path) -> None:
    validation = json.loads((finished / "bundle" / "validation.json").read_text(encoding="utf-8"))
    assert validation["equal_tokens"] == 1.0
    assert validation["acceptance_length"] >= 1.0
    assert validation["relative_gap"] <= 0.05


def test_the_model_is_registered_as_champion(finished: Path) -> None:
    made = json.loads((finished / "register" / "registration.json").read_text(encoding="utf-8"))
    assert made["verdict"] == "passed"
    assert made["alias"] == "champion"


def test_a_renamed_tensor_is_named(finished: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for file in (finished / "bundle" / "bundle").iterdir():
        (bundle / file.name).write_bytes(file.read_bytes())
    tensors = load_file(bundle / "model.safetensors")
    tensors["fc_norm.9.weight"] = tensors.pop("fc_norm.1.weight")
    save_file(tensors, bundle / "model.safetensors")
    done = run_in(ROOT, "eagle", "bundle", "validate", str(bundle))
    assert done.returncode == 6
    assert "fc_norm" in done.stderr


@pytest.fixture
def serving(finished: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`eagle serve` of the champion ("--champion") or of the bundle as if speculation had paid ("controlled"), and its address."""
    what = request.param
    if what == "controlled":
        shutil.copytree(finished / "bundle" / "bundle", tmp_path / "bundle")
        record = json.loads((tmp_path / "bundle" / "serving.json").read_text())
        record["recommended"] = [{"batch": 1, "draft_tokens": 2}]
        (tmp_path / "bundle" / "serving.json").write_text(json.dumps(record))
        what = str(tmp_path / "bundle")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle", "serve", what, "--port", str(port), "--profile", "smoke", *VLLM],
        cwd=finished.parents[1], env=environment(), stdout=subprocess.PIPE, stderr=(tmp_path / "log").open("w"), text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()  # it comes when the server is healthy, or the process has ended
        assert line.startswith("curl "), (tmp_path / "log").read_text()[-6000:]
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)
        process.stdout.close()


def chat(url: str) -> dict[str, object]:
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 24, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found


def gone(processes: list[psutil.Process], seconds: float = 60.0) -> list[psutil.Process]:
    """Return those that still live after at most `seconds`."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.parametrize("serving", ["--champion"], indirect=True)
def test_the_champion_answers_an_openai_client_until_ctrl_c(serving: tuple[subprocess.Popen[str], str]) -> None:
    process, url = serving
    found = chat(url)
    assert found["choices"][0]["message"]["content"]  # type: ignore[index]
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 2  # the server and its engine
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not gone(below)


@pytest.mark.parametrize("serving", ["controlled"], indirect=True)
def test_metrics_show_acceptance_and_the_controller_and_kill_9_leaves_nothing(serving: tuple[subprocess.Popen[str], str]) -> None:
    process, url = serving
    for _ in range(2):
        chat(url)
    deadline = time.monotonic() + 30
    while True:
        page = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
        drafted = re.search(r"^vllm:spec_decode_num_draft_tokens_total\{.*\} ([0-9.e+]+)$", page, re.MULTILINE)
        if drafted and float(drafted[1]) > 0 and "eagle_pid_draft_tokens" in page:
            break
        assert time.monotonic() < deadline, "\n".join(line for line in page.splitlines() if "spec_decode" in line or "pid" in line)
        time.sleep(0.5)
    assert "vllm:spec_decode_num_accepted_tokens_total" in page
    below = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    assert not gone(below)
