"""Policy gradients from sampled drafts and accept bits: REINFORCE in groups, and the naive form kept as an ablation.

Owns formulas only. Notation of `objectives`: drafts x ~ q, accept bits b_i (a coin of min(1, p_i/q_i)(x_i) at T > 0, the
match with the target's greedy token at T = 0), the accepted tokens from i on R_i = b_i (1 + R_{i+1}), reach
W_i = prod_{j<i} b_j. M drafts in groups of `size` drafts of one anchor, contiguous.

    grad E[L] = E[ sum_i W_i (g_i R_i - c_i) grad log q_i(x_i) ]

g_i = 1 at T = 0, where acceptance does not depend on q. At T > 0 it does, and d/dq of q min(1, p/q) is 1[q < p]: so
g_i = 1[q_i(x_i) < p_i(x_i)] removes the bias of REINFORCE. Proof: `objectives.policy_terms` with b for its expectations; a
token with g_i = 1 is accepted with certainty, so g_i R_i = g_i (1 + R_{i+1}). The naive form puts g_i = 1 there too: it
takes the accept bits for a reward that the draft has no part in. Nothing flows after the first rejection.

c_i may depend on anything but x_i and what follows it: then E[c_i grad log q_i] = 0 and it changes the variance only.
Sources: REINFORCE (Williams 1992) with leave-one-out baseline (Kool et al. 2019); groups of adjacent prefixes and a frozen
reference draft, GTO (arXiv 2509.22134); clipped ratio, PPO (arXiv 1707.06347).
"""

from __future__ import annotations

import torch
from torch import Tensor


def reward_to_go(hits: Tensor) -> Tensor:
    """Return R [M, K] float32: accepted tokens from each position on, for accept bits [M, K] bool."""
    out = torch.zeros(hits.shape[0], hits.shape[1] + 1, device=hits.device)
    for i in range(hits.shape[1] - 1, -1, -1):
        out[:, i] = hits[:, i] * (1.0 + out[:, i + 1])
    return out[:, :-1]


def reach(hits: Tensor) -> Tensor:
    """Return W [M, K] float32: 1 where no token before was rejected, for accept bits [M, K] bool."""
    passed = hits.cumprod(1)[:, :-1].float()
    return torch.cat([torch.ones_like(hits[:, :1], dtype=torch.float32), passed], 1)


def leave_one_out(credit: Tensor, reached: Tensor, size: int) -> Tensor:
    """Return c [M, K]: the mean credit of the group's other drafts that came as far; 0 where there is none.

    credit, reached [M, K]: W_i g_i R_i and W_i.
    """
    credits, counts = (x.view(-1, size, x.shape[1]) for x in (credit, reached))
    others = (counts.sum(1, keepdim=True) - counts).clamp_min(1.0)
    return ((credits.sum(1, keepdim=True) - credits) / others).flatten(0, 1)


def adjacent(credit: Tensor, reached: Tensor, size: int, rows: Tensor) -> Tensor:
    """Return c [M, K]: the mean credit at the anchors just before and after in the same row; 0 where there is none.

    credit, reached as in `leave_one_out`; rows [M / size] int64: the row of each anchor, anchors of a row in text order.
    """
    sums = [x.view(-1, size, x.shape[1]).sum(1) for x in (credit, reached)]
    same = (rows[1:] == rows[:-1])[:, None]
    near = []
    for x in sums:
        total = torch.zeros_like(x)
        total[1:] += x[:-1] * same
        total[:-1] += x[1:] * same
        near.append(total)
    return (near[0] / near[1].clamp_min(1.0)).repeat_interleave(size, 0)


def promised(alphas: Tensor) -> Tensor:
    """Return c [M, K]: the tokens still to come if every acceptance were alphas[:, i] [M, K], sum_{n=1}^{K-i} alpha_i^n.

    With a frozen reference draft's alphas it depends on the prefix only: GTO's reference, per position.
    """
    k = alphas.shape[1]
    return torch.stack([torch.stack([alphas[:, i] ** n for n in range(1, k - i + 1)]).sum(0) for i in range(k)], 1)


def advantages(hits: Tensor, gains: Tensor, baseline: Tensor) -> Tensor:
    """Return A [M, K] = W_i (g_i R_i - c_i); hits [M, K] bool, gains [M, K] (g) and baseline [M, K] (c)."""
    return reach(hits) * (gains * reward_to_go(hits) - baseline)


def saved_drafts(live: Tensor) -> Tensor:
    """Return [M, K] float32: how many of the K - i positions after each live one were not proposed, since the draft had ended.

    live [M, K] bool. With a cost of c per proposed token, c times this is the cost's part of the advantage: proposed after
    i = K - i - saved, and K - i is a baseline. It flows also after a rejection: drafting comes before verification.
    """
    after = live.flip(1).cumsum(1).flip(1) - live.long()
    ahead = torch.arange(live.shape[1] - 1, -1, -1, device=live.device)
    return (ahead - after) * live


def clipped_surrogate(log_q: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return sum_i min(rho A, clip(rho, 1 - e, 1 + e) A), [M], rho = q_i / q_old,i of the drawn tokens (PPO).

    log_q [M, K] differentiable; old [M, K] the same when the drafts were drawn; e = `clip`. At rho = 1 the gradient is
    A grad log q: the plain policy gradient.
    """
    ratio = (log_q - old).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage).sum(1)
