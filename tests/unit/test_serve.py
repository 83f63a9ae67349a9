"""The serve command: what it holds, and that the script in a moved bundle runs exactly that."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from eagle.config import Config
from eagle.serve.command import MODULE, serve_command, serve_line, serve_script
from tests.toys import write_program

TARGET = Path("/models/My Target")
SPY = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_command_names_method_bundle_and_loopback() -> None:
    command = serve_command(Path("/b/eagle-3.1"), TARGET, Path("/py"), Config(), 3, cpu=True)
    assert command[command.index("/py") :][:5] == ["/py", "-P", "-m", MODULE, "--model"]
    assert option(command, "--model") == str(TARGET)
    assert option(command, "--host") == "127.0.0.1"
    assert option(command, "--dtype") == "bfloat16"
    assert "--enforce-eager" in command
    assert "VLLM_CPU_KVCACHE_SPACE=2" in command
    wanted = {"method": "eagle3", "model": "/b/eagle-3.1", "num_speculative_tokens": 3}
    assert json.loads(option(command, "--speculative-config")) == wanted


def test_cuda_keys_are_for_cuda_only() -> None:
    config = Config(vllm={"tensor_parallel_size": 8, "gpu_memory_utilization": 0.9}, target={"trust_remote_code": True})
    command = serve_command(Path("/b"), "org/name", None, config, 5, cpu=False)
    assert command[:3] == ["vllm", "serve", "org/name"]
    assert option(command, "--tensor-parallel-size") == "8"
    assert option(command, "--gpu-memory-utilization") == "0.9"
    assert "--trust-remote-code" in command
    assert "--enforce-eager" not in command
    assert "HF_HUB_OFFLINE=1" not in command


def test_no_draft_tokens_serve_without_speculation() -> None:
    assert "--speculative-config" not in serve_command(Path("/b"), TARGET, Path("/py"), Config(), 0, cpu=True)


def test_the_line_can_be_pasted() -> None:
    command = serve_command(Path("/it's/my bundle"), TARGET, Path("/py"), Config(), 3, cpu=False)
    shown = subprocess.run(["sh", "-c", f"printf '%s\\n' {serve_line(command)}"], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == command


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """serve.sh in a folder whose name has a space, a quote, a double quote, a dollar and a non-ASCII letter."""
    spy = write_program(tmp_path / "py thon", SPY)
    folder = tmp_path / "it's \"my\" $bündle"
    folder.mkdir()
    (folder / "serve.sh").write_text(serve_script(TARGET, spy, Config(), 4, cpu=True))
    return folder / "serve.sh"


def ran(script: Path, *arguments: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    done = subprocess.run(
        ["sh", str(script), *arguments], env={**os.environ, **environment}, cwd="/", capture_output=True, text=True, check=True
    )
    argv, seen = json.loads(done.stdout)
    return argv, seen


def test_the_script_runs_the_command_from_anywhere(script: Path) -> None:
    argv, seen = ran(script)
    wanted = serve_command(script.parent, TARGET, Path("py"), Config(), 4, cpu=True)
    assert argv == wanted[wanted.index("-P") :]
    assert json.loads(option(argv, "--speculative-config"))["model"] == str(script.parent)
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert seen["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_target_and_more_arguments_can_be_given(script: Path) -> None:
    argv, _ = ran(script, "/other target", "--port", "9")
    assert option(argv, "--model") == "/other target"
    assert argv[-2:] == ["--port", "9"]
    argv, _ = ran(script, "--port", "9", TARGET="/from environment")
    assert option(argv, "--model") == "/from environment"
    assert argv[-2:] == ["--port", "9"]


def test_the_interpreter_can_be_given(script: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho '[[\"other\"], {}]'\n")
    other.chmod(0o755)
    assert ran(script, VLLM_PYTHON=str(other))[0] == ["other"]


def test_the_script_is_one_command_at_its_end(script: Path) -> None:
    last = script.read_text(encoding="utf-8").rstrip().splitlines()[-1]
    assert last.startswith("exec env ")
    assert "--speculative-config" in last
