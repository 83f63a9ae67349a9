"""Warm start: what is taken over, what is refused, and what it does to the step's key."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle import manifest, steps
from eagle.config import Config
from eagle.draft.io import load_draft, save_tensors
from eagle.errors import ConfigError
from eagle.steps import STEPS, key_parts, run_step, status
from eagle.target.identity import IDENTITY, tokenizer_hash
from eagle.train import distill
from eagle.train.warm import check_early
from eagle.train.warm_source import find_draft, is_alias
from flows.launch import Launch, preflight
from tests.toys import tiny_tokenizer
from tests.training.builders import Toy, make_toy
from tests.training.test_distill import context

SHORT = {"stages": [{"depth": 1, "steps": 8}], "eval_every": 4}
OTHER = {"learning_rate": 1e-9, "stages": [{"depth": 1, "steps": 4}], "eval_every": 4}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"), train=24, heldout=6)


@pytest.fixture(scope="module")
def former(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished distill folder."""
    at = context(toy, tmp_path_factory.mktemp("former"), **SHORT)
    distill.run(at)
    return at.out


def test_it_goes_on_from_the_draft_and_keeps_its_map(toy: Toy, former: Path, tmp_path: Path) -> None:
    at = context(toy, tmp_path, warm_start=str(former), **OTHER)
    metrics = distill.run(at)
    curves = manifest.read_json(at.out / "curves.json")
    validated = [row for row in curves if "acceptance_length" in row]
    known = [row for row in manifest.read_json(former / "curves.json") if "acceptance_length" in row]
    assert [row["step"] for row in validated] == [0, 4]
    assert validated[0]["acceptance_length"] == max(row["acceptance_length"] for row in known)
    assert metrics["acceptance_length"] >= validated[0]["acceptance_length"], "what it starts from is one of the candidates"
    before, after = (load_file(folder / "draft" / "model.safetensors") for folder in (former, at.out))
    assert torch.equal(before["d2t"], after["d2t"])
    torch.testing.assert_close(before["lm_head.weight"], after["lm_head.weight"], atol=1e-4, rtol=0.0)
    said = manifest.read_json(at.out / "warm_start.json")
    assert said["weights_sha256"] == manifest.hash_file(former / "draft" / "model.safetensors")
    assert manifest.read_json(at.out / IDENTITY)["tokenizer_sha256"] == tokenizer_hash(tiny_tokenizer())


def test_the_map_is_kept_when_the_data_would_choose_another(toy: Toy, former: Path, tmp_path: Path) -> None:
    fresh = context(toy, tmp_path / "fresh", **OTHER)
    fresh.config.__dict__["draft"] = fresh.config.draft.model_copy(update={"vocab_size": 60})
    distill.run(fresh)
    kept = load_draft(fresh.out / "draft", toy.target).draft_ids().numpy()
    moved = tmp_path / "moved"
    shutil.copytree(fresh.out / "draft", moved)
    tensors = load_file(moved / "model.safetensors")
    ids = np.unique(np.r_[kept[:-1], [i for i in range(320) if i not in kept][-1]])
    assert len(ids) == len(kept)
    assert set(ids) != set(kept)
    tensors["d2t"] = torch.from_numpy(ids) - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(320, dtype=torch.bool)
    tensors["t2d"][torch.from_numpy(ids)] = True
    save_tensors(moved / "model.safetensors", tensors)
    at = context(toy, tmp_path / "again", warm_start=str(moved), **OTHER)
    at.config.__dict__["draft"] = at.config.draft.model_copy(update={"vocab_size": 60})
    distill.run(at)
    assert load_draft(at.out / "draft", toy.target).draft_ids().tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"layers": 1}, "num_layers 2, draft.layers asks for 1"),
        ({"vocab_size": 100}, "map of 192 tokens, draft.vocab_size asks for 100; a warm start keeps the map: set"),
        ({"fc_norm": False}, "fc_norm True, draft.fc_norm asks for False"),
        ({"intermediate_size": 64}, "intermediate_size 96, draft.intermediate_size asks for 64"),
    ],
)
def test_another_network_or_map_is_refused(toy: Toy, former: Path, tmp_path: Path, draft: dict, words: str) -> None:
    at = context(toy, tmp_path, warm_start=str(former), **OTHER)
    at.config.__dict__["draft"] = at.config.draft.model_copy(update=draft)
    with pytest.raises(ConfigError) as caught:
        distill.run(at)
    assert words in str(caught.value)
    assert "distill.warm_start=null starts a fresh draft" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(at.out.iterdir())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer_sha256", "0" * 64, "made with another tokenizer (000000000000, this target's is"),
        ("num_layers", 9, "made for another target: num_layers 9, this one has 4"),
    ],
)
def test_another_target_is_refused(toy: Toy, former: Path, tmp_path: Path, key: str, value: object, words: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(former, other)
    manifest.write_json(other / IDENTITY, {**manifest.read_json(other / IDENTITY), key: value})
    with pytest.raises(ConfigError) as caught:
        distill.run(context(toy, tmp_path, warm_start=str(other), **OTHER))
    assert words in str(caught.value)


def test_a_target_of_other_sizes_is_refused(toy: Toy, former: Path, tmp_path: Path) -> None:
    wide = make_toy(tmp_path / "wide", hidden=96, train=6, heldout=2)
    with pytest.raises(ConfigError, match="made for another target: target_hidden_size 64, this one has 96"):
        distill.run(context(wide, tmp_path, warm_start=str(former), **OTHER))


def test_other_weights_with_the_same_tokenizer_are_no_obstacle(
    toy: Toy, former: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(former, other)
    manifest.write_json(other / IDENTITY, {**manifest.read_json(other / IDENTITY), "fingerprint": "folder:before"})
    distill.run(context(toy, tmp_path, warm_start=str(other), **OTHER))
    assert "the target's files changed since" in capsys.readouterr().err
    (other / IDENTITY).unlink()
    distill.run(context(toy, tmp_path / "more", warm_start=str(other), **OTHER))
    assert "does not say which tokenizer" in capsys.readouterr().err


def test_the_flow_refuses_before_the_data_set_is_made(toy: Toy, former: Path, tmp_path: Path) -> None:
    at = context(toy, tmp_path, warm_start=str(former), **OTHER)
    values = at.config.model_dump(by_alias=True)
    values["dataset"] |= {"backend": "transformers"}
    values["bundle"] |= {"validate_in_vllm": False}
    values["flow"] |= {"min_free_gib": 0.0}
    launch = Launch(tmp_path, Config.model_validate(values), "default", (), "r", False)
    launch.base.mkdir(parents=True)
    assert preflight(launch)[:2] == ["dataset", "distill"]
    values["draft"] |= {"layers": 1}
    with pytest.raises(ConfigError, match=r"num_layers 2, draft\.layers asks for 1"):
        preflight(Launch(tmp_path, Config.model_validate(values), "default", (), "r", False))
    for unknown in ({"distill": {**values["distill"], "warm_start": "models:/m@champion"}}, {"target": {"model": "some/hub-name"}}):
        check_early(Config.model_validate({**values, **unknown}), tmp_path, tmp_path)


def test_what_a_path_may_be(former: Path, tmp_path: Path) -> None:
    wanted = (former / "draft").resolve()
    run = tmp_path / "run"
    shutil.copytree(former, run / "policy")
    assert find_draft(str(former), tmp_path) == find_draft(str(former / "draft"), tmp_path) == wanted
    assert find_draft("run", tmp_path) == (run / "policy" / "draft").resolve()
    assert find_draft("run/policy/draft/..", tmp_path) == find_draft("run", tmp_path)
    for source, words in (("nowhere", "no folder"), ("rum", "closest: 'run'"), (".", "holds no draft")):
        with pytest.raises(ConfigError, match=f"distill.warm_start: .*{words}"):
            find_draft(source, tmp_path)
    assert is_alias("models:/m@champion")
    assert not any(is_alias(source) for source in (None, "a@b", "models:/m/3"))


def configured(toy: Toy, source: str | None) -> Config:
    values = {"target": {"model": str(toy.target)}, "distill": {"warm_start": source}}
    return Config.model_validate(values)


def test_the_key_holds_the_drafts_hash(toy: Toy, former: Path, tmp_path: Path) -> None:
    step = STEPS["distill"]
    copy = tmp_path / "copy"
    shutil.copytree(former, copy)
    parts = [key_parts(step, configured(toy, source), tmp_path, tmp_path) for source in (None, str(copy))]
    assert "warm_start" not in parts[0]["extra"]
    (copy / "draft" / "model.safetensors").write_bytes((copy / "draft" / "model.safetensors").read_bytes() + b" ")
    changed = key_parts(step, configured(toy, str(copy)), tmp_path, tmp_path)
    assert changed["extra"]["warm_start"] != parts[1]["extra"]["warm_start"]
    assert {**changed, "extra": parts[1]["extra"]} == parts[1]
    assert "warm_start" not in key_parts(STEPS["policy"], configured(toy, str(copy)), tmp_path, tmp_path)["extra"]
    with pytest.raises(ConfigError, match="no folder"):
        key_parts(step, configured(toy, "gone"), tmp_path, tmp_path)


def test_an_alias_that_moved_alone_trains_nothing_again(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"hash": "a" * 64}
    monkeypatch.setattr(steps, "source_hash", lambda *_: now["hash"])
    step, made = STEPS["distill"], []
    monkeypatch.setattr(steps.Step, "load", lambda self: lambda context: made.append(self.name) or {})
    (tmp_path / "dataset").mkdir()
    manifest.write_manifest(tmp_path / "dataset", "dataset", {})
    config = configured(toy, "models:/m@champion")
    assert run_step("distill", config, tmp_path, tmp_path)
    now["hash"] = "b" * 64
    assert status(step, config, tmp_path, tmp_path).up_to_date
    assert not run_step("distill", config, tmp_path, tmp_path)
    assert status(step, configured(toy, "models:/m/2"), tmp_path, tmp_path).reason.startswith("config distill.warm_start")
    (tmp_path / "dataset" / "new").write_text("x")
    manifest.write_manifest(tmp_path / "dataset", "dataset", {})
    assert run_step("distill", config, tmp_path, tmp_path)
    kept = manifest.read_manifest(tmp_path / "distill")
    assert kept is not None
    assert kept["parts"]["extra"]["warm_start"] == "b" * 64
