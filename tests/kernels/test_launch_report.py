"""The launch report: what the profiler's events count as, the table without a GPU, and the command."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.profiler_util import DeviceType
from typer.testing import CliRunner

from benchmarks.kernels import LLAMA_8B
from eagle import manifest
from eagle.bench import launch_report
from eagle.bench.draft_forms import draft_loop, random_network
from eagle.bench.launch_report import Row, Setting, as_json, kernels_line, measure_form, render, report
from eagle.bench.launches import StepLaunches, count
from eagle.bench.profiling import Profile, profile, read_events, wall_seconds
from eagle.cli import app
from eagle.draft.io import save_draft
from eagle.errors import StepFailed
from tests.decode.models import draft, target

SMALL = replace(
    LLAMA_8B, hidden_size=64, target_hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32,
    vocab_size=320, draft_vocab_size=96, aux_layers=(1, 2, 3),
)  # fmt: skip
SETTING = Setting("float32", 2, 3, "cpu")


def event(name: str, device: DeviceType = DeviceType.CPU, us: float = 0.0, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: us), **extra)


def test_what_the_profilers_events_count_as():
    """As a profile of a CUDA program has them: operators, calls of the runtime, kernels, copies, annotations."""
    cuda = DeviceType.CUDA
    events = [
        event("aten::linear"), event("aten::mm"), event("cudaLaunchKernel"), event("ampere_bf16_gemm", cuda, 20.0),
        event("cuLaunchKernelEx"), event("silu_mul_kernel", cuda, 5.0), event("cudaMemcpyAsync"), event("Memcpy DtoD", cuda, 9.0),
        event("Memset (Device)", cuda, 1.0), event("cudaGraphLaunch"), event("forward_kernel", cuda, 3.0),
        event("ProfilerStep#1", cuda, 50.0, is_user_annotation=True), event("cudaDeviceSynchronize"),
        event("cudaLaunchKernelExC"),
    ]  # fmt: skip
    assert read_events(events) == Profile(calls=2, kernels=3, launches=4, device_us=28.0)
    assert read_events(events, 2) == Profile(calls=1, kernels=1.5, launches=2, device_us=14.0)


def test_a_real_profile_counts_operator_calls():
    x = torch.randn(4, 4)
    one = profile(lambda: x + 1, "cpu", repeats=4)
    two = profile(lambda: (x + 1) * 2, "cpu", repeats=4)
    assert one.calls >= 1
    assert two.calls == 2 * one.calls
    assert (one.kernels, one.launches) == (0, 0)
    assert wall_seconds(lambda: x + 1, "cpu") > 0


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    torch.manual_seed(0)
    return report(SMALL, SETTING, compiled=False)


def test_without_a_gpu_the_kernels_are_the_recorded_ones(rows):
    pytest.importorskip("triton")
    counted = count(SMALL, 2, 64 + 3)
    found = {row.form: row for row in rows}
    assert list(found) == ["eager torch", "torch.compile", "engine without kernels", "direct calls", "fused", "fused + graph"]
    assert counted.fused is not None
    assert found["eager torch"].kernels == counted.eager.total()
    assert found["engine without kernels"].kernels == counted.engine.total()
    assert found["fused"].kernels == found["fused + graph"].kernels == counted.fused.total() < counted.engine.total()
    assert found["eager torch"].launches == 3 * counted.eager.total()
    assert found["fused + graph"].launches is None
    assert "1 launch a loop on a GPU" in found["fused + graph"].note
    for form in ("eager torch", "engine without kernels", "direct calls"):
        assert found[form].calls > 0
        assert found[form].ms >= 0
    assert found["direct calls"].calls < found["engine without kernels"].calls < found["eager torch"].calls
    assert found["torch.compile"].ms is None
    assert "try_compile" in found["torch.compile"].note


def test_the_table_says_what_was_not_measured(rows):
    text = render(rows, SETTING)
    assert "batch 2, float32, loop of K=3" in text
    graph = next(line for line in text.splitlines() if "fused + graph" in line)
    assert graph.count("not measured") >= 3
    assert len(as_json(rows)) == len(rows)
    assert as_json(rows)[0]["form"] == "eager torch"


def test_without_triton_there_is_no_fused_number(monkeypatch):
    counted = StepLaunches(*(launch_report.count(SMALL, 1, 70).eager for _ in range(2)), None)
    monkeypatch.setattr(launch_report, "count", lambda *given: counted)
    rows = report(SMALL, replace(SETTING, length=1), compiled=False)
    assert rows[-1] == Row("fused", None, None, note="triton is not installed")


def test_a_form_that_cannot_be_compiled_is_a_row_with_the_reason(monkeypatch):
    kept = launch_report.measure_form

    def broken(form, *given, **options):
        if form == "torch.compile":
            raise RuntimeError("InvalidCxxCompiler: none\nmore")
        return kept(form, *given, **options)

    monkeypatch.setattr(launch_report, "measure_form", broken)
    row = report(SMALL, SETTING, compiled=True)[1]
    assert (row.form, row.ms) == ("torch.compile", None)
    assert row.note == "cannot be compiled here: InvalidCxxCompiler: none"


def test_with_a_gpu_all_is_read_from_the_profiler(monkeypatch):
    """With a stand-in for the profiler: a step is the difference between a long and a short draft."""
    seen = iter([Profile(100, 40, 40, 100.0), Profile(300, 122, 122, 500.0)])
    clock = iter([0.001, 0.005])
    monkeypatch.setattr(launch_report, "profile", lambda call, device, repeats: next(seen))
    monkeypatch.setattr(launch_report, "wall_seconds", lambda call, device, repeats: next(clock))
    network = random_network(SMALL, "float32", "cpu")
    monkeypatch.setattr(launch_report, "draft_loop", lambda form, *given, **options: draft_loop(form, *given))
    row = measure_form("eager torch", network, 1, 3, "cuda")
    assert (row.kernels, row.launches, row.calls) == (41, 122, 100)
    assert row.ms == pytest.approx(2.0)
    assert row.kernel_ms == pytest.approx(0.2)


def test_every_form_drafts_as_many_tokens_as_asked_for():
    network = random_network(SMALL, "float32", "cpu")
    for form in ("engine without kernels", "direct calls", "fused"):
        with draft_loop(form, network, 2, 3) as loop:
            assert loop(3).tokens.shape == (2, 3)
            assert loop(1).tokens.shape == (2, 1)


@pytest.fixture
def run(tmp_path):
    model = target()
    save_draft(tmp_path / "policy" / "draft", draft(model))
    return tmp_path


def test_the_command_prints_the_table_of_a_runs_draft(run):
    (run / "tune").mkdir()
    manifest.write_json(run / "tune" / "tuned.json", {"threads": 1, "dtype": "float32", "draft_step": "eager"})
    manifest.write_json(run / "tune" / "kernels.json", {"device": "a CPU", "rows": [], "why": "no GPU: not tuned"})
    done = CliRunner().invoke(app, ["tune", "--report", "--dir", str(run), "--set", "runtime.device=cpu"])
    assert done.exit_code == 0, done.output
    assert "float32, loop of K=3" in done.stdout
    assert all(form in done.stdout for form in ("eager torch", "torch.compile", "fused", "fused + graph"))
    assert "kernels: no GPU: not tuned" in done.stdout


def test_a_run_without_a_draft_is_told(tmp_path):
    done = CliRunner().invoke(app, ["tune", "--report", "--dir", str(tmp_path)])
    assert isinstance(done.exception, StepFailed)
    assert f"no draft in {tmp_path / 'policy' / 'draft'}; run: eagle step policy --dir {tmp_path}" in str(done.exception)


def test_the_command_without_report_is_the_step(tmp_path):
    done = CliRunner().invoke(app, ["tune", "--dir", str(tmp_path)])
    assert isinstance(done.exception, StepFailed)
    assert "input 'policy' is missing" in str(done.exception)


def test_the_line_on_tuned_launches(tmp_path):
    path = tmp_path / "kernels.json"
    assert "no table at" in kernels_line(path)
    rows = [{"default_ms": 3.0, "median_ms": 2.0}, {"default_ms": None, "median_ms": 1.0}]
    manifest.write_json(path, {"device": "NVIDIA H200", "rows": rows, "why": None})
    assert kernels_line(path) == "kernels: 2 launches tuned on NVIDIA H200, up to 1.50x faster than the default launch"
    path.write_text("[")
    assert "no table at" in kernels_line(path)
