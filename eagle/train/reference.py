"""The stage-1 draft, frozen: how far stage 2 has moved away from it, and what it would have had accepted."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from eagle.draft.model import DraftModel
from eagle.train import reward, rollout
from eagle.train.batches import Batch
from eagle.train.rollout import DraftPass, Origin, Rounds

KL_ROWS = 2  # rows of a batch in which the divergence is measured: an estimate at an eighth of the cost of all


class Reference:
    """A frozen copy of a draft, which shares the embedding where that is the target's. Runs in the caller's autocast."""

    def __init__(self, model: DraftModel) -> None:
        shared = {} if model.spec.own_embedding else {id(model.embed_tokens): model.embed_tokens}
        self.model: DraftModel = copy.deepcopy(model, shared)
        self.model.requires_grad_(False).eval()

    @torch.no_grad()
    def kl(self, rounds: Rounds) -> float:
        """Return KL(q || q_reference), nats, mean over the live positions of the rounds in the first KL_ROWS rows with any.

        At the rounds' temperature and along their tokens, so over the draft's own prefixes where it sampled them.
        """
        origin = _origin(rounds)
        chosen = origin.rows.unique()[:KL_ROWS]
        here = torch.isin(origin.rows, chosen)
        rows = torch.searchsorted(chosen, origin.rows[here])
        few = Origin(_some_rows(origin.batch, chosen), rows, origin.anchors[here], origin.path[here])
        theirs = rollout.along(DraftPass(self.model, few.batch), few, rounds.temperature)
        live, total = rounds.live[here], 0.0
        for i, reference in enumerate(theirs):
            log_q = rounds.logits[i][here].float().log_softmax(1)
            apart = (log_q.exp() * (log_q - reference.float().log_softmax(1))).sum(1)
            total += float((apart * live[:, i]).sum())
        return total / max(int(live.sum()), 1)

    @torch.no_grad()
    def alphas(self, rounds: Rounds) -> Tensor:
        """Return [N, K]: the frozen draft's overlaps (T > 0) or path probabilities (T = 0) along the rounds."""
        origin = _origin(rounds)
        logits = rollout.along(DraftPass(self.model, origin.batch), origin, rounds.temperature)
        return reward.alphas(replace(rounds, logits=logits))


def _origin(rounds: Rounds) -> Origin:
    if rounds.origin is None:
        raise ValueError("rounds without origin cannot be run again")
    return rounds.origin


def _some_rows(batch: Batch, chosen: Tensor) -> Batch:
    lengths = batch.lengths[chosen]
    until = int(lengths.max())
    cut = {name: getattr(batch, name)[chosen, :until] for name in ("tokens", "aux", "loss_mask", "topk_index", "topk_prob", "own")}
    return replace(batch, rows=tuple(batch.rows[i] for i in chosen.tolist()), lengths=lengths, **cut)
