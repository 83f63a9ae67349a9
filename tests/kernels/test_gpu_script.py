"""The GPU script where there is no GPU: the dry run goes through all sections, and the figures read what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_figures
from benchmarks.gpu_figures import MISSING, against_compile, bandwidth, overhead_of, reading
from eagle import manifest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("copy", "correctness", "launches", "tuning", "bandwidth", "rounds")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    base = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "EAGLE_KERNELS")}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run", *arguments], cwd=ROOT, env={**base, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=550,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    out = tmp_path_factory.mktemp("gpu") / "dry.json"
    done = run("--dry-run", "--out", str(out), "--minutes", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout, out


def test_the_dry_run_goes_through_all_sections(dry):
    result, text, out = dry
    assert result["dry_run"] is True
    assert sorted(result["sections"]) == sorted(SECTIONS)
    for name in SECTIONS:
        assert result["sections"][name]["rows"], name
        assert name in text
    assert out.with_suffix(".txt").read_text() == text
    assert "these numbers mean nothing" in text


def test_the_dry_run_finds_every_operation_right(dry):
    rows = dry[0]["sections"]["correctness"]["rows"]
    checked = {row["op"] for row in rows}
    assert {"add_rms_norm", "input_norm", "feature_norms", "silu_mul", "rope_cache", "cached_attention"} <= checked
    assert {"sample_head", "rejection", "dense_terms", "dense_terms, gradient", "silu_mul, gradient"} <= checked
    assert all(row["holds"] for row in rows), [row for row in rows if not row["holds"]]
    assert all(float(row["error"]) <= 1.0 for row in rows)


def test_the_dry_run_measures_all_forms_and_a_round(dry):
    sections = dry[0]["sections"]
    forms = {row["form"] for row in sections["launches"]["rows"]}
    assert {"eager torch", "engine without kernels", "fused", "fused + graph"} <= forms
    rounds = [row for row in sections["rounds"]["rows"] if "why" not in row]
    assert rounds
    assert all(row["round_ms"] > 0 and row["acceptance_length"] > 1 for row in rounds)
    assert all(row["launch"] for row in sections["tuning"]["rows"])


def test_without_a_gpu_it_ends_with_one_line():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = run()
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
    assert "no CUDA device here" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("--dry-run",), "--out FILE"), (("--minutes", "0"), "must be above 0"), (("--only", "rond"), "invalid choice: 'rond'")],
)
def test_bad_arguments_are_told(arguments, told):
    done = run(*arguments)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_section_without_time_keeps_what_is_done(tmp_path):
    from benchmarks.gpu import run as script
    from benchmarks.gpu.lab import Lab
    from benchmarks.gpu.sections import Section

    now, out = [0.0], tmp_path / "out.json"

    def slow(lab):
        for number in range(9):
            now[0] += 20.0
            yield {"ms": float(number), "gb_s": float("inf")}

    def quick(lab):
        yield {"ms": 1.0, "gb_s": 2.0}

    lab = Lab("cpu", True, clock=lambda: now[0])
    result = script.measure(lab, [Section("copy", 0.5, slow), Section("tuning", 0.5, quick)], 1.0, out)
    first, second = result["sections"].values()
    assert len(first["rows"]) == 2
    assert first["complete"] is False
    assert second["complete"] is True
    written = manifest.read_json(out)
    assert written["sections"]["copy"]["rows"][0]["gb_s"] == "inf"
    assert "copy (cut short by its share of the time)" in script.render(written)


def test_a_wrong_kernel_would_be_seen():
    from benchmarks.gpu.operations import worst

    one = torch.randn(8)
    assert worst((one,), (one.clone(),), "float32", 0.5) == 0.0
    assert worst((one + 1e-3,), (one,), "float32", 0.5) > 1.0
    assert worst((torch.full((2,), float("nan")),), (torch.zeros(2),), "float32", 0.5) == float("inf")


def launch_rows(eager: float, ours: float, compiled: float) -> list[dict[str, Any]]:
    return [
        {"batch": batch, "form": form, "overhead_ms": value, "ms": value}
        for batch in (1, 32)
        for form, value in (("eager torch", eager), ("fused + graph", ours * batch), ("torch.compile", compiled))
    ]


def write(path: Path, **changes: Any) -> Path:
    wide = {"op": "a", "problem": "wide", "gb_s": 3000.0, "ms": 0.1, "of_copy": 0.75}
    narrow = {"op": "b", "problem": "narrow", "gb_s": 10.0, "ms": 0.01, "of_copy": 0.01}
    sections = {"launches": {"rows": launch_rows(4.0, 1.0, 8.0)}, "bandwidth": {"rows": [wide, narrow]}}
    manifest.write_json(path, {"dry_run": False, "device": "NVIDIA H200", "date": "2026-12-01", "sections": sections, **changes})
    return path


def test_the_figures_read_what_the_script_measured(tmp_path):
    path = write(tmp_path / "gpu.json")
    found = reading("launches", overhead_of("fused + graph"), path)
    assert found.value == pytest.approx(0.25)
    assert found.why == "NVIDIA H200, 2026-12-01: 1000 us against 4000 us a step"
    assert reading("launches", against_compile, path).value == pytest.approx(0.25)  # the worse of 8 / 1 and 8 / 32
    assert reading("bandwidth", bandwidth, path).value == pytest.approx(0.75)  # the small one moves too little to tell


def test_the_figures_are_null_without_a_measurement(tmp_path, dry):
    assert reading("launches", overhead_of("fused + graph"), tmp_path / "none.json").why == MISSING
    assert reading("launches", overhead_of("fused + graph"), dry[2]).value is None
    assert "dry run" in str(reading("launches", overhead_of("fused + graph"), dry[2]).why)
    (tmp_path / "gpu.json").write_text("{")
    for path in (tmp_path / "gpu.json", write(tmp_path / "cut.json", sections={"launches": {"rows": []}})):
        found = reading("launches", overhead_of("fused + graph"), path)
        assert found.value is None
        assert "damaged or cut short" in str(found.why)
    assert "cut short" in str(reading("bandwidth", bandwidth, tmp_path / "cut.json").why)


def test_each_figure_has_its_number():
    assert [figure.id for figure in gpu_figures.FIGURES] == ["F4.2a", "F4.2b", "F4.3", "F4.4"]
