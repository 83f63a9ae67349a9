"""A step's process always ends with all its children, and its lines and exit code arrive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.process import StepExit, StepTimeout, run_supervised

FAMILY = """
import os, signal, subprocess, sys, time
stubborn = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
print("ready", flush=True)
exec(sys.argv[2])
"""


def supervise(code: str, *arguments: str, timeout: float = 60.0, grace: float = 1.0) -> list[str]:
    lines: list[str] = []
    command = [sys.executable, "-c", code, *arguments]
    run_supervised("bench", command, cwd=Path.cwd(), env=os.environ, timeout=timeout, line=lines.append, grace=grace)
    return lines


def wait_gone(pids: Path, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    left = [int(pid) for pid in pids.read_text().split()]
    while left := [pid for pid in left if _alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_lines_of_both_streams_arrive_once_and_whole() -> None:
    code = (
        "import sys; print('eins'); print('zwei é', flush=True); print('drei', file=sys.stderr)\n"
        "sys.stdout.flush(); sys.stdout.buffer.write(b'50%\\r100%\\n\\xff end'); print('x' * 200000)"
    )
    lines = supervise(code)
    assert sorted(lines[:3]) == sorted(["eins", "zwei é", "drei"])
    assert lines[3:5] == ["50%", "100%"]
    assert lines[5].startswith("\ufffd end")
    assert len(lines[5]) == 200005


@pytest.mark.parametrize(
    ("code", "exit_code", "shown", "crashed"),
    [
        ("import sys; print('error: no such key'); sys.exit(2)", 2, 2, False),
        ("import sys; sys.exit(130)", 130, 130, False),
        ("raise ValueError('bug')", 1, 7, True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, 7, True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, 7, True),
    ],
)
def test_the_exit_code_tells_refusal_from_crash(code: str, exit_code: int, shown: int, crashed: bool) -> None:
    with pytest.raises(StepExit) as caught:
        supervise(code)
    assert (caught.value.code, caught.value.exit_code, caught.value.crashed) == (exit_code, shown, crashed)


def test_the_error_holds_the_last_line() -> None:
    with pytest.raises(StepExit, match="error: no such key"):
        supervise("import sys; print('a'); print('error: no such key'); sys.exit(2)")


def test_the_time_limit_ends_the_whole_family(tmp_path: Path) -> None:
    with pytest.raises(StepTimeout, match="flow.step_timeout_s"):
        supervise(FAMILY, str(tmp_path / "pids"), "time.sleep(300)", timeout=15.0)
    wait_gone(tmp_path / "pids")


def test_an_orphan_of_a_killed_step_is_ended(tmp_path: Path) -> None:
    with pytest.raises(StepExit):
        supervise(FAMILY, str(tmp_path / "pids"), "os.kill(os.getpid(), signal.SIGKILL)")
    wait_gone(tmp_path / "pids")


def test_an_exception_in_this_process_ends_the_family(tmp_path: Path) -> None:
    def interrupt(_text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_supervised(
            "bench", [sys.executable, "-c", FAMILY, str(tmp_path / "pids"), "time.sleep(300)"],
            cwd=tmp_path, env=os.environ, timeout=60, line=interrupt, grace=1.0,
        )
    wait_gone(tmp_path / "pids")


@pytest.mark.parametrize("victim", ["caller", "guard"])
def test_kill_9_leaves_nothing_behind(tmp_path: Path, victim: str) -> None:
    code = (
        "import os, sys; from pathlib import Path; from flows.process import run_supervised\n"
        "command = [sys.executable, '-c', *sys.argv[1:]]\n"
        "run_supervised('bench', command, cwd=Path.cwd(), env=os.environ, timeout=60, line=print, grace=1.0)"
    )
    pids = tmp_path / "pids"
    caller = subprocess.Popen([sys.executable, "-c", code, FAMILY, str(pids), "time.sleep(300)"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    guard = psutil.Process(int(pids.read_text().split()[0])).ppid()
    os.kill(caller.pid if victim == "caller" else guard, signal.SIGKILL)
    caller.wait(30)
    if victim == "guard":  # the step itself dies with its guard; its own orphans are beyond anybody's reach then
        pids.write_text(pids.read_text().split()[0])
    wait_gone(pids)
