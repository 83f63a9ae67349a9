"""Stage 1's loss on one batch of rounds: which objective, over which steps, with the head's logits in slabs of rows.

Owns how the formulas of `objectives` are put together over the steps of a training-time test; the formulas are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle.config import DistillConfig
from eagle.draft.model import DraftModel
from eagle.train import objectives
from eagle.train.batches import Batch

RowObjective = Callable[[Tensor, Tensor, Tensor], Tensor]  # (logits [N, Vd], draft ids [N, k], probabilities [N, k]) -> [N]
Steps = Iterable[tuple[Tensor, Tensor, Tensor]]  # what `distill.unroll` yields
DPACE = "dpace"


def row_objective(config: DistillConfig) -> RowObjective:
    """Return the objective of single positions that `distill.objective` names; ValueError for one of whole rounds."""
    if config.objective == DPACE:
        raise ValueError(f"{DPACE} weighs the positions of a round by each other; use dpace_loss")
    if config.objective == "lk_hybrid":
        return partial(objectives.lk_hybrid, eta=config.lk_eta)
    found: RowObjective = getattr(objectives, config.objective)
    return found


def token_loss(
    model: DraftModel, batch: Batch, normed: Tensor, rows: Tensor, label: Tensor, draft_of: Tensor,
    objective: RowObjective = objectives.soft_cross_entropy, head_rows: int | None = None,
) -> tuple[Tensor, float]:
    """Return (mean objective, share of right argmax tokens) of normed [N, H] that predict tokens x[rows, label], N > 0.

    draft_of [V] int64: draft id of each target id, or -1. `head_rows`: see `in_slabs`; None = all at once.
    """
    token, index = draft_of[batch.tokens[rows, label]], draft_of[batch.topk_index[rows, label - 1]]
    prob = batch.topk_prob[rows, label - 1]

    def terms(logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        return objective(logits, index[at], prob[at]), is_argmax(logits, token[at])

    loss, right = in_slabs(model, normed, terms, head_rows)
    return loss.mean(), float(right.mean())


def dpace_loss(
    model: DraftModel, batch: Batch, steps: Steps, draft_of: Tensor, smoothing: float, head_rows: int | None = None
) -> tuple[Tensor, list[float]]:
    """Return (sum_i w_i CE_i, mean over rounds; share of right argmax tokens by step) with D-PACE's weights.

    CE_i = -log q_i(y_i), nats, of the data's token at step i, 0 where it is not in the draft vocabulary; w: see
    `objectives.dpace_weights`. The round of a position is known by its first label, label - step.
    """
    place = torch.full(batch.tokens.shape, -1, device=batch.tokens.device)
    logs, known, live, right = [], [], [], []
    for k, (normed, rows, label) in enumerate(steps):
        if k == 0:
            count = len(rows)
            place[rows, label] = torch.arange(count, device=place.device)
        token, here = draft_of[batch.tokens[rows, label]], (place[rows, label - k],)
        log_q, hit = in_slabs(model, normed, partial(_token_terms, token), head_rows)
        nowhere = torch.zeros(count, dtype=torch.bool, device=place.device)
        logs.append(log_q.new_zeros(count).index_put(here, log_q))
        known.append(nowhere.index_put(here, token >= 0))
        live.append(nowhere.index_put(here, torch.ones_like(token, dtype=torch.bool)))
        right.append(float(hit.sum()) / max(len(rows), 1))
    log_q = torch.stack(logs, 1)
    path = log_q.exp().masked_fill(~torch.stack(known, 1), 0.0)
    weights = objectives.dpace_weights(path, torch.stack(live, 1), smoothing)
    return -(weights * log_q).sum(1).mean(), right


def _token_terms(token: Tensor, logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
    return objectives.log_probs_at(logits, token[at][:, None]).squeeze(1), is_argmax(logits, token[at])


@torch.no_grad()
def is_argmax(logits: Tensor, token: Tensor) -> Tensor:
    """Return 1.0 where `token` [N] (draft ids, -1 = none) has the largest of logits [N, Vd], else 0.0; [N] float32."""
    at_token = logits.gather(1, token.clamp_min(0)[:, None]).squeeze(1)
    return ((at_token == logits.amax(-1)) & (token >= 0)).float()  # amax: 4 times faster than argmax


def in_slabs(
    model: DraftModel, normed: Tensor, terms: Callable[[Tensor, slice], tuple[Tensor, Tensor]], head_rows: int | None
) -> tuple[Tensor, Tensor]:
    """Return `terms(logits, rows)`, two tensors [N], of the head's logits for normed [N, H].

    Above `head_rows` positions (None = never) the logits are made for so many at a time and thrown away, and made again
    for the gradient: a third more work in the head, and never more than one slab of logits in memory.
    """
    if head_rows is None or len(normed) <= head_rows:
        return terms(model.logits(normed), slice(0, len(normed)))
    head = model.head()

    def slab(part: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        return terms(head(part), at)

    parts = []
    for begin in range(0, len(normed), head_rows):
        at = slice(begin, min(begin + head_rows, len(normed)))
        parts.append(checkpoint(slab, normed[at], at, use_reentrant=False, preserve_rng_state=False))
    first, second = zip(*parts, strict=True)
    return torch.cat(first), torch.cat(second)
