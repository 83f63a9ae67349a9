"""Lossless verification of chain drafts: pure functions of probabilities, draft tokens and uniforms.

Greedy: a draft token is kept while it is the target's own choice. Sampling: chain rejection sampling (Leviathan et
al. 2023; Chen et al. 2023): token x drawn from q is accepted with probability min(1, p(x)/q(x)); at the first
rejection the token comes from norm((p - q)+) over the target's whole vocabulary, after full acceptance from p. The
output then has the target's distribution exactly, whatever q is, as long as x was really drawn from q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """`accepted` [n] (int64): accepted draft tokens, 0..K. `following` [n] (int64): the token after them."""

    accepted: Tensor
    following: Tensor


def verify_greedy(draft: Tensor, choices: Tensor) -> Verdict:
    """Compare draft [n, K] with the target's choices [n, K+1] (choice i follows the first i draft tokens)."""
    agree = draft == choices[:, : draft.shape[1]]
    accepted = agree.long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, choices.gather(1, accepted[:, None])[:, 0])


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, p/q), the probability that a token drawn with probability q > 0 is accepted. Any shape."""
    return (p / q).clamp(max=1.0)


def scatter(q: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return q [n, Vd] over the target's vocabulary [n, V]; `ids` [Vd] are target ids, None = the same vocabulary."""
    return q if ids is None else q.new_zeros(len(q), vocab_size).index_copy_(1, ids, q)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return (p - q)+ [n, V], not normalised; p itself where that has no mass (p = q up to rounding)."""
    positive = (p - q).clamp_min(0.0)
    return torch.where(positive.sum(dim=-1, keepdim=True) > 0, positive, p)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index per row with probability proportional to weights [n, V], by inversion of uniform [n] in [0, 1).

    Only an index of positive weight is ever returned. Sums are in float64. Returns int64 [n].
    """
    cumulative = weights.double().cumsum(dim=-1)
    # The first index whose cumulative weight exceeds u * total; u <= 1 - 2^-52 keeps that below the total.
    return torch.searchsorted(cumulative, (uniform.double() * cumulative[:, -1])[:, None], right=True)[:, 0]


def verify_sampled(
    draft: Tensor, q_chosen: Tensor, q: Tensor | None, p: Tensor, ids: Tensor | None, accept_uniform: Tensor, token_uniform: Tensor
) -> Verdict:
    """Chain rejection sampling of draft [n, K] (target ids).

    `q_chosen` [n, K]: the draft's probability of each draft token. `q` [n, K, Vd]: its whole distributions over its
    own vocabulary, with `ids` [Vd] as in `scatter`; None = the draft was deterministic (q is 1 at the token).
    `p` [n, K+1, V]: the target's probabilities. `accept_uniform` [n, K] and `token_uniform` [n, K+1], in [0, 1): one
    number per position; of the latter the one where the last token will stand is used.
    """
    count, length = draft.shape
    rows = torch.arange(count, device=draft.device)
    if not length:
        return Verdict(torch.zeros_like(rows), draw(p[:, 0], token_uniform[:, 0]))
    p_chosen = p[:, :length].gather(2, draft[:, :, None])[:, :, 0]
    accepted = (accept_uniform < acceptance(p_chosen, q_chosen)).long().cumprod(dim=1).sum(dim=1)
    at = accepted.clamp(max=length - 1)
    p_next = p[rows, accepted].double()
    if q is None:
        q_next = torch.zeros_like(p_next).scatter_(1, draft.gather(1, at[:, None]), 1.0)
    else:
        q_next = scatter(q[rows, at].double(), ids, p.shape[-1])
    weights = torch.where((accepted < length)[:, None], residual(p_next, q_next), p_next)
    return Verdict(accepted, draw(weights, token_uniform[rows, accepted]))
