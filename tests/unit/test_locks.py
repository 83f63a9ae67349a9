"""Locks that name their owner: who is refused hears who holds it; a dead owner's name is seen and taken out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from filelock import Timeout

from eagle.locks import clear_dead_owner, holder, is_held, owned_lock, owner_of, this_process

HOLD = (
    "import sys, time; from pathlib import Path; from eagle.locks import owned_lock\n"
    "with owned_lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)\n"
)


def start_holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), "secret=1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_held_lock_names_its_owner_until_sigkill_and_a_dead_name_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "a b.lock"
    process = start_holder(path)
    try:
        owner = owner_of(path)
        assert owner is not None
        assert (owner.pid, owner.here, owner.alive) == (process.pid, True, True)
        assert str(process.pid) in holder(path)
        assert "secret" not in path.read_text()
        assert is_held(path)
        assert not clear_dead_owner(path)
        with pytest.raises(Timeout), owned_lock(path):
            pass
        assert owner_of(path) == owner
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert owner_of(path) == owner
    assert not owner.alive
    assert not is_held(path)
    assert clear_dead_owner(path)
    assert owner_of(path) is None


def test_a_released_lock_names_nobody_and_the_next_owner_replaces_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text(json.dumps(asdict(replace(this_process(), pid=2**22 + 1))))
    with owned_lock(path):
        assert owner_of(path) == this_process()
    assert owner_of(path) is None
    assert path.is_file()


def test_the_same_process_may_take_a_shared_one_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with owned_lock(path, shared_in_process=True):
        with owned_lock(path, shared_in_process=True):
            assert owner_of(path) == this_process()
        assert owner_of(path) == this_process()
    assert owner_of(path) is None


def test_a_later_process_with_the_same_number_is_not_the_owner() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert me.alive
    assert not replace(me, started=me.started - 100).alive


@pytest.mark.parametrize("content", ["", "not JSON", "[]", '{"pid": 1}', "null"])
def test_what_is_no_name_names_nobody(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.lock"
    path.write_text(content)
    assert owner_of(path) is None
    assert holder(path) == "another process"
    assert not is_held(tmp_path / "none.lock")
    assert not (tmp_path / "none.lock").exists()


def test_a_mark_that_filelock_keeps_in_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text("123\nsome-host\n")
    with owned_lock(path):
        assert path.read_text() == "123\nsome-host\n"
    assert path.read_text() == "123\nsome-host\n"


def test_a_folder_removed_under_the_lock_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with owned_lock(path):
        path.unlink()
    assert not path.exists()
