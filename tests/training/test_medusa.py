"""Medusa heads: labels and loss against a loop over positions, training on a toy target, the features it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle.dataset.read import Row, write_shards
from eagle.decode.medusa import choose_paths
from eagle.errors import ConfigError, StepFailed
from eagle.target.load import load_target
from eagle.train import medusa
from eagle.train.batches import collate
from eagle.train.features import FeatureStore, ensure_features
from eagle.train.medusa import MedusaSettings, backward, measure_accuracies, new_heads, questions, train_medusa
from tests.training.builders import Toy, make_toy

SETTINGS = MedusaSettings(
    heads=3, vocab_size=150, nodes=9, ranks=4, steps=40, tokens_per_step=200, learning_rate=3e-3, warmup_steps=3, max_minutes=5.0,
    seed=3,
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"), train=9, heldout=3)


@pytest.fixture(scope="module")
def store(toy: Toy) -> FeatureStore:
    return ensure_features(toy.dataset, toy.target, (4,), 1, toy.cache, "float32", batch_tokens=128)


def cycles(toy: Toy, folder: Path) -> FeatureStore:
    """Features of rows in which every token has one follower, in a cycle of 30: a head's token follows from the last one."""
    cycle = 3 + np.random.default_rng(0).permutation(30)
    for split, offsets in (("train", range(0, 30, 2)), ("heldout", range(1, 30, 6))):
        rows = []
        for offset in offsets:
            tokens = [int(t) for t in np.roll(cycle, -offset)[:24]]
            rows.append(Row(f"{split}{offset}", "file:toy", "toy", 0.0, tokens, [0] * 4 + [1] * 20, 4, "length"))
        write_shards(folder, split, rows, 1000)  # type: ignore[arg-type]
    return ensure_features(folder, toy.target, (4,), 1, folder / "cache", "float32", batch_tokens=128)


def test_heads_start_as_the_targets_own_head(toy: Toy, store: FeatureStore) -> None:
    heads = new_heads(store, toy.target, SETTINGS)
    target = load_target(toy.target, "float32")
    row = store.select("heldout")[0]
    tokens = torch.from_numpy(store.tokens(row)).long()[None]
    with torch.inference_mode():
        expected = target(input_ids=tokens).logits[0][:, heads.ids]
        for head in heads.heads:
            found = head(heads.normed(store.aux(row)))
            assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())  # the features are bf16


def test_labels_and_loss_are_those_of_a_loop_over_positions(toy: Toy, store: FeatureStore) -> None:
    heads = new_heads(store, toy.target, SETTINGS)
    rows = store.select("train")[:3]
    batch = collate(store, rows)
    table = {int(i): place for place, i in enumerate(heads.ids)}
    draft_of = torch.tensor([table.get(i, -1) for i in range(store.vocab_size)])
    wanted_loss = 0.0
    asked = list(questions(heads, batch, draft_of))
    assert len(asked) == 3
    for k, (head, (hidden, label)) in enumerate(zip(heads.heads, asked, strict=True), start=1):
        states, labels = [], []
        for row in rows:
            tokens, mask = store.tokens(row), store.loss_mask(row)
            for t in range(len(tokens) - 1 - k):
                if mask[t + 2] and mask[t + 1 + k]:
                    states.append(heads.normed(store.aux(row)[t]))
                    labels.append(table.get(int(tokens[t + 1 + k]), -1))
        assert label.tolist() == labels
        assert torch.equal(hidden, torch.stack(states))
        known = torch.tensor(labels) >= 0
        chances = head(torch.stack(states)[known]).detach().log_softmax(-1)
        wanted_loss += 0.5**k * -float(chances.gather(1, torch.tensor(labels)[known][:, None]).mean())
    assert backward(heads, batch, draft_of, 0.5) == pytest.approx(wanted_loss, rel=1e-4)
    for parameter in heads.parameters():
        assert parameter.grad is not None
        assert bool((parameter.grad != 0).any())


def test_training_lowers_the_loss_and_the_heads_learn_what_comes_later(toy: Toy, tmp_path: Path) -> None:
    store = cycles(toy, tmp_path)
    settings = replace(SETTINGS, vocab_size=40, steps=60)
    trained = train_medusa(store, toy.target, settings)
    assert len(trained.losses) == 60
    assert trained.tokens > 60 * 100
    assert np.mean(trained.losses[-5:]) < 0.3 * np.mean(trained.losses[:5])
    heads = trained.heads
    untrained = measure_accuracies(new_heads(store, toy.target, settings), store, store.select("heldout"), 4)
    assert [len(ranks) for ranks in heads.accuracies] == [4, 4, 4]
    for before, after in zip(untrained, heads.accuracies, strict=True):
        assert before[0] < 0.2  # chance is 1 in 30
        assert after[0] > 0.9
        assert sum(after) <= 1.0
    assert heads.paths == choose_paths(heads.accuracies, 9)
    assert heads.paths[:3] == ((0,), (0, 0), (0, 0, 0))
    assert heads.aux_layer == 4
    assert train_medusa(store, toy.target, settings).losses == trained.losses
    assert train_medusa(store, toy.target, replace(settings, seed=4, steps=3)).losses != trained.losses[:3]


def test_the_accuracies_are_shares_by_rank(toy: Toy, store: FeatureStore) -> None:
    heads = new_heads(store, toy.target, replace(SETTINGS, heads=1))
    rows = store.select("heldout")
    hits, tokens = np.zeros(4), 0
    for row in rows:
        ids, mask = store.tokens(row), store.loss_mask(row)
        for t in range(len(ids) - 2):
            if mask[t + 2]:
                best = heads.ids[heads.heads[0](heads.normed(store.aux(row)[t])[None])[0].topk(4).indices]
                hits += best.numpy() == ids[t + 2]
                tokens += 1
    assert measure_accuracies(heads, store, rows, 4)[0] == pytest.approx((hits / tokens).tolist(), abs=1.5 / tokens)


def test_the_time_budget_ends_training(toy: Toy, store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spent(medusa.Pace):
        def step_done(self, seconds: float) -> None:
            super().step_done(40.0)

    monkeypatch.setattr(medusa, "Pace", Spent)
    assert len(train_medusa(store, toy.target, replace(SETTINGS, max_minutes=1.0)).losses) == 2


def test_features_of_other_layers_and_broken_training_are_told(toy: Toy, store: FeatureStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the features are those of layers .*, heads need \(4,\)"):
        train_medusa(toy.store, toy.target, SETTINGS)
    with pytest.raises(StepFailed, match="lower the learning rate"):
        train_medusa(store, toy.target, replace(SETTINGS, learning_rate=1e38, clip_norm=1e38, autocast=False))
