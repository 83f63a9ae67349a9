"""Acceptance of a draft, measured on the target's own greedy answers without running the target again.

At temperature 0 the target's output does not depend on the draft, and the row holds the target's hidden states at every
position. So each round that decoding would make can be replayed: the draft proposes K tokens from its own argmax, those
equal to the row's tokens are accepted, and the round after it starts behind the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle.draft.attention import ChainAttention, PrefixAttention
from eagle.draft.model import DraftModel
from eagle.errors import DataError
from eagle.train.batches import Batch, collate
from eagle.train.features import FeatureStore

_HEAD_ROWS = 1024  # rows of logits made at once


@dataclass(frozen=True)
class Acceptance:
    """`length` = 1 + accepted / rounds (the bonus token counts); `by_position[i]` = rounds that accepted draft token i / rounds."""

    length: float
    by_position: tuple[float, ...]
    rounds: int

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {"acceptance_length": self.length, "acceptance_by_position": list(self.by_position), "rounds": self.rounds}


def heldout_rows(store: FeatureStore, limit: int) -> list[int]:
    """Return up to `limit` held-out rows with a greedy answer of at least two tokens, spread evenly over all of them.

    Raises DataError when there is none.
    """
    rows = [i for i in store.select("heldout") if store.rows[i].temperature == 0.0 and store.loss_mask(i)[2:].any()]
    if not rows:
        raise DataError("no held-out row is answered at temperature 0; raise dataset.heldout_fraction or the number of prompts")
    if len(rows) <= limit:
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


@torch.inference_mode()
def replay_acceptance(
    model: DraftModel, store: FeatureStore, rows: Sequence[int], k: int, *, autocast: bool = False, tokens_per_batch: int = 4096
) -> Acceptance:
    """Return what greedy decoding with K = `k` draft tokens would accept on `rows`, which must hold greedy answers.

    The first round starts at the prompt's end; a round accepts a <= k tokens and the next one starts a + 1 tokens later.
    Rounds end with the row: draft tokens beyond its last token cannot be judged and count as not accepted.
    `autocast` runs matrix products in bf16.
    """
    device = model.lm_head.weight.device
    accepted_at = np.zeros(k, dtype=np.int64)
    rounds = 0
    with model.half_precision(autocast):
        for batch_rows in length_batches(store, rows, tokens_per_batch):
            batch = collate(store, batch_rows, str(device))
            matched = draft_matches(model, batch, k).cpu().numpy()
            for at, row in enumerate(batch_rows):
                for count in walk(matched[at], store.loss_mask(row), store.rows[row].prompt_length):
                    accepted_at[:count] += 1
                    rounds += 1
    if not rounds:
        return Acceptance(1.0, (0.0,) * k, 0)
    return Acceptance(1.0 + float(accepted_at.sum()) / rounds, tuple(float(n) / rounds for n in accepted_at), rounds)


def length_batches(store: FeatureStore, rows: Sequence[int], tokens: int) -> list[list[int]]:
    """Return `rows` of the store by length, in batches of at most `tokens` tokens with padding; a longer row comes alone."""
    batches: list[list[int]] = []
    for i in sorted(rows, key=lambda i: store.rows[i].length):  # ascending length: the newest row is the longest of its batch
        if batches and (len(batches[-1]) + 1) * store.rows[i].length <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def draft_matches(model: DraftModel, batch: Batch, k: int) -> Tensor:
    """Return [B, T] int64: how many draft tokens of a round starting at position t equal the row's tokens x[t+2], x[t+3], ...

    Positions whose first draft token is not an answer's token have 0. The draft's tokens are its own argmax; as long as
    they match they are the row's tokens, and a round is dropped at its first mismatch.
    """
    width = batch.tokens.shape[1]
    result = torch.zeros_like(batch.tokens)
    rows, cols = batch.anchors()
    if not len(rows):
        return result
    prefix = PrefixAttention()
    positions = torch.arange(width - 1, device=batch.tokens.device).expand(len(batch.tokens), -1)
    normed, feedback = model.step(batch.tokens[:, 1:], model.fuse(batch.aux[:, :-1]), positions, prefix)
    normed, feedback = normed[rows, cols], feedback[rows, cols]
    chain: ChainAttention | None = None
    for j in range(k):
        label = cols + 2 + j
        hit = (greedy_tokens(model, normed) == batch.tokens[rows, label.clamp_max(width - 1)]) & (label < batch.lengths[rows])
        result[rows[hit], cols[hit]] += 1
        if j == k - 1 or not bool(hit.any()):
            break
        rows, cols, feedback = rows[hit], cols[hit], feedback[hit]
        if chain is None:
            chain = ChainAttention(prefix, rows, cols)
        else:
            chain.keep(hit)
        out, back = model.step(batch.tokens[rows, cols + 2 + j][None], feedback[None], (cols + 1 + j)[None], chain)
        normed, feedback = out[0], back[0]
    return result


def greedy_tokens(model: DraftModel, normed: Tensor) -> Tensor:
    """Return the target ids [N] int64 of the draft's likeliest tokens for normed [N, H]; the lowest id wins a tie."""
    parts = [model.logits(normed[at : at + _HEAD_ROWS]).argmax(-1) for at in range(0, len(normed), _HEAD_ROWS)]
    return model.to_target(torch.cat(parts))


def walk(matched: NDArray[np.int64], mask: NDArray[np.bool_], prompt_length: int) -> list[int]:
    """Return the accepted counts of the rounds that decoding makes, in order.

    matched [T]: accepted draft tokens of a round starting at each position; mask [T]: answer tokens. The first round
    starts at position prompt_length - 1: the answer's first token is the target's own.
    """
    gap = np.flatnonzero(~mask[prompt_length:])
    end = prompt_length + int(gap[0]) if len(gap) else len(mask)
    counts = []
    t = prompt_length - 1
    while t + 2 < end:
        count = min(int(matched[t]), end - (t + 2))
        counts.append(count)
        t += count + 1
    return counts
