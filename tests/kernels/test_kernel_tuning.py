"""Tuning as a step: what is tuned, the store that outlives crashes, damage and new versions, the budget. Times are invented."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import LLAMA_8B
from eagle.bench import direct_tuning, kernel_tuning
from eagle.bench.direct_tuning import limits, timed_passes, tune_direct
from eagle.bench.kernel_tuning import NO_GPU, LaunchStore, problems, tune_device, tune_kernels
from eagle.config import TuneConfig
from kernels.tuned import Stamp, Tuned, read_table

pytest.importorskip("triton")

from kernels import spaces
from kernels.spaces import SPACES, Problem

ROOT = Path(__file__).resolve().parents[2]
GPU = Stamp("NVIDIA H200", "2.13.0", "3.7.1")
WANTED = [Problem("silu_mul", (64,), "bfloat16", rows) for rows in (1, 8, 32)]
SMALL = replace(
    LLAMA_8B, hidden_size=64, target_hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
    vocab_size=320, draft_vocab_size=96, aux_layers=(1, 2, 3),
)  # fmt: skip


def row(problem: Problem, stamp: Stamp = GPU) -> dict[str, Any]:
    launch = SPACES[problem.op].launches(problem)[-1]
    return {**spaces.write_row(problem, launch), **asdict(stamp), "median_ms": 1.0, "default_ms": 2.0}


def tuner(tuned: list[Problem]) -> Any:
    def one(problem: Problem, deadline: float) -> dict[str, Any]:
        tuned.append(problem)
        return row(problem)

    return one


def test_every_operation_of_a_draft_is_tuned_at_its_shapes():
    found = problems(LLAMA_8B, "bfloat16", [1, 8], 3)
    assert {one.op for one in found} == set(SPACES)
    rows = {op: sorted(one.rows for one in found if one.op == op) for op in SPACES}
    assert rows["add_rms_norm"] == rows["feature_norms"] == [1, 4, 8, 32]  # draft steps, and the positions of a verification
    assert rows["silu_mul"] == rows["cached_attention"] == rows["sample_head"] == rows["rejection"] == [1, 8]
    assert len(set(found)) == len(found)
    without = problems(replace(LLAMA_8B, head_dim=256, fc_norm=False), "bfloat16", [1], 3)
    assert {"cached_attention", "feature_norms"}.isdisjoint({one.op for one in without})


def test_what_is_done_is_kept_and_not_tuned_again(tmp_path, capsys):
    tuned: list[Problem] = []
    rows, why = tune_kernels(WANTED[:2], LaunchStore(tmp_path, GPU), 1.0, tuner(tuned))
    assert tuned == WANTED[:2]
    again: list[Problem] = []
    rows, why = tune_kernels(WANTED, LaunchStore(tmp_path, GPU), 1.0, tuner(again))
    assert again == WANTED[2:]
    assert [spaces.read_row(one)[0] for one in rows] == WANTED
    assert why is None
    assert "2 of 3 kernels were tuned before" in capsys.readouterr().err


def test_a_kill_between_two_operations_keeps_what_is_done(tmp_path):
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom tests.kernels import test_kernel_tuning as t\n"
        "done = []\n"
        "def one(problem, deadline):\n"
        "    if len(done) == 2:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    done.append(problem)\n    return t.row(problem)\n"
        f"t.tune_kernels(t.WANTED, t.LaunchStore(Path({str(tmp_path)!r}), t.GPU), 1.0, one)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again: list[Problem] = []
    rows, _ = tune_kernels(WANTED, LaunchStore(tmp_path, GPU), 1.0, tuner(again))
    assert again == WANTED[2:]
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("stamp", "told"),
    [
        (replace(GPU, torch="2.14.0"), "torch 2.13.0, here 2.14.0"), (replace(GPU, triton="3.9.0"), "triton 3.7.1, here 3.9.0"),
    ],
)  # fmt: skip
def test_other_versions_tune_again_with_a_notice(stamp, told, tmp_path, capsys):
    tune_kernels(WANTED, LaunchStore(tmp_path, GPU), 1.0, tuner([]))
    again: list[Problem] = []
    tune_kernels(WANTED, LaunchStore(tmp_path, stamp), 1.0, tuner(again))
    assert again == WANTED
    assert f"was tuned with {told}; tuning again" in capsys.readouterr().err


def test_another_device_has_a_store_of_its_own(tmp_path):
    tune_kernels(WANTED, LaunchStore(tmp_path, GPU), 1.0, tuner([]))
    other = LaunchStore(tmp_path, replace(GPU, device="NVIDIA L4 / 24 GB"))
    assert other.path.name == "nvidia-l4-24-gb.json"
    assert other.row(WANTED[0]) is None
    other.put(WANTED[0], row(WANTED[0]))
    assert LaunchStore(tmp_path, GPU).row(WANTED[2]) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"device": "NVIDIA H200"}', "\x00", None], ids=repr)
def test_a_damaged_or_deleted_store_is_tuned_again(text, tmp_path, capsys):
    store = LaunchStore(tmp_path, GPU)
    tune_kernels(WANTED, store, 1.0, tuner([]))
    if text is None:
        store.path.unlink()
    else:
        store.path.write_text(text, encoding="utf-8")
    again: list[Problem] = []
    rows, _ = tune_kernels(WANTED, LaunchStore(tmp_path, GPU), 1.0, tuner(again))
    assert again == WANTED
    assert len(rows) == 3
    assert ("tuning again" in capsys.readouterr().err) is (text is not None)
    assert len(json.loads(store.path.read_text())["rows"]) == 3


def test_damaged_and_stale_rows_are_tuned_again_and_the_others_kept(tmp_path, capsys):
    store = LaunchStore(tmp_path, GPU)
    tune_kernels(WANTED, store, 1.0, tuner([]))
    content = json.loads(store.path.read_text())
    content["rows"][0]["launch"] = {"block": 3, "num_warps": 4}
    content["rows"][1]["source"] = "0" * 16
    store.path.write_text(json.dumps(content))
    again: list[Problem] = []
    tune_kernels(WANTED, LaunchStore(tmp_path, GPU), 1.0, tuner(again))
    assert again == WANTED[:2]
    said = capsys.readouterr().err
    assert "is not in its search space; tuning it again" in said
    assert "the kernel has changed since; tuning it again" in said


def test_two_runs_at_once_lose_nothing(tmp_path):
    one, two = LaunchStore(tmp_path, GPU), LaunchStore(tmp_path, GPU)
    one.put(WANTED[0], row(WANTED[0]))
    two.put(WANTED[1], row(WANTED[1]))
    one.put_direct({"key": "x", "direct_tokens": 1, "direct_attention": 1})
    found = LaunchStore(tmp_path, GPU)
    assert found.row(WANTED[0]) is not None
    assert found.row(WANTED[1]) is not None
    assert found.direct is not None


def test_the_budget_is_shared_out_and_ends_the_tuning(tmp_path, capsys):
    now, deadlines = [0.0], []

    def slow(problem: Problem, deadline: float) -> dict[str, Any]:
        deadlines.append(deadline)
        now[0] += 45.0
        return row(problem)

    rows, why = tune_kernels(WANTED, LaunchStore(tmp_path, GPU), 1.0, slow, clock=lambda: now[0])
    assert deadlines == [20.0, 45.0 + 15.0 / 2]
    assert len(rows) == 2
    assert why is not None
    assert "1 of 3 kernels not tuned" in why
    assert "run it again to go on" in capsys.readouterr().err


def test_an_operation_that_no_launch_fits_keeps_its_default(tmp_path, capsys):
    rows, why = tune_kernels(WANTED[:1], LaunchStore(tmp_path, GPU), 1.0, lambda problem, deadline: None)
    assert (rows, why) == ([], None)
    assert "no launch fits this device" in capsys.readouterr().err


def test_on_cpu_direct_calls_are_tuned_and_the_kernels_say_why_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(direct_tuning, "TOKENS", (1, 4))
    settings = TuneConfig()
    table = tune_device(SMALL, settings, dtype="float32", threads=1, device="cpu", folder=tmp_path)
    said = capsys.readouterr().err
    assert f"Triton kernels: {NO_GPU}" in said
    assert (table["rows"], table["why"]) == ([], NO_GPU)
    if table["direct"] is None:
        pytest.skip("no C++ compiler here")
    assert [one["tokens"] for one in table["direct"]["passes"]] == [1, 4]
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(table))
    tuned = read_table(path, "cpu")
    assert (tuned.direct_tokens, tuned.direct_attention) == (
        table["direct"]["direct_tokens"], table["direct"]["direct_attention"],
    )  # fmt: skip
    assert tune_device(SMALL, settings, dtype="float32", threads=1, device="cpu", folder=tmp_path) == table
    assert "direct calls were tuned before" in capsys.readouterr().err
    other = tune_device(SMALL, settings, dtype="bfloat16", threads=1, device="cpu", folder=tmp_path)
    assert other["direct"]["dtype"] == "bfloat16"
    store = LaunchStore(tmp_path, Stamp.here("cpu"))
    store.put_direct({**other["direct"], "direct_tokens": "many"})
    tune_device(SMALL, settings, dtype="bfloat16", threads=1, device="cpu", folder=tmp_path)
    assert "direct_tokens is 'many'; tuning again" in capsys.readouterr().err


def test_without_direct_calls_there_are_none(monkeypatch):
    monkeypatch.setattr(direct_tuning, "native", lambda dtype, device: None)
    assert tune_direct(SMALL, "float32", 1, 0.0) is None


def test_with_a_gpu_the_rows_are_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernel_tuning.Stamp, "here", lambda device: GPU)
    monkeypatch.setattr(kernel_tuning, "tune_on", lambda device, stamp: tuner([]))
    table = tune_device(SMALL, TuneConfig(batch_sizes=[1]), dtype="bfloat16", threads=1, device="cuda", folder=tmp_path)
    assert {one["op"] for one in table["rows"]} == set(SPACES)
    assert table["direct"] is None
    assert "silu_mul (size 96, 1 row, bfloat16): 2.0000 -> 1.0000 ms" in capsys.readouterr().err


def passes(*rows: tuple[float, float, float]) -> list[dict[str, float]]:
    return [
        {"tokens": 2**i, "torch_ms": torch, "direct_ms": direct, "attend_ms": attend}
        for i, (torch, direct, attend) in enumerate(rows)
    ]


def test_limits_are_where_direct_calls_begin_to_lose():
    assert limits(passes((9, 3, 2), (9, 5, 4), (9, 8, 8.5), (9, 10, 12))) == {"direct_tokens": 4, "direct_attention": 2}
    assert limits(passes((9, 10, 12))) == {"direct_tokens": 0, "direct_attention": 0}
    assert limits(passes((9, 9.1, 9.1), (9, 9.3, 8.0))) == {"direct_tokens": 2, "direct_attention": 2}
    assert limits(passes((9, 9.9, 9.8), (9, 1, 1))) == {"direct_tokens": 0, "direct_attention": 0}


def test_passes_take_turns_and_end_in_time():
    log = []

    def run(form: str, count: int) -> float:
        log.append(form)
        return {"torch": 3e-3, "direct": 2e-3, "attend": 1e-3}[form]

    found = timed_passes(run, (1, 2, 4), 5.0, clock=iter([1.0, 9.0]).__next__)
    assert [row["tokens"] for row in found] == [1, 2]
    assert found[0] == {"tokens": 1, "torch_ms": 3.0, "direct_ms": 2.0, "attend_ms": 1.0}
    assert log[3:9] == ["torch", "direct", "attend", "attend", "direct", "torch"]


def test_the_tuned_limits_change_what_the_drafter_calls():
    """0 tokens: never by direct calls; many: always."""
    import torch

    from eagle.decode.drafting import EagleDrafter
    from kernels.dispatch import using
    from tests.decode.models import draft, target

    model, heard = target(), []
    for tuned in (Tuned(direct_tokens=0), Tuned()):
        with using(tuned=tuned), torch.inference_mode():
            made = EagleDrafter.beside(model, draft(model), batch=1, max_length=20)
        if made._native is None:
            pytest.skip("no C++ compiler here")
        kept = made._direct
        made._direct = lambda *given, kept=kept: heard.append(1) or kept(*given)
        with torch.inference_mode():
            made.extend([0], torch.zeros(1, 3, dtype=torch.int64), torch.randn(1, 3, 96), [0], [3])
        heard.append(0)
    assert heard == [0, 1, 0]
