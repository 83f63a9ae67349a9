"""What one update of stage 2 optimises on given rounds, by method, and what is reported of it.

exact: the expected accepted length itself (`objectives`). group and naive: sampled drafts and accept bits (`group`). All
keep the cross-entropy anchor and share the rounds' format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.config import PolicyConfig
from eagle.train import group, objectives, rollout
from eagle.train.rollout import Rounds


@dataclass(frozen=True)
class Judged:
    """Sampled drafts of a step: token [M, K] draft ids, their log q [M, K] when drawn, advantage [M, K]; none has gradient.

    M = N at temperature > 0. At temperature 0 M = N group_size: every position is drawn along the greedy path, which is
    all of a draft that counts, since nothing flows after the first token that leaves the path.
    """

    token: Tensor
    log_q: Tensor
    advantage: Tensor


@dataclass(frozen=True)
class Objective:
    """What one update optimises. `loss` = -surrogate + weight * anchor; the floats are means over the rounds.

    `expected` E[L] of the rollouts, tokens a round (bonus not counted); `accepted` tokens really accepted (T = 0: the
    draft's argmax; T > 0: coin tosses); `reward` = accepted (group, naive: of the sampled drafts; exact: expected) - cost *
    proposed; `anchor` soft cross-entropy, nats a position. `judged`: the drafts, for further updates of the same rounds.
    """

    loss: Tensor
    expected: float
    accepted: float
    reward: float
    anchor: float
    judged: Judged | None = None


@dataclass(frozen=True)
class _Terms:
    """Of N rounds: alpha [N, K] (0 behind the end), anchor, and at T > 0 log q, log p [N, K] of the drawn tokens."""

    alpha: Tensor
    anchor: Tensor
    log_q: Tensor
    log_p: Tensor


def objective(
    rounds: Rounds, config: PolicyConfig, generator: torch.Generator, judged: Judged | None = None, reference: Tensor | None = None
) -> Objective:
    """Return the loss on `rounds` and what to report of them. The anchor is the mean over live positions.

    `judged`: what the first update of these rounds returned; `reference` [N, K]: the frozen draft's alphas along the
    rounds, for `policy.baseline` reference.
    """
    terms = _terms(rounds)
    cold = rounds.temperature == 0
    if cold:
        exact = value = objectives.expected_accepted_length(terms.alpha)
        hits = torch.stack([z.argmax(1) for z in rounds.logits], 1) == rounds.token
    else:
        estimate = objectives.policy_terms(terms.alpha, terms.log_q, terms.log_p)
        exact, value = estimate.surrogate, estimate.value
        chance = (terms.log_p - terms.log_q.detach()).clamp_max(0.0).exp()
        hits = torch.rand(chance.shape, generator=generator).to(chance.device) < chance
    hits = hits & rounds.live
    accepted, mean = _mean_accepted(hits), value.detach().mean()
    cost = config.token_cost * float(rounds.live.sum(1).float().mean())
    if config.method == "exact":
        saved = 0.0 if cold else config.token_cost * (group.saved_drafts(rounds.live) * terms.log_q).sum(1)
        surrogate, reward = exact + saved, float(mean) - cost
    else:
        surrogate, judged, sampled = _sampled(rounds, terms, hits, config, generator, judged, reference)
        reward = sampled - cost
    loss = -surrogate.mean() + config.anchor_weight * terms.anchor
    return Objective(loss, float(mean), accepted, reward, float(terms.anchor.detach()), judged)


def alphas(rounds: Rounds) -> Tensor:
    """Return [N, K], detached: the overlaps (T > 0) or path probabilities (T = 0) of the rounds' logits."""
    return _terms(rounds).alpha.detach()


def _terms(rounds: Rounds) -> _Terms:
    live = rounds.live.to(torch.float32)
    alphas, entropies, log_q, log_p = [], [], [], []
    for i, logits in enumerate(rounds.logits):
        token = rounds.token[:, i]
        if rounds.dense is not None:
            alpha, entropy = objectives.dense_terms(logits, rounds.dense[:, i])
        elif rounds.topk_index is not None and rounds.topk_prob is not None:
            entropy = objectives.soft_cross_entropy(logits, rounds.topk_index[:, i], rounds.topk_prob[:, i])
        if rounds.temperature == 0:
            alpha = objectives.path_probability(logits, token)
        elif rounds.dense is not None:
            log_q.append(objectives.log_probs_at(logits, token[:, None]).squeeze(1))
            log_p.append(rounds.dense[:, i].gather(1, token[:, None]).squeeze(1).log())
        alphas.append(alpha)
        entropies.append(entropy)
    anchor = (torch.stack(entropies, 1) * live).sum() / live.sum().clamp_min(1.0)
    nothing = live.new_zeros(0)
    logs = [torch.stack(part, 1) if part else nothing for part in (log_q, log_p)]
    return _Terms(torch.stack(alphas, 1) * live, anchor, *logs)


def _mean_accepted(hits: Tensor) -> float:
    return float(hits.long().cumprod(1).sum(1).float().mean())


def _sampled(
    rounds: Rounds, terms: _Terms, hits: Tensor, config: PolicyConfig, generator: torch.Generator, judged: Judged | None,
    reference: Tensor | None,
) -> tuple[Tensor, Judged, float]:
    """Return (surrogate [M], the drafts, their mean accepted tokens); `hits` [N, K]: the coins of rounds at T > 0."""
    size, cold, live = config.group_size, rounds.temperature == 0, rounds.live
    token, log_q = rounds.token, terms.log_q
    if cold:
        if judged is None:
            drawn = [rollout.sample(z.detach().float(), generator, size) for z in rounds.logits]
            token = torch.stack(drawn, 2).flatten(0, 1)
        else:
            token = judged.token
        by_anchor = token.view(-1, size, token.shape[1])
        logs = [objectives.log_probs_at(z, by_anchor[:, :, i]) for i, z in enumerate(rounds.logits)]
        log_q = torch.stack(logs, 2).flatten(0, 1)
        live = live.repeat_interleave(size, 0)
        hits = (token == rounds.token.repeat_interleave(size, 0)) & live
    sampled = _mean_accepted(hits)
    if judged is None:
        gains = torch.ones_like(log_q) if cold or config.method == "naive" else (log_q < terms.log_p).to(log_q.dtype)
        anchors = rounds.origin.rows if rounds.origin is not None else torch.arange(len(rounds.token), device=token.device)
        rows = anchors if cold else anchors[::size]
        if reference is not None and cold:
            reference = reference.repeat_interleave(size, 0)
        with torch.no_grad():
            advantage = group.advantages(hits, gains, _baseline(hits, gains, config, rows, reference)) * live
            if not cold:
                advantage = advantage + config.token_cost * group.saved_drafts(live)
        judged = Judged(token, log_q.detach(), advantage)
    return group.clipped_surrogate(log_q, judged.log_q, judged.advantage, config.clip_ratio), judged, sampled


def _baseline(hits: Tensor, gains: Tensor, config: PolicyConfig, rows: Tensor, reference: Tensor | None) -> Tensor:
    reached = group.reach(hits)
    credit = reached * gains * group.reward_to_go(hits)
    if config.baseline == "adjacent":
        return group.adjacent(credit, reached, config.group_size, rows)
    if config.baseline == "reference":
        if reference is None:
            raise ValueError("policy.baseline 'reference' needs the reference draft's alphas")
        return group.promised(reference)
    return group.leave_one_out(credit, reached, config.group_size)
