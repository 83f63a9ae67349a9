"""The rivals step: what it makes, what it shares with distill, EAGLE's loss against a loop, and what an interruption costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle import manifest
from eagle.config import Config
from eagle.decode.medusa import load_medusa
from eagle.draft.attention import PrefixAttention
from eagle.draft.io import load_draft
from eagle.errors import DataError
from eagle.steps import OPTIONAL_STEPS, StepContext, run_step, status
from eagle.target.load import target_dims
from eagle.train import distill, rivals
from eagle.train.batches import collate
from eagle.train.features import ensure_features
from eagle.train.validate import heldout_rows, replay_acceptance
from tests.training.builders import Toy, make_draft, make_toy

STEPS = 16
WEIGHTS = ("medusa/model.safetensors", "eagle2/draft/model.safetensors")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    made = make_toy(tmp_path_factory.mktemp("toy"), train=24, heldout=6)
    manifest.write_manifest(made.dataset, "dataset", {})
    return made


def config(toy: Toy, distilling: dict[str, Any] | None = None, **changes: Any) -> Config:
    """A small profile; `changes` are keys of the rivals section, `distilling` of the distill section."""
    shared = {
        "tokens_per_step": 200, "warmup_steps": 3, "top_k": 8, "eval_every": 8, "eval_sequences": 6, "checkpoint_every": 4,
        "learning_rate": 3e-3,
    }
    return Config.model_validate({
        "paths": {"cache": str(toy.cache)}, "runtime": {"threads": 1, "seed": 3, "device": "cpu"},
        "target": {"model": str(toy.target), "dtype": "float32"},
        "draft": {"layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 96, "vocab_size": 200},
        "distill": shared | (distilling or {}),
        "rivals": {
            "medusa_heads": 3, "medusa_nodes": 9, "medusa_steps": STEPS, "medusa_minutes": 5.0, "eagle2_steps": STEPS,
            "eagle2_minutes": 5.0,
        } | changes,
    })


def base_for(toy: Toy, folder: Path) -> Path:
    """A run folder with the toy's data set."""
    folder.mkdir(parents=True)
    (folder / "dataset").symlink_to(toy.dataset)
    return folder


@pytest.fixture(scope="module")
def finished(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder in which the step is complete; nobody writes into it."""
    base = base_for(toy, tmp_path_factory.mktemp("runs") / "whole")
    assert run_step("rivals", config(toy), toy.target.parent, base)
    return base


def test_both_rivals_can_be_loaded_and_have_their_papers_form(toy: Toy, finished: Path) -> None:
    out = finished / "rivals"
    heads = load_medusa(out / "medusa")
    assert len(heads.heads) == 3
    assert heads.aux_layer == 4
    assert 1 <= len(heads.paths) <= 9
    draft = load_draft(out / "eagle2" / "draft", toy.target)
    spec, dims = draft.spec, target_dims(toy.target)
    assert (spec.num_layers, spec.aux_layers, spec.fc_norm, spec.norm_output) == (1, (4,), False, False)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (dims.num_heads, dims.num_kv_heads, dims.head_dim)
    assert (spec.hidden_size, spec.intermediate_size) == (dims.hidden_size, dims.intermediate_size)
    assert torch.equal(draft.fc.weight, torch.eye(dims.hidden_size))  # the layer reads the target's state itself
    assert torch.equal(draft.draft_ids(), heads.ids)
    assert len(heads.ids) == 192  # the answers hold fewer distinct tokens than draft.vocab_size


def test_the_figures_are_those_of_what_was_kept(toy: Toy, finished: Path) -> None:
    metrics = manifest.read_json(finished / "rivals" / manifest.METRICS)
    heads = load_medusa(finished / "rivals" / "medusa")
    assert metrics["medusa"]["top1_by_head"] == [ranks[0] for ranks in heads.accuracies]
    assert metrics["medusa"]["parameters"] == sum(p.numel() for p in heads.parameters())
    assert (metrics["medusa"]["steps"], metrics["eagle2"]["steps"]) == (STEPS, STEPS)
    assert metrics["medusa"]["train_tokens"] == metrics["eagle2"]["train_tokens"] > 0  # the same batches
    assert metrics["medusa"]["seconds"] > 0
    assert metrics["eagle2"]["seconds"] > 0
    draft = load_draft(finished / "rivals" / "eagle2" / "draft", toy.target)
    store = ensure_features(toy.dataset, toy.target, (4,), 8, toy.cache, "float32")
    found = replay_acceptance(draft.eval(), store, heldout_rows(store, 6), 3, autocast=True)
    assert metrics["eagle2"]["acceptance_length"] == pytest.approx(found.length)


def test_it_is_said_whose_implementation_it_is_and_what_it_was_made_of(toy: Toy, finished: Path) -> None:
    said = manifest.read_json(finished / "rivals" / "rivals.json")
    assert said["data"] == manifest.read_manifest(toy.dataset)["content_hash"]  # type: ignore[index]
    assert set(said["rivals"]) == {"medusa", "eagle2"}
    for name, paper in (("medusa", "2401.10774"), ("eagle2", "2406.16858")):
        about = said["rivals"][name]
        assert "our implementation" in about["method"]
        assert paper in about["paper"]
        assert about["minutes"] >= 0
    assert said["rivals"]["medusa"]["settings"]["heads"] == 3
    settings = said["rivals"]["eagle2"]["settings"]
    assert settings["distill"]["stages"] == [{"depth": 1, "steps": STEPS}]
    assert settings["draft"]["layers"] == 1
    assert settings["feature_weight"] == config(toy).rivals.eagle2_feature_weight


def test_it_is_up_to_date_until_something_it_reads_changes(toy: Toy, finished: Path) -> None:
    root, step = toy.target.parent, OPTIONAL_STEPS["rivals"]
    assert not run_step("rivals", config(toy), root, finished)
    own = {"stages": [{"depth": 2, "steps": 7}], "max_minutes": 1.0, "step_decay": 0.5}
    assert status(step, config(toy, own), root, finished).up_to_date
    assert status(step, config(toy, {"weight_decay": 0.5}), root, finished).reason == "config distill.weight_decay: 0.01 -> 0.5"
    assert status(step, config(toy, medusa_steps=5), root, finished).reason == "config rivals.medusa_steps: 16 -> 5"


def test_what_is_not_in_the_key_changes_nothing(toy: Toy) -> None:
    dims = target_dims(toy.target)
    own = {"stages": [{"depth": 2, "steps": 7}], "max_minutes": 1.0, "step_decay": 0.5}
    other = config(toy, own).model_copy(update={"draft": config(toy).draft.model_copy(update={"layers": 3, "fc_norm": False})})
    assert rivals.medusa_settings(config(toy), dims) == rivals.medusa_settings(other, dims)
    one, two = (rivals.eagle2_config(given, dims) for given in (config(toy), other))
    assert (one.target, one.draft, one.distill) == (two.target, two.draft, two.distill)
    assert one.distill.learning_rate == config(toy).distill.learning_rate
    assert one.distill.max_minutes == config(toy).rivals.eagle2_minutes


class Killed(BaseException):
    """Stands for the end of the process: no handler of the step catches it."""


def same_weights(one: Path, two: Path) -> None:
    for name in WEIGHTS:
        first, second = (load_file(base / "rivals" / name) for base in (one, two))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name


def test_killed_between_the_rivals_the_finished_one_is_kept(
    toy: Toy, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = base_for(toy, tmp_path / "run"), toy.target.parent
    trained: list[str] = []
    real = rivals.train_medusa

    def counted(*given: Any) -> Any:
        trained.append("medusa")
        return real(*given)

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(rivals, "train_medusa", counted)
    with monkeypatch.context() as patch:
        patch.setattr(distill, "run", killed)
        with pytest.raises(Killed):
            run_step("rivals", config(toy), root, base)
    assert not (base / "rivals").exists()
    assert status(OPTIONAL_STEPS["rivals"], config(toy), root, base).reason == "interrupted, will resume"
    assert run_step("rivals", config(toy), root, base)
    assert trained == ["medusa"]
    same_weights(base, finished)
    assert not (base / "rivals.work").exists()


def test_killed_within_a_rival_the_draft_goes_on_and_the_heads_start_again(
    toy: Toy, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = base_for(toy, tmp_path / "run"), toy.target.parent
    save, loss = rivals.save_medusa, rivals.eagle2_loss
    seen: list[int] = []

    def half_saved(folder: Path, heads: Any) -> None:
        save(folder, heads)
        raise Killed

    def counted(*given: Any) -> Any:
        seen.append(1)
        if len(seen) == 11:
            raise Killed
        return loss(*given)

    monkeypatch.setattr(rivals, "eagle2_loss", counted)
    with monkeypatch.context() as patch:
        patch.setattr(rivals, "save_medusa", half_saved)
        with pytest.raises(Killed):
            run_step("rivals", config(toy), root, base)
    assert not seen
    with pytest.raises(Killed):
        run_step("rivals", config(toy), root, base)
    assert run_step("rivals", config(toy), root, base)
    assert len(seen) == 11 + STEPS - 8  # the checkpoint of step 8
    same_weights(base, finished)


def test_the_loss_is_that_of_a_loop_over_positions(toy: Toy) -> None:
    model = make_draft(toy.target, layers=1, fc_norm=False, norm_output=False, norm_before_residual=True, vocab_size=None)
    batch = collate(toy.store, [0, 5, 7])
    loss, right = rivals.eagle2_loss(model, batch, 2.5, model.target_to_draft())
    crosses, distances = [], []
    for at in range(len(batch.tokens)):
        length = int(batch.lengths[at])
        tokens, states = batch.tokens[at, :length], model.fuse(batch.aux[at : at + 1, :length])
        normed, total = model.step(tokens[None, 1:], states[:, :-1], torch.arange(length - 1)[None], PrefixAttention())
        log_q = model.logits(normed)[0].log_softmax(-1)
        for t in range(length - 2):
            if batch.loss_mask[at, t + 2]:
                index, prob = batch.topk_index[at, t + 1], batch.topk_prob[at, t + 1]
                crosses.append(-(prob * log_q[t, index]).sum())
                goal = states[0, t + 1].detach()
                apart = (total[0, t] - goal / (goal.square().mean() + 1e-5).sqrt()).abs()
                distances.append(torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean())
    plain = torch.stack(crosses).mean() + 2.5 * torch.stack(distances).mean()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(value, list(model.parameters())) for value in (loss, plain))
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5 * float(b.abs().max()) + 1e-7, msg=name)
    without, same = rivals.eagle2_loss(model, batch, 0.0, model.target_to_draft())
    cross, share = distill.distillation_loss(model, batch, 1, 0.8, model.target_to_draft())
    assert float(without.detach()) == pytest.approx(float(cross.detach()))
    assert right == same == share


def test_a_data_set_without_manifest_is_told(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no readable manifest"):
        rivals.run(StepContext(config(toy), tmp_path, {"dataset": tmp_path}, tmp_path, tmp_path))
