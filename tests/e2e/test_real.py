"""End to end on the real 135M target with vLLM, with a small budget (profile smoke)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, make_project, run_in

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.real,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not (ROOT / ".venv-vllm" / "bin" / "python").exists(), reason="no .venv-vllm here (make setup)"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = make_project(tmp_path_factory.mktemp("real") / "project")
    vllm = f"vllm.interpreter={ROOT / '.venv-vllm/bin/python'}"
    done = run_in(project, "flows.retrain", "--profile", "smoke", "--set", vllm, timeout=1400)
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
