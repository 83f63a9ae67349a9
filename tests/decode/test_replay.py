"""The engine accepts, round by round, what the offline replay of the held-out answers says."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eagle.decode.drafting import EagleDrafter
from eagle.decode.engine import Engine
from eagle.draft.attention import PrefixAttention
from eagle.draft.model import DraftModel
from eagle.target.load import load_target
from eagle.train.batches import collate
from eagle.train.features import FeatureStore
from eagle.train.validate import replay_acceptance
from tests.training.builders import make_draft, make_toy

K = 3


class RoundedDrafter(EagleDrafter):
    """The feature store keeps hidden states in bf16; so that both see the same numbers, this drafter rounds too."""

    def fuse(self, aux: Tensor) -> Tensor:
        return super().fuse(aux.bfloat16().float())


def overfit(net: DraftModel, store: FeatureStore, rows: list[int], steps: int = 30) -> None:
    """Make a draft that is right about half of the time on these rows."""
    batch = collate(store, rows)
    table = net.target_to_draft()
    at, where = batch.anchors()
    labels = table[batch.tokens[at, where + 2]]
    known = labels >= 0
    positions = torch.arange(batch.tokens.shape[1] - 1).expand(len(rows), -1)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        normed, _ = net.step(batch.tokens[:, 1:], net.fuse(batch.aux[:, :-1]), positions, PrefixAttention())
        loss = torch.nn.functional.cross_entropy(net.logits(normed[at, where])[known], labels[known])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    net.eval().requires_grad_(False)


def test_engine_equals_replay(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, train=1, heldout=8, tokens=24)
    target = load_target(toy.target, "float32")
    net = make_draft(toy.target)
    rows = [i for i in toy.store.select("heldout") if toy.store.rows[i].length - toy.store.rows[i].prompt_length > 1]
    overfit(net, toy.store, rows)
    wanted = replay_acceptance(net, toy.store, rows, K)
    texts = [toy.store.tokens(i).tolist() for i in rows]
    starts = [toy.store.rows[i].prompt_length for i in rows]
    drafter = RoundedDrafter(net, target.get_input_embeddings().weight, batch=8, max_length=80)
    engine = Engine(target, drafter, max_length=60, batch=8)
    counts: list[int] = []
    for text, start in zip(texts, starts, strict=True):
        # One token more than the answer has: where a single one is lacking, the engine does not draft.
        result = engine.generate([text[:start]], max_new_tokens=len(text) - start + 1, draft_tokens=K)
        assert result.tokens[0][:-1] == text[start:]
        at = start + 1  # tokens known before the round
        for accepted in result.accepted[0]:
            if at == len(text):
                break
            counts.append(min(accepted, len(text) - at))  # the replay cannot judge tokens beyond the answer's end
            at += accepted + 1
    assert len(counts) == wanted.rounds
    assert 1.0 + sum(counts) / len(counts) == wanted.length
    assert 1.2 < wanted.length < K + 1, "a test of nothing: the draft is never, or always, right"
    assert tuple(sum(c > i for c in counts) / len(counts) for i in range(K)) == wanted.by_position
