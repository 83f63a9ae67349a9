"""What tuning leaves behind: search spaces, rows, tables, and what a compiled kernel takes. No kernel runs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import dispatch
from kernels.aot import Report
from kernels.tuned import TABLE, Launches, Stamp, read_table

pytest.importorskip("triton")

from kernels import autotune, cached_attention, silu_mul, spaces
from kernels.occupancy import limits_of, resident_warps, why_not
from kernels.spaces import SPACES, Problem

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
HERE = Stamp.here("cpu")
SILU = Problem("silu_mul", (14336,), "bfloat16", 8)
OTHER = silu_mul.Launch(512, 2)


def taking(registers: int = 32, shared: int = 0, warps: int = 4, spills: int = 0, error: str | None = None) -> Report:
    return Report("op", "kernel", 90, 1, "bf16", warps, registers, shared, spills, "8.0", error)


@pytest.mark.parametrize(
    ("report", "warps"),
    [
        (taking(32), 64), (taking(255), 8), (taking(128, warps=8), 16), (taking(64), 32), (taking(32, shared=100 * 1024), 8),
        (taking(32, shared=227 * 1024), 4), (taking(32, shared=228 * 1024), 0), (taking(16, warps=1), 32),
        (taking(168, warps=32), 0),
    ],
)  # fmt: skip
def test_warps_that_a_hopper_multiprocessor_holds(report, warps):
    """Worked out by hand from the CUDA guide: 65536 registers in units of 256 a warp, 228 KiB, 64 warps, 32 programs."""
    assert resident_warps(report, limits_of(90)) == warps


def test_why_a_launch_is_not_timed():
    hopper, ada = limits_of(90), limits_of(89)
    assert why_not([taking(), taking(64)], hopper) is None
    assert why_not([taking(), taking(spills=8)], hopper) == "spills"
    assert why_not([taking(shared=228 * 1024)], hopper) == "shared memory"
    assert why_not([taking(shared=120 * 1024)], hopper) == "occupancy"
    assert why_not([taking(shared=120 * 1024)], ada) == "shared memory"
    assert why_not([taking(error="no such target")], hopper) == "error"
    assert limits_of(121) == limits_of(120)
    with pytest.raises(ValueError, match="70 at least"):
        limits_of(61)


@pytest.mark.parametrize("op", SPACES)
def test_a_space_starts_with_the_default_and_its_rows_survive_json(op):
    problem = next(one for one in autotune.EXAMPLES if one.op == op)
    launches = SPACES[op].launches(problem)
    assert len(set(launches)) == len(launches) > 3
    assert SPACES[op].specimens(problem, launches[-1])
    for launch in (launches[0], launches[-1]):
        row = json.loads(json.dumps(spaces.write_row(problem, launch)))
        assert spaces.read_row(row) == (problem, launch)
    assert op in str(problem)


def test_defaults_of_the_spaces_are_those_of_the_kernels():
    found = {one.op: SPACES[one.op].launches(one)[0] for one in autotune.EXAMPLES}
    assert found["silu_mul"] == silu_mul.Launch()
    assert found["cached_attention"] == cached_attention.default_launch(8, spaces.CONTEXT, 2)
    assert set(found) == set(SPACES)


@pytest.mark.parametrize(
    "damage",
    [
        {"op": "silu"}, {"shape": {"size": 0}}, {"shape": {}}, {"shape": None}, {"dtype": "int8"}, {"rows": True}, {"rows": "8"},
        {"launch": {"block": 7, "num_warps": 4}}, {"launch": {"block": 1024}}, {"launch": {"width": 1}}, {"launch": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_row_is_told(damage):
    row = spaces.write_row(SILU, OTHER) | damage
    if damage == {"launch": {"block": 1024}}:
        assert spaces.read_row(row)[1] == silu_mul.Launch()  # the rest is the default's
        return
    with pytest.raises(ValueError, match=r"."):
        spaces.read_row(row)


def test_the_nearest_number_of_rows_is_taken():
    table = Launches({("silu_mul", (64,), "bfloat16"): {1: "one", 8: "eight", 128: "many"}})
    found = {rows: table.find("silu_mul", (64,), torch.bfloat16, rows) for rows in (1, 2, 3, 4, 9, 40, 64, 5000)}
    assert found == {1: "one", 2: "one", 3: "one", 4: "eight", 9: "eight", 40: "many", 64: "many", 5000: "many"}
    assert table.find("silu_mul", (64,), torch.float32, 1) is None
    assert table.find("silu_mul", (65,), torch.bfloat16, 1) is None
    assert Launches().find("silu_mul", (64,), torch.bfloat16, 1) is None


def write(path: Path, **changes: Any) -> Path:
    row = spaces.write_row(SILU, OTHER)
    content = {"device": HERE.device, "torch": HERE.torch, "triton": HERE.triton, "rows": [row | vars(HERE)], "direct": None}
    path.write_text(json.dumps(content | changes), encoding="utf-8")
    return path


def test_a_table_is_read_back_where_it_was_made(tmp_path):
    table = write(tmp_path / TABLE, direct={"direct_tokens": 32, "direct_attention": 8, "more": 1})
    tuned = read_table(table, "cpu")
    assert len(tuned.launches) == 1
    assert (tuned.direct_tokens, tuned.direct_attention) == (32, 8)
    with dispatch.using(tuned=tuned):
        assert dispatch.launch_of("silu_mul", (14336,), torch.empty(0, dtype=torch.bfloat16), 6) == OTHER
        assert dispatch.tuned() is tuned
    assert len(dispatch.tuned().launches) == 0


@pytest.mark.parametrize("change", [{"device": "another GPU"}, {"torch": "1.0"}, {"triton": None}], ids=str)
def test_a_table_of_another_device_or_version_is_not_used(change, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert len(read_table(write(tmp_path / TABLE, **change), "cpu").launches) == 0
    assert "it was tuned with" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', "\x00\xff", '{"device": 1}', "nan"], ids=repr
)
def test_a_damaged_table_gives_the_defaults_and_one_line(text, tmp_path, caplog):
    path = tmp_path / TABLE
    path.write_text(text, encoding="utf-8")
    with caplog.at_level(logging.INFO):
        tuned = read_table(path, "cpu")
    assert (len(tuned.launches), tuned.direct_tokens, tuned.direct_attention) == (0, 64, 16)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


@pytest.mark.parametrize("change", [{"rows": [{"op": "silu_mul"}]}, {"rows": 3}, {"direct": {"direct_tokens": -1}},
                                    {"direct": {"direct_tokens": 1e9, "direct_attention": 1}}], ids=str)  # fmt: skip
def test_a_table_with_a_damaged_part_gives_the_defaults(change, tmp_path, caplog):
    tuned = read_table(write(tmp_path / TABLE, **change), "cpu")
    assert (len(tuned.launches), tuned.direct_tokens) == (0, 64)
    assert "is damaged" in caplog.text


def test_no_table_is_no_news(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert len(read_table(tmp_path / TABLE, "cpu").launches) == 0
    assert caplog.text == ""


def test_a_launch_tuned_for_another_source_is_not_used(tmp_path):
    row = spaces.write_row(SILU, OTHER) | vars(HERE) | {"source": "0" * 16}
    assert len(read_table(write(tmp_path / TABLE, rows=[row]), "cpu").launches) == 0


def test_attention_splits_follow_the_cache():
    launch = cached_attention.Launch(64, 8, 4, 2)
    found = {capacity: cached_attention.fitted(launch, capacity).splits for capacity in (16, 512, 1024, 2048, 4095, 4096, 9999)}
    assert found == {16: 1, 512: 1, 1024: 2, 2048: 4, 4095: 4, 4096: 8, 9999: 8}


def tuned(read: Any, timer: Any, **options: Any) -> dict[str, Any] | None:
    return autotune.tune(SILU, HERE, CPU, read, limits_of(90), timer=timer, **options)


def test_what_does_not_fit_is_not_timed():
    """Launches of 8 warps spill here, those of blocks of 256 leave a multiprocessor half empty; the rest is timed."""
    timed = []

    def read(specimen):
        small = specimen.constants["BLOCK"] == 256
        return taking(spills=8 if specimen.num_warps == 8 else 0, shared=150 * 1024 if small else 0, warps=specimen.num_warps)

    def timer(call):
        timed.append(call.args[0])
        return 1.0

    row = tuned(read, timer)
    assert row is not None
    assert timed[0] == silu_mul.Launch()
    assert all(launch.num_warps < 8 and launch.block > 256 for launch in timed)
    assert row["dropped"]["spills"] + row["dropped"]["occupancy"] + row["timed"] == row["launches"]
    assert row["resident_warps"] == 64


def test_the_deadline_ends_a_search_but_not_before_the_default():
    row = tuned(lambda specimen: taking(warps=specimen.num_warps), lambda call: 1.0, deadline=0.0, clock=lambda: 1.0)
    assert row is not None
    assert row["timed"] == 1
    assert row["left"] == row["launches"] - 1
    assert spaces.read_row(row)[1] == silu_mul.Launch()


def test_what_the_device_refuses_is_dropped_and_nothing_left_is_no_row():
    from triton.runtime.errors import OutOfResources

    def refuse(call):
        if call.args[0] == silu_mul.Launch():
            raise OutOfResources(2, 1, "shared memory")
        return 2.0 + call.args[0].block

    row = tuned(lambda specimen: taking(warps=specimen.num_warps), refuse)
    assert row is not None
    assert row["dropped"] == {"refused": 1}
    assert row["default_ms"] is None
    assert row["launch"]["block"] == 256
    assert tuned(lambda specimen: taking(error="no"), lambda call: 1.0) is None


def test_spaces_are_pruned_by_what_the_compiled_kernels_take(tmp_path):
    """The command, without a GPU: registers and shared memory are read from the machine code for sm_90."""
    out = tmp_path / "rows.json"
    base = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.autotune", "--op", "rejection", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=base, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["op"] == "rejection"
    assert row["dropped"]["spills"] > 0  # 8,192 float64 weights in 4 warps are more than their registers hold
    assert row["kept"] > 1
    assert row["kept"] + sum(row["dropped"].values()) == row["launches"]
    assert "error" not in row["dropped"]
    assert "launches kept" in done.stdout


def test_the_command_refuses_the_interpreter():
    command = [sys.executable, "-m", "kernels.autotune", "--op", "silu_mul"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in done.stderr


def test_a_specimen_is_compiled_once(monkeypatch):
    seen = []
    monkeypatch.setattr(autotune, "compile_specimen", lambda op, specimen, target: seen.append(op) or taking())
    read = autotune.compiler(90)
    attention = Problem("cached_attention", (32, 8, 128), "bfloat16", 1)
    for launch in (cached_attention.Launch(64, 4, 4, 2), cached_attention.Launch(64, 8, 4, 2)):
        for specimen in SPACES["cached_attention"].specimens(attention, launch):
            read(specimen)
    assert seen == ["cached_attention_kernel", "merge_kernel"]  # how often it is split is no part of the code
