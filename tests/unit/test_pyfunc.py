"""A registered draft loads through MLflow's own `load_model`, answers with the target's text, and refuses altered files."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlflow
import pandas as pd
import pytest

from eagle import manifest
from eagle.bundle.export import export_draft
from eagle.config import Config
from eagle.errors import BundleError, ConfigError
from eagle.registry.client import create_version, open_store, tracked_run, upload_bundle
from eagle.registry.mlmodel import write_mlmodel
from eagle.target.generate import Request, generate_batch
from eagle.target.load import load_target, load_tokenizer, target_dims
from eagle.target.template import render_prompt
from tests.toys import tiny_target
from tests.unit.test_bundle import make_draft

MODEL = "eagle31-toy"
PROMPTS = ["Name three rivers.", "Hi", "What is 2 + 2? Explain."]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a registered draft of a tiny target."""
    root = tmp_path_factory.mktemp("mein Prøjekt")
    target = tiny_target(root / "target")
    export_draft(make_draft(target, root / "draft"), root / "bundle", "float32")
    files = {f["path"]: f["sha256"] for f in manifest.list_files(root / "bundle")}
    store = open_store(Config(), root)
    with tracked_run(store, "r", {}) as run_id:
        (root / "w").mkdir()
        mlmodel = write_mlmodel(root / "w", files, str(target), 2)
        expected = files | {mlmodel.name: manifest.hash_file(mlmodel)}
        source = upload_bundle(store, run_id, root / "bundle", mlmodel, expected, root / "scratch")
        create_version(store, MODEL, source, run_id, {})
    return root


@pytest.fixture
def uri(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{(place / '.state' / 'mlflow.db').resolve()}")
    return f"models:/{MODEL}/1"


def plain_answers(target: Path, new: int) -> list[str]:
    tokenizer, stop = load_tokenizer(target), tuple(target_dims(target).eos_token_ids)
    asked = [Request(render_prompt(tokenizer, [{"role": "user", "content": text}]), new, 0.0, 0, stop) for text in PROMPTS]
    done = generate_batch(load_target(target, "float32"), asked)
    return [str(tokenizer.decode(list(answer.tokens), skip_special_tokens=True)) for answer in done]


def test_the_text_is_the_targets_own(place: Path, uri: str) -> None:
    model = mlflow.pyfunc.load_model(uri)
    found = model.predict(pd.DataFrame({"prompt": PROMPTS}), params={"max_new_tokens": 12})
    assert list(found["text"]) == plain_answers(place / "target", 12)
    assert any(found["text"])
    assert len(model.predict(PROMPTS[:1])) == 1


def test_another_target_folder_may_be_given_and_a_missing_one_is_said(place: Path, uri: str, tmp_path: Path) -> None:
    moved = shutil.copytree(place / "target", tmp_path / "moved")
    model = mlflow.pyfunc.load_model(uri, model_config={"target": str(moved)})
    assert list(model.predict(PROMPTS, params={"max_new_tokens": 5})["text"]) == plain_answers(moved, 5)
    with pytest.raises(ConfigError, match="no target folder at /nowhere"):
        mlflow.pyfunc.load_model(uri, model_config={"target": "/nowhere"})


def test_an_altered_file_is_not_loaded(place: Path, tmp_path: Path) -> None:
    stored = next((place / ".state" / "mlartifacts").rglob("MLmodel")).parent
    folder = shutil.copytree(stored, tmp_path / "copy")
    assert "pickle" not in (folder / "MLmodel").read_text()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(BundleError, match=r"model\.safetensors is not the registered file"):
        mlflow.pyfunc.load_model(str(folder))
