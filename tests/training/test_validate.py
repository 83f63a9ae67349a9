"""Replayed acceptance against decoding one token at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle.draft.attention import PrefixAttention
from eagle.draft.model import DraftModel
from eagle.errors import DataError
from eagle.train.batches import collate
from eagle.train.features import FeatureStore
from eagle.train.validate import draft_matches, heldout_rows, replay_acceptance, walk
from tests.training.builders import Toy, make_draft, make_toy
from tests.training.test_draft import Plain


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"), heldout=5)


def decode_by_hand(model: DraftModel, store: FeatureStore, row: int, k: int) -> list[int]:
    """Accepted draft tokens of each round, decoding the row as a server would, keys in a list, one token at a time."""
    tokens, prompt = store.tokens(row).tolist(), store.rows[row].prompt_length
    aux, ids = store.aux(row).float(), model.draft_ids()
    plain = Plain(model)
    counts, done, last = [], 0, prompt  # `last`: the newest token that is known, sampled by the target
    while last + 1 < len(tokens):
        plain.cut(done)
        for t in range(done, last):  # step 0 over all positions whose states the target has made
            logits, _, hidden = plain.step(tokens[t + 1], plain.combine(aux[t]), t)
        done = last
        drafts = [int(ids[logits.argmax()])]
        for j in range(1, k):
            logits, _, hidden = plain.step(drafts[-1], hidden, last - 1 + j)
            drafts.append(int(ids[logits.argmax()]))
        accepted = 0
        while accepted < k and last + 1 + accepted < len(tokens) and drafts[accepted] == tokens[last + 1 + accepted]:
            accepted += 1
        counts.append(accepted)
        last += accepted + 1
    return counts


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("layers", [1, 2])
def test_replay_equals_decoding_by_hand(toy: Toy, k: int, layers: int) -> None:
    model = make_draft(toy.target, layers=layers, vocab_size=None)
    rows = heldout_rows(toy.store, 10)
    assert rows == [12, 13, 14, 15, 16]
    with torch.no_grad():  # a draft that is often right: its head favours the likeliest next tokens of these very rows
        teach(model, toy.store, rows)
    by_hand = [decode_by_hand(model, toy.store, row, k) for row in rows]
    counts = [count for row in by_hand for count in row]
    found = replay_acceptance(model, toy.store, rows, k, tokens_per_batch=80)
    assert found.rounds == len(counts)
    assert found.length == pytest.approx(1 + np.mean(counts))
    assert found.by_position == pytest.approx([np.mean([c > i for c in counts]) for i in range(k)])
    assert max(counts) >= 1
    assert min(counts) == 0


def teach(model: DraftModel, store: FeatureStore, rows: list[int]) -> None:
    """Fit the head by least squares so that some drafts match: random heads would accept nothing and prove little."""
    batch = collate(store, rows)
    positions = torch.arange(batch.tokens.shape[1] - 1).expand(len(rows), -1)
    normed, _ = model.step(batch.tokens[:, 1:], model.fuse(batch.aux[:, :-1]), positions, PrefixAttention())
    at, col = batch.anchors()
    keep = torch.arange(len(at)) % 4 != 0  # every fourth position stays unknown
    x, y = normed[at[keep], col[keep]], batch.tokens[at[keep], col[keep] + 2]
    one_hot = torch.nn.functional.one_hot(y, model.spec.vocab_size).float()
    model.lm_head.weight.copy_(torch.linalg.lstsq(x.T @ x + 0.1 * torch.eye(x.shape[1]), x.T @ one_hot).solution.T)


def test_positions_that_are_no_anchor_have_no_match(toy: Toy) -> None:
    batch = collate(toy.store, [12, 13])
    with torch.no_grad():
        matched = draft_matches(make_draft(toy.target), batch, 3)
    assert matched.shape == batch.tokens.shape
    anchors = torch.zeros_like(matched, dtype=torch.bool)
    anchors[batch.anchors()] = True
    assert (matched[~anchors] == 0).all()
    assert int(matched.max()) <= 3


@given(prompt=st.integers(1, 5), answer=st.integers(1, 30), k=st.integers(1, 4), seed=st.integers(0, 99), cut=st.integers(0, 5))
def test_walk_emits_every_token_once(prompt: int, answer: int, k: int, seed: int, cut: int) -> None:
    random = np.random.default_rng(seed)
    mask = np.zeros(prompt + answer + cut, dtype=bool)  # behind the answer: another turn of the user
    mask[prompt : prompt + answer] = True
    counts = walk(random.integers(0, k + 1, size=len(mask)), mask, prompt)
    emitted = 1 + sum(count + 1 for count in counts)  # the first token is the target's own
    assert answer <= emitted <= answer + 1  # the last round's bonus token may lie behind the row
    assert all(0 <= count <= k for count in counts)


def test_rows_are_spread_and_must_exist(toy: Toy, tmp_path: Path) -> None:
    assert heldout_rows(toy.store, 2) == [12, 14]
    empty = make_toy(tmp_path, train=2, heldout=0, tokens=3)
    with pytest.raises(DataError, match="no held-out row"):
        heldout_rows(empty.store, 4)
