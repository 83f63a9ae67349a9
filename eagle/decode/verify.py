"""Lossless verification of chain drafts: pure functions of probabilities, draft tokens and uniforms.

Greedy: a draft token is kept while it is the target's own choice. Sampling, for a draft token x drawn from q:

    token by token  x is accepted with probability min(1, p(x)/q(x)); at the first rejection the token comes from
                    norm((p - q)+) over the target's whole vocabulary, after full acceptance from p (Leviathan et al.
                    2023; Chen et al. 2023)
    as a block      the longest prefix that passes a test of the joint probabilities (Sun et al., arXiv:2403.10444)
    coupled         for drafts that draw nothing: the target draws its own token, and x is kept if it is that one

The output then has the target's distribution exactly, whatever q is, as long as x was really drawn from q. Every
function takes a last row of p for the token after the whole draft (the bonus token), or leaves it out: then a draft that
is accepted in full has no token after it, and more draft tokens can be verified in its place. Trees: eagle/decode/trees.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch


@dataclass(frozen=True)
class Verdict:
    """`accepted` [n] (int64): accepted draft tokens, 0..K. `following` [n] (int64): the token after them.

    `following` is -1 where all K are accepted and no bonus row was given.
    """

    accepted: Tensor
    following: Tensor


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


def verify_greedy(draft: Tensor, choices: Tensor) -> Verdict:
    """Compare draft [n, K] with the target's choices [n, K+1] (choice i follows the first i draft tokens), or [n, K]."""
    length = draft.shape[1]
    if choices.shape[1] == length:
        choices = torch.cat([choices, choices.new_full((len(choices), 1), -1)], dim=1)
    accepted = (draft == choices[:, :length]).long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, choices.gather(1, accepted[:, None])[:, 0])


def verify_coupled(draft: Tensor, p: Tensor, token_uniform: Tensor) -> Verdict:
    """Verify draft [n, K] that was chosen without randomness: the target draws, the draft is kept while it agrees.

    `p` [n, K+1, V] or [n, K, V]: the target's probabilities; `token_uniform` [n, K+1] or [n, K], one number per position.
    A draft token is accepted with probability p(x), the same as by rejection sampling with q = 1 at x, and the text is
    token for token the one that plain sampling draws with the same uniforms, whatever was drafted.
    """
    count, width, vocab_size = p.shape
    choices = draw(p.reshape(-1, vocab_size), token_uniform[:, :width].reshape(-1)) if width else draft
    return verify_greedy(draft, choices.reshape(count, width))


def verify_sampled(
    draft: Tensor, q_chosen: Tensor, q: Tensor | None, p: Tensor, ids: Tensor | None, accept_uniform: Tensor, token_uniform: Tensor
) -> Verdict:
    """Chain rejection sampling of draft [n, K] (target ids).

    `q_chosen` [n, K]: the draft's probability of each draft token. `q` [n, K, Vd]: its whole distributions over its
    own vocabulary, with `ids` [Vd] as in `scatter`; None = the draft was deterministic (q is 1 at the token).
    `p` [n, K+1, V] or [n, K, V]: the target's probabilities. `accept_uniform` [n, K] and `token_uniform` [n, K+1], in
    [0, 1): one number per position; of the latter the one where the last token will stand is used. On CUDA one fused
    kernel (kernels/rejection.py).
    """
    return Verdict(*dispatch.rejection(draft, q_chosen, q, p, ids, accept_uniform, token_uniform))


def verify_block(
    draft: Tensor, q_chosen: Tensor, q: Tensor | None, p: Tensor, ids: Tensor | None, accept_uniform: Tensor, token_uniform: Tensor
) -> Verdict:
    """Block verification (Sun et al., arXiv:2403.10444, algorithm 2); arguments as of `verify_sampled`.

    Never accepts fewer tokens in expectation than `verify_sampled`, whose distribution is the same. With x_1 .. x_K the
    draft, P_0 = 1 and P_i = min(1, P_{i-1} p(x_i)/q(x_i)), a prefix of i tokens passes with probability h_i:

        h_K = P_K,  h_i = R_i / (R_i + 1 - P_i),  R_i = sum_x (P_i p(x) - q(x))+  over the token after x_1 .. x_i

    The longest prefix that passes is kept; the token after it is drawn from norm((P_i p - q)+), after all K from p.
    """
    length, width = draft.shape[1], p.shape[1]
    if not length:
        return verify_sampled(draft, q_chosen, q, p, ids, accept_uniform, token_uniform)
    scale = _prefix_mass(draft, q_chosen, p)
    passes = accept_uniform < _block_acceptance(scale, draft, q, p, ids)
    places = torch.arange(1, length + 1, device=draft.device)
    accepted = (passes * places).amax(dim=1)
    rows = torch.arange(len(draft), device=draft.device)
    p_next = p[rows, accepted.clamp(max=width - 1)].double()
    scale = torch.cat([torch.ones_like(scale[:, :1]), scale], dim=1).gather(1, accepted[:, None])
    weights = residual(p_next * scale, _q_at(draft, q, accepted, ids, p_next))
    rejected = accepted < length
    number = token_uniform.gather(1, accepted.clamp(max=width - 1)[:, None])[:, 0]
    token = draw(torch.where(rejected[:, None], weights, p_next), number)
    return Verdict(accepted, token if width > length else torch.where(rejected, token, -1))


def _prefix_mass(draft: Tensor, q_chosen: Tensor, p: Tensor) -> Tensor:
    """Return P_1 .. P_K of `verify_block` [n, K], float64."""
    ratio = p[:, : draft.shape[1]].gather(2, draft[:, :, None])[:, :, 0].double() / q_chosen.double()
    mass, masses = torch.ones_like(ratio[:, 0]), []
    for i in range(draft.shape[1]):
        mass = (mass * ratio[:, i]).clamp(max=1.0)
        masses.append(mass)
    return torch.stack(masses, dim=1)


def _block_acceptance(scale: Tensor, draft: Tensor, q: Tensor | None, p: Tensor, ids: Tensor | None) -> Tensor:
    """Return h_1 .. h_K of `verify_block` [n, K] for scale = P_1 .. P_K, float64."""
    later = p[:, 1 : draft.shape[1]].double()
    if q is None:
        inside, q_inside = later.gather(2, draft[:, 1:, None]), torch.ones_like(later[:, :, :1])
    else:
        inside, q_inside = later if ids is None else later.index_select(2, ids), q[:, 1:].double()
    # Outside the draft's vocabulary q is 0: all of P_i p counts there.
    outside = 0.0 if inside is later else (later.sum(dim=2) - inside.sum(dim=2)).clamp_min(0.0)
    part = scale[:, :-1]
    mass = part * outside + (part[:, :, None] * inside - q_inside).clamp_min(0.0).sum(dim=2)
    # P_i = 1 with no mass left over: the next p is q, so a longer prefix passes anyway.
    passing = torch.where(part == 1, 1.0, mass / (mass + 1 - part))
    return torch.cat([passing, scale[:, -1:]], dim=1)


def _q_at(draft: Tensor, q: Tensor | None, accepted: Tensor, ids: Tensor | None, like: Tensor) -> Tensor:
    """Return the draft's distribution [n, V] (float64) of the first token that was not accepted, or of the last one."""
    at = accepted.clamp(max=draft.shape[1] - 1)
    if q is None:
        return torch.zeros_like(like).scatter_(1, draft.gather(1, at[:, None]), 1.0)
    return scatter(q[torch.arange(len(q), device=q.device), at].double(), ids, like.shape[1])
