"""The cached features against the target's own output, and what happens when making them goes wrong."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.dataset.read import load_rows
from eagle.errors import DataError, PreflightError
from eagle.target.load import load_target
from eagle.train import features
from eagle.train.batches import BatchPlan, collate, trainable
from eagle.train.features import FeatureStore, ensure_features, predicting, top_probabilities
from tests.toys import tiny_target
from tests.training.builders import Toy, make_toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


def test_features_are_the_targets_own(toy: Toy) -> None:
    model = load_target(toy.target, "float32")
    rows = [(split, row) for split in ("train", "heldout") for row in load_rows(toy.dataset, split)]
    assert [r.id for r in toy.store.rows] == [row.id for _, row in rows]
    assert toy.store.select("heldout") == list(range(12, 16))
    for number, (_, row) in enumerate(rows):
        ids = torch.tensor([row.input_ids])
        with torch.inference_mode():
            out = model(input_ids=ids, output_hidden_states=True)
        assert toy.store.tokens(number).tolist() == row.input_ids
        assert toy.store.loss_mask(number).tolist() == [bool(m) for m in row.loss_mask]
        states = torch.cat([out.hidden_states[i][0] for i in (1, 2)], -1)  # ids 2, L/2, L-3 of a target of 4 layers
        torch.testing.assert_close(toy.store.aux(number).float(), states, rtol=0.01, atol=0.01)  # kept in bf16
        prob, index = out.logits[0].softmax(-1).topk(8, dim=-1)
        kept_index, kept_prob = toy.store.targets(number)
        answer = slice(row.prompt_length - 1, None)
        np.testing.assert_allclose(kept_prob[answer], prob[answer], atol=2e-3)
        assert (kept_index[answer, 0] == index[answer, 0].numpy()).all()
        assert (kept_prob[: row.prompt_length - 1] == 0).all()
        assert (kept_prob.astype(np.float32).sum(1) <= 1.001).all()
        log_p = out.logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        begin = row.prompt_length - 1
        np.testing.assert_allclose(toy.store.own_log_probs(number)[begin:-1], log_p[begin:], rtol=1e-4, atol=1e-5)
        assert (toy.store.own_log_probs(number)[[*range(begin), -1]] == 0).all()


def test_a_second_call_computes_nothing(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "load_target", lambda *a, **k: pytest.fail("the target was loaded again"))
    again = ensure_features(toy.dataset, toy.target, (1, 2), 8, toy.cache, "float32")
    assert again.folder == toy.store.folder


def test_an_interrupted_run_goes_on_at_the_next_shard(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SHARD_TOKENS", 100)
    compute = features._compute_shard
    done: list[int] = []

    def killed_in_the_second(model, rows, layers, k, folder, number, batch_tokens, track):  # type: ignore[no-untyped-def]
        if number == 1 and len(done) == 1:
            raise KeyboardInterrupt
        done.append(number)
        return compute(model, rows, layers, k, folder, number, batch_tokens, track)

    monkeypatch.setattr(features, "_compute_shard", killed_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        ensure_features(toy.dataset, toy.target, (1, 2), 8, tmp_path, "float32")
    assert not [p for p in (tmp_path / "features").iterdir() if (p / "features.json").exists()]
    done.append(-1)
    store = ensure_features(toy.dataset, toy.target, (1, 2), 8, tmp_path, "float32")
    assert done.count(0) == 1
    assert len(done) == len({row.shard for row in store.rows}) + 1 > 4
    for i in range(len(store.rows)):
        torch.testing.assert_close(store.aux(i), toy.store.aux(i), rtol=0.02, atol=0.01)  # other batches, other last bits


def test_rows_that_are_not_finite_are_left_out(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = toy.store.tokens(3)[1].item()
    load = features.load_target

    def broken(*args, **kwargs):  # type: ignore[no-untyped-def]
        model = load(*args, **kwargs)
        model.model.embed_tokens.weight.data[poisoned] = float("nan")
        return model

    monkeypatch.setattr(features, "load_target", broken)
    store = ensure_features(toy.dataset, toy.target, (1, 2), 8, tmp_path, "float32")
    hit = [i for i in range(len(toy.store.rows)) if poisoned in toy.store.tokens(i)]
    assert 3 in hit
    assert store.dropped == len(hit) == len(toy.store.rows) - len(store.rows)
    assert all(torch.isfinite(store.aux(i).float()).all() for i in range(len(store.rows)))
    kept = [i for i in range(len(toy.store.rows)) if i not in hit]
    assert all((store.tokens(new) == toy.store.tokens(old)).all() for new, old in enumerate(kept))


def test_no_room_and_wrong_target(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(PreflightError, match="GiB are free"):
        ensure_features(toy.dataset, toy.target, (1, 2), 8, tmp_path, "float32")
    monkeypatch.undo()
    other = tiny_target(tmp_path / "small", vocab_size=300)
    with pytest.raises(DataError, match="was it made with this target"):
        ensure_features(toy.dataset, other, (1, 2), 8, tmp_path, "float32")


def test_old_stores_are_forgotten(toy: Toy, tmp_path: Path) -> None:
    names = []
    for k in (2, 3, 4):
        names.append(ensure_features(toy.dataset, toy.target, (1, 2), k, tmp_path, "float32").folder)
    assert [folder.is_dir() for folder in names] == [False, True, True]
    assert FeatureStore(names[2]).top_k == 4


@settings(max_examples=30, deadline=None)
@given(vocab=st.integers(3, 700), k=st.integers(1, 6), rows=st.integers(0, 5), seed=st.integers(0, 99))
def test_top_probabilities_of_the_whole_vocabulary(vocab: int, k: int, rows: int, seed: int) -> None:
    k = min(k, vocab)
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    following = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    index, prob, own = top_probabilities(logits, lambda x: x, k, following)
    expected = logits.double().softmax(-1).topk(k, dim=-1)
    assert torch.equal(index.long(), expected.indices)
    torch.testing.assert_close(prob.double(), expected.values, rtol=1e-3, atol=1e-4)
    log_p = logits.double().log_softmax(-1).gather(1, following[:, None])[:, 0]
    torch.testing.assert_close(own.double(), log_p, rtol=1e-5, atol=1e-5)


def test_positions_that_are_judged() -> None:
    mask = np.array([0, 0, 1, 1, 0, 0, 1], dtype=bool)
    assert predicting(mask).tolist() == [1, 2, 5, 6]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(3, 60), min_size=1, max_size=40), tokens=st.integers(16, 200), seed=st.integers(0, 9))
def test_every_epoch_visits_each_row_once(lengths: list[int], tokens: int, seed: int) -> None:
    rows = list(range(100, 100 + len(lengths)))
    plan = BatchPlan(rows, lengths, tokens, seed)
    seen: list[int] = []
    step = 0
    while len(seen) < 3 * len(rows):
        batch = plan.at(step)
        longest = max(lengths[i - 100] for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= tokens
        seen += batch
        step += 1
    for epoch in range(3):
        assert sorted(seen[epoch * len(rows) : (epoch + 1) * len(rows)]) == rows
    fresh = BatchPlan(rows, lengths, tokens, seed)
    assert fresh.at(step - 1) == plan.at(step - 1)  # a resumed run asks for a late step first
    assert fresh.at(0) == plan.at(0)


def test_batches(toy: Toy) -> None:
    rows = [2, 0, 13]
    batch = collate(toy.store, rows)
    for at, i in enumerate(rows):
        length = toy.store.rows[i].length
        assert batch.tokens[at, :length].tolist() == toy.store.tokens(i).tolist()
        assert not batch.loss_mask[at, length:].any()
        assert torch.equal(batch.aux[at, :length], toy.store.aux(i))
        np.testing.assert_array_equal(batch.topk_prob[at, :length].numpy(), toy.store.targets(i)[1].astype(np.float32))
    anchors = set(zip(*(x.tolist() for x in batch.anchors()), strict=True))
    expected = {
        (at, t)
        for at, i in enumerate(rows)
        for t in range(toy.store.rows[i].prompt_length - 2, toy.store.rows[i].length - 2)
    }
    assert anchors == expected
    assert trainable(toy.store, [0, 1, 2]) == [0, 1, 2]
    with pytest.raises(DataError, match="no training row"):
        BatchPlan([], [], 10, 0)
