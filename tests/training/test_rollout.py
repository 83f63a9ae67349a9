"""Rollouts against plain one-sequence forwards of target and draft, and against enumeration of every draft."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle.config import DraftConfig
from eagle.draft.io import target_embedding
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from eagle.target.load import load_target, target_dims
from eagle.target.taps import HiddenTaps
from eagle.train import objectives, rollout
from eagle.train.batches import Batch
from eagle.train.rollout import DraftPass, TreeVerifier
from tests.toys import tiny_target

AUX = (1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "t", layers=4, scale=6.0)


@pytest.fixture(scope="module")
def target(folder: Path) -> PreTrainedModel:
    return load_target(folder, "float32")


def make_draft(folder: Path, vocab: list[int], seed: int = 0) -> DraftModel:
    config = DraftConfig(layers=2, heads=4, kv_heads=2, head_dim=16, vocab_size=len(vocab))
    spec = DraftSpec.from_config(config, target_dims(folder), AUX)
    torch.manual_seed(seed)
    model = DraftModel(spec, target_embedding(folder, spec), np.array(vocab))
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.2)
    return model


def make_batch(target: PreTrainedModel, lengths: list[int], prompt: int, *, greedy: bool, seed: int = 0) -> Batch:
    """Rows continued by the target after random prompts (greedily or sampled), with exact features; k = 8."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(3, 320, (1, prompt), generator=g)
        while ids.shape[1] < length:
            logits = target(input_ids=ids).logits[0, -1]
            token = logits.argmax() if greedy else torch.multinomial(logits.softmax(0), 1, generator=g)[0]
            ids = torch.cat([ids, token.view(1, 1)], 1)
        rows.append(ids[0])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with HiddenTaps(target, AUX) as taps:
        logits = target(input_ids=tokens).logits
        aux = taps.concat()
    prob, index = logits.softmax(-1).topk(8)
    mask = (torch.arange(tokens.shape[1]) >= prompt) & (torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None])
    after = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    own = logits.log_softmax(-1).gather(2, after[:, :, None])[:, :, 0]
    return Batch(tuple(range(len(lengths))), tokens, torch.tensor(lengths), aux.float(), mask, index, prob, own)


def single_row(batch: Batch, row: int, until: int) -> Batch:
    names = ("tokens", "aux", "loss_mask", "topk_index", "topk_prob", "own")
    cut = {name: getattr(batch, name)[row : row + 1, :until] for name in names}
    return replace(batch, rows=(row,), lengths=torch.tensor([until]), **cut)


def test_tree_equals_one_plain_forward_per_chain(folder: Path, target: PreTrainedModel) -> None:
    batch = make_batch(target, [14, 9, 11], 4, greedy=False)
    rows, anchors = torch.tensor([0, 0, 0, 2]), torch.tensor([4, 4, 12, 9])  # two chains at one anchor, an empty row between
    chains = torch.randint(3, 320, (4, 3))
    vocab = torch.arange(5, 300, 7)
    with torch.autocast("cpu", torch.bfloat16):  # as in training: the target keeps its own arithmetic
        prob, best = TreeVerifier(target, vocab).probabilities(batch.tokens, rows, anchors, chains, 0.7)
    for n in range(4):
        ids = torch.cat([batch.tokens[rows[n], : anchors[n] + 1], chains[n]])
        logits = target(input_ids=ids[None]).logits[0, -4:]
        torch.testing.assert_close(prob[n], (logits / 0.7).softmax(-1)[:, vocab], rtol=1e-4, atol=1e-6)
        assert best[n].tolist() == logits.argmax(-1).tolist()


def test_greedy_paths_are_the_targets_own_greedy_text(target: PreTrainedModel) -> None:
    batch = make_batch(target, [16, 16], 5, greedy=True)
    rows, anchors = torch.tensor([0, 0, 1]), torch.tensor([5, 9, 7])
    path, prob = TreeVerifier(target, torch.arange(320)).greedy_paths(batch.tokens, rows, anchors, 3)
    for n in range(3):
        at = int(anchors[n])
        assert path[n].tolist() == batch.tokens[rows[n], at + 1 : at + 4].tolist()
        kept = prob[n].gather(1, batch.topk_index[rows[n], at : at + 3])
        torch.testing.assert_close(kept, batch.topk_prob[rows[n], at : at + 3], rtol=1e-4, atol=1e-6)


def test_a_round_sees_its_row_up_to_the_anchor_and_its_own_chain_only(folder: Path, target: PreTrainedModel) -> None:
    """Many rounds in a padded batch equal one round alone on the row cut at its anchor."""
    batch, model = make_batch(target, [14, 9], 4, greedy=False), make_draft(folder, list(range(3, 100)))
    rows, anchors = torch.tensor([0, 0, 1, 1]), torch.tensor([4, 12, 4, 7])
    tokens = torch.randint(3, 320, (2, 4))
    together = DraftPass(model, batch).chain(rows, anchors)
    seen = [together.logits()]
    for step in tokens:
        together.advance(step)
        seen.append(together.logits())
    for n in range(4):
        at = int(anchors[n])
        alone = DraftPass(model, single_row(batch, int(rows[n]), at + 1)).chain(torch.tensor([0]), torch.tensor([at]))
        torch.testing.assert_close(alone.logits()[0], seen[0][n], rtol=1e-4, atol=1e-5)
        for depth, step in enumerate(tokens[:, n], start=1):
            alone.advance(step[None])
            torch.testing.assert_close(alone.logits()[0], seen[depth][n], rtol=1e-4, atol=1e-5)


def test_accepted_along_rows_at_temperature_zero_counts_matches_of_the_argmax(folder: Path, target: PreTrainedModel) -> None:
    batch, model = make_batch(target, [20, 13], 4, greedy=True), make_draft(folder, list(range(3, 320)))
    with torch.no_grad():  # a draft that is often right: the target's head on the last tapped state
        model.lm_head.weight.copy_(target.get_output_embeddings().weight[3:320])
    start = DraftPass(model, batch)
    rows = torch.tensor([0] * 15 + [1] * 8)
    anchors = torch.cat([torch.arange(4, 19), torch.arange(4, 12)])
    counted = rollout.accepted_along_rows(start, rows, anchors, 3, 0.0, torch.Generator())
    for n in range(len(rows)):
        row, at, expected = int(rows[n]), int(anchors[n]), 0
        chain = start.chain(rows[n : n + 1], anchors[n : n + 1])
        for i in range(3):
            guess = int(start.ids[chain.logits().argmax(1)])
            if at + 1 + i >= batch.lengths[row] or guess != batch.tokens[row, at + 1 + i]:
                break
            expected += 1
            chain.advance(torch.tensor([guess]))
        assert counted[n] == expected


def test_accepted_along_rows_at_temperature_one_has_the_mean_of_rejection_sampling(folder: Path, target: PreTrainedModel) -> None:
    """Over answers y ~ p, the mean of min(1, q/p)(y) is alpha = sum min(p, q)."""
    batch, model = make_batch(target, [6], 4, greedy=False), make_draft(folder, list(range(3, 320)))
    p = target(input_ids=batch.tokens[:, :5]).logits[0, -1].softmax(0)
    prob, index = p.sort(descending=True)
    start = DraftPass(model, batch)
    alpha, _ = objectives.dense_terms(start.chain(torch.tensor([0]), torch.tensor([4])).logits(), p[3:320][None])
    draws = 3000
    g = torch.Generator().manual_seed(1)
    y = torch.multinomial(p, draws, replacement=True, generator=g)
    many = Batch(
        tuple(range(draws)), torch.cat([batch.tokens[:, :5].expand(draws, -1), y[:, None]], 1), torch.full((draws,), 6),
        batch.aux.expand(draws, -1, -1), batch.loss_mask.expand(draws, -1), index.expand(draws, 6, -1), prob.expand(draws, 6, -1),
        p[y].log()[:, None].expand(draws, 6),
    )
    counted = rollout.accepted_along_rows(DraftPass(model, many), torch.arange(draws), torch.full((draws,), 4), 1, 1.0, g).float()
    error = (alpha * (1 - alpha) / draws).sqrt().item()
    assert abs(counted.mean().item() - alpha.item()) < 4 * error


def walked(model: DraftModel, batch: Batch, temperature: float, seed: int) -> tuple[DraftPass, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    stretch = rollout.draw_stretch(batch, 8, 2, 1.5, g)
    start = DraftPass(model, stretch.batch)
    return start, *rollout.walk_rounds(start, stretch, 8, 2, temperature, g)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_walk_visits_the_rounds_that_serving_would_run(folder: Path, target: PreTrainedModel, temperature: float) -> None:
    batch, model = make_batch(target, [40, 9, 6], 4, greedy=temperature == 0), make_draft(folder, list(range(3, 320)))
    with torch.no_grad():
        model.lm_head.weight.copy_(target.get_output_embeddings().weight[3:320])
    for seed in range(6):
        start, rows, anchors = walked(model, batch, temperature, seed)
        _, *again = walked(model, batch, temperature, seed)
        assert rows.tolist() == again[0].tolist()
        assert anchors.tolist() == again[1].tolist()
        assert rows.tolist() == sorted(rows.tolist())
        for row in range(3):
            mine = anchors[rows == row]
            assert len(mine) <= 8
            assert all(4 <= at <= batch.lengths[row] - 2 for at in mine.tolist())
            if temperature == 0 and len(mine) > 1:
                whole = DraftPass(model, batch)  # cutting the batch must not have changed any count
                accepted = rollout.accepted_along_rows(whole, torch.full_like(mine, row), mine, 2, 0.0, torch.Generator())
                assert mine.diff().tolist() == (accepted[:-1] + 1).tolist()


def test_walk_starts_at_the_first_answer_token_often(folder: Path, target: PreTrainedModel) -> None:
    model, batch = make_draft(folder, list(range(3, 100))), make_batch(target, [40] * 4, 4, greedy=True)
    firsts = []
    for seed in range(8):
        _, rows, anchors = walked(model, batch, 0.0, seed)
        firsts += [int(anchors[rows == row][0]) for row in range(4) if bool((rows == row).any())]
    assert 4 in firsts
    assert max(firsts) > 20


def test_greedy_rounds_from_the_cache_equal_generated_ones(folder: Path, target: PreTrainedModel) -> None:
    batch, model = make_batch(target, [16, 12], 4, greedy=True), make_draft(folder, list(range(3, 250)))
    start, ends = DraftPass(model, batch), torch.tensor([2])
    rows, anchors = torch.tensor([0, 0, 1]), torch.tensor([5, 9, 6])
    cached = rollout.greedy_rounds(start, rows, anchors, 3, ends)
    made = rollout.greedy_rounds(start, rows, anchors, 3, ends, TreeVerifier(target, start.ids))
    assert cached.token.tolist() == made.token.tolist()
    assert cached.live.tolist() == made.live.tolist()
    for ours, other in zip(cached.logits, made.logits, strict=True):
        torch.testing.assert_close(ours, other)
    assert cached.topk_index is not None
    assert cached.topk_prob is not None
    assert made.dense is not None
    dense = made.dense.gather(2, cached.topk_index.clamp_min(0))
    torch.testing.assert_close(dense[cached.topk_index >= 0], cached.topk_prob[cached.topk_index >= 0], rtol=1e-4, atol=1e-6)


def test_positions_behind_the_end_are_not_live(folder: Path, target: PreTrainedModel) -> None:
    batch = replace(make_batch(target, [12], 4, greedy=True), tokens=torch.arange(100, 112)[None])
    start = DraftPass(make_draft(folder, sorted(set(range(3, 320)) - {106})), batch)
    rows, anchors = torch.zeros(4, dtype=torch.long), torch.tensor([5, 4, 8, 9])
    rounds = rollout.greedy_rounds(start, rows, anchors, 3, torch.tensor([109]))
    assert rounds.live.tolist() == [
        [True, False, False],  # token 106 is not in the draft vocabulary: it can only fail, nothing behind it is reached
        [True, True, False],
        [True, False, False],  # token 109 ends the text
        [True, True, False],  # the row has two more tokens
    ]
    assert rounds.token[:2].tolist() == [[-1, 103, 104], [102, -1, 103]]


def test_sampled_rounds_draw_from_q_and_are_judged_exactly(folder: Path, target: PreTrainedModel) -> None:
    batch, model = make_batch(target, [10], 4, greedy=False), make_draft(folder, [3, 7, 20, 41, 90, 200])
    start = DraftPass(model, batch)
    draws = 4000
    rows, anchors = torch.zeros(draws, dtype=torch.long), torch.full((draws,), 6)
    logits = start.chain(rows[:1], anchors[:1]).logits() / 0.5
    drawn = rollout.sample(logits, torch.Generator().manual_seed(3), draws)[0]
    share = torch.bincount(drawn, minlength=6) / draws
    q = logits[0].softmax(0)
    assert bool(((share - q).abs() < 4.5 * (q * (1 - q) / draws).sqrt() + 1e-9).all())

    few = rollout.sampled_rounds(
        start, rows[:5], anchors[:5], 3, torch.tensor([2]), TreeVerifier(target, start.ids), 0.5, torch.Generator().manual_seed(4)
    )
    assert few.dense is not None
    for n in range(5):
        ids = torch.cat([batch.tokens[0, :7], start.ids[few.token[n]][:2]])
        expected = (target(input_ids=ids[None]).logits[0, -3:] / 0.5).softmax(-1)[:, start.ids]
        torch.testing.assert_close(few.dense[n], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(few.logits[0][0], logits[0])


def every_draft(start: DraftPass, verifier: TreeVerifier, anchor: int, k: int) -> tuple[Tensor, objectives.PolicyTerms]:
    """q-probability of every draft of K tokens and its policy terms, at temperature 1."""
    size = len(start.ids)
    token = torch.tensor(list(itertools.product(range(size), repeat=k)))
    rows, anchors = torch.zeros(len(token), dtype=torch.long), torch.full((len(token),), anchor)
    dense, _ = verifier.probabilities(start.batch.tokens, rows, anchors, start.ids[token][:, :-1], 1.0)
    chain = start.chain(rows, anchors)
    parts = []
    for i in range(k):
        if i:
            chain.advance(start.ids[token[:, i - 1]])
        alpha, _ = objectives.dense_terms(chain.logits(), dense[:, i])
        log_q = objectives.log_probs_at(chain.logits(), token[:, i : i + 1]).squeeze(1)
        parts.append((alpha, log_q, dense[:, i].gather(1, token[:, i : i + 1]).squeeze(1).log()))
    alphas, log_q, log_p = (torch.stack(column, 1) for column in zip(*parts, strict=True))
    return log_q.sum(1).exp().detach(), objectives.policy_terms(alphas, log_q, log_p)


def test_estimator_is_unbiased_through_the_real_network(folder: Path, target: PreTrainedModel) -> None:
    """Mean over all drafts of value and gradient = E[L] and its derivative along a random direction of all weights."""
    batch = make_batch(target, [10], 4, greedy=False)
    vocab = batch.topk_index[0, 6, :4].sort().values.tolist()
    model, k = make_draft(folder, vocab).double(), 2
    batch = replace(batch, aux=batch.aux.double())
    verifier = TreeVerifier(target, model.draft_ids())
    chance, terms = every_draft(DraftPass(model, batch), verifier, 6, k)
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad((chance * terms.surrogate).sum(), parameters, allow_unused=True)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True) if g is not None)

    def length_at(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += step * d
            chance, terms = every_draft(DraftPass(model, batch), verifier, 6, k)
            for p, d in zip(parameters, direction, strict=True):
                p -= step * d
        return float((chance * terms.value).sum())

    eps = 1e-4
    numeric = (length_at(eps) - length_at(-eps)) / (2 * eps)
    assert abs(float(slope) - numeric) < 1e-3 * max(abs(numeric), 1e-3)
