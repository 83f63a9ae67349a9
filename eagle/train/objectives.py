"""Training objectives on draft logits: soft cross-entropy, overlap, expected accepted length and its policy gradient.

Owns the formulas only: no model, no files. Notation: p target, q = softmax(logits) draft, both over the draft
vocabulary; a target token outside it has draft index -1, keeps its mass in p (never renormalised) and can never be accepted.

Sums run in float32 (float64 for float64 logits) whatever the dtype of the logits. The functions save the logits
they are given and one number a row; each backward pass makes one tensor of the logits' size, so [2000, 8192] logits
never have more than one copy beside them.

Sources: alpha = sum min(p, q) = 1 - TV(p, q) (Leviathan et al. 2023); gradients of the overlap with respect to logits,
LK losses (arXiv 2602.23881); accepted length along the target's greedy path, D-PACE (arXiv 2605.18810).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import kernel_for, launch_of

ROW_BYTES = 4 << 20  # working set of one slab of rows: small enough to stay in a core's cache

__all__ = [
    "PolicyTerms", "dense_terms", "dpace_weights", "expected_accepted_length", "forward_kl", "lk_hybrid", "log_probs_at",
    "negative_log_overlap", "overlap", "path_probability", "policy_terms", "soft_cross_entropy", "total_variation",
]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _slabs(logits: Tensor) -> list[slice]:
    rows = max(1, ROW_BYTES // (4 * max(logits.shape[1], 1)))
    return [slice(at, min(at + rows, logits.shape[0])) for at in range(0, logits.shape[0], rows)]


def _log_normaliser(logits: Tensor) -> Tensor:
    """Return log sum exp over the last axis, [N], in the wide dtype, a slab of rows at a time."""
    out = torch.empty(logits.shape[0], dtype=_wide(logits.dtype), device=logits.device)
    for rows in _slabs(logits):
        torch.logsumexp(logits[rows].to(out.dtype), dim=-1, out=out[rows])
    return out


class _LogProbsAt(torch.autograd.Function):
    """log softmax gathered at a few indices a row: the gradient is written in one pass, without a saved softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor) -> Tensor:
        norm = _log_normaliser(logits)
        ctx.save_for_backward(logits, index, norm)
        return logits.gather(1, index).to(norm.dtype) - norm[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, index, norm = ctx.saved_tensors
        (grad,) = grads
        total = grad.sum(1, keepdim=True)
        out = torch.empty_like(logits)
        for rows in _slabs(logits):
            slab = (logits[rows].to(norm.dtype) - norm[rows, None]).exp_().mul_(-total[rows])
            out[rows] = slab.scatter_add_(1, index[rows], grad[rows])
        return out, None


class _DenseTerms(torch.autograd.Function):
    """(sum min(p, q), -sum p log q) with p given on the whole draft vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, prob: Tensor) -> tuple[Tensor, Tensor]:
        norm = _log_normaliser(logits)
        alpha, entropy = torch.empty_like(norm), torch.empty_like(norm)
        for rows in _slabs(logits):
            log_q = logits[rows].to(norm.dtype) - norm[rows, None]
            p = prob[rows].to(norm.dtype)
            # 0 * (-inf) would be NaN where a logit underflowed to -inf and p is 0
            entropy[rows] = -torch.where(p > 0, p * log_q, 0.0).sum(1)
            alpha[rows] = torch.minimum(p, log_q.exp_()).sum(1)
        ctx.save_for_backward(logits, prob, norm)
        return alpha, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, prob, norm = ctx.saved_tensors
        grad_alpha, grad_entropy = grads
        out = torch.empty_like(logits)
        for rows in _slabs(logits):
            q = (logits[rows].to(norm.dtype) - norm[rows, None]).exp_()
            p = prob[rows].to(norm.dtype)
            gain = torch.where(q < p, q, 0.0)  # q * w, w = 1[q < p]
            # d alpha = q (w - E_q w);  d CE = q sum(p) - p
            scale = grad_entropy[rows, None] * p.sum(1, keepdim=True) - grad_alpha[rows, None] * gain.sum(1, keepdim=True)
            out[rows] = q.mul_(scale).add_(gain.mul_(grad_alpha[rows, None])).sub_(p * grad_entropy[rows, None])
        return out, None


def log_probs_at(logits: Tensor, index: Tensor) -> Tensor:
    """Return log softmax(logits) at `index`.

    logits [N, Vd] float; index [N, k] int64 draft ids, -1 where there is none. Result [N, k] float32 (float64 for
    float64 logits), 0 and without gradient where the index is -1.
    """
    picked: Tensor = _LogProbsAt.apply(logits, index.clamp_min(0))
    return picked.masked_fill(index < 0, 0.0)


def soft_cross_entropy(logits: Tensor, topk_index: Tensor, topk_prob: Tensor) -> Tensor:
    """Return -sum_k p_k log q_k, [N], over the target's kept tokens that are in the draft vocabulary.

    logits [N, Vd] float; topk_index [N, k] int64 draft ids (-1 = not in the draft vocabulary, not counted);
    topk_prob [N, k] target probabilities, not renormalised, so a position the draft can hardly express weighs less.
    Gradient with respect to the logits: (sum_k p_k) q - p.
    """
    log_q = log_probs_at(logits, topk_index)
    return -(topk_prob.to(log_q.dtype) * log_q).sum(1)


def overlap(logits: Tensor, index: Tensor, prob: Tensor) -> Tensor:
    """Return alpha = sum_x min(p(x), q(x)), [N]: the probability that a token drawn from q is accepted.

    Shapes as in `soft_cross_entropy`. Exact when the kept tokens hold all of p's mass on the draft vocabulary, a lower
    bound otherwise. Gradient: q (w - E_q w) with w = 1[q < p]; where q = p exactly, the mean of the two sides.
    """
    log_q = log_probs_at(logits, index)
    p = prob.to(log_q.dtype).masked_fill(index < 0, 0.0)
    return torch.minimum(p, log_q.exp()).sum(1)


def forward_kl(logits: Tensor, index: Tensor, prob: Tensor) -> Tensor:
    """Return KL(p' || q) = sum_k p'_k (log p'_k - log q_k), [N], nats, with p' = p / sum_k p_k over the kept tokens.

    Shapes as in `soft_cross_entropy`. KL needs p renormalised on the draft vocabulary (arXiv 2602.23881, section 4.4), so a
    position that the draft can hardly express weighs as much as any other; 0 without gradient where p has nothing there.
    Gradient with respect to the logits: q - p'.
    """
    log_q = log_probs_at(logits, index)
    return _forward_kl(log_q, prob.to(log_q.dtype).masked_fill(index < 0, 0.0))


def _forward_kl(log_q: Tensor, p: Tensor) -> Tensor:
    p = p / p.sum(1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    return (torch.xlogy(p, p) - p * log_q).sum(1)


def total_variation(logits: Tensor, index: Tensor, prob: Tensor) -> Tensor:
    """Return TV(p, q) = 1 - sum_k min(p_k, q_k), [N]: the probability that a token drawn from q is rejected.

    Shapes, exactness and gradient as in `overlap`, with the opposite sign. p keeps its mass outside the draft vocabulary.
    """
    return 1.0 - overlap(logits, index, prob)


def negative_log_overlap(logits: Tensor, index: Tensor, prob: Tensor) -> Tensor:
    """Return -log sum_k min(p_k, q_k), [N], nats: LK's L_alpha (arXiv 2602.23881).

    Shapes as in `soft_cross_entropy`. Computed from logarithms, so an overlap that underflows keeps its value and gradient,
    -(1 / alpha) q (w - E_q w), w = 1[q < p]. 0 without gradient where p has nothing in the draft vocabulary.
    """
    log_q = log_probs_at(logits, index)
    log_p = prob.to(log_q.dtype).masked_fill(index < 0, 0.0).log()
    nothing = (log_p == float("-inf")).all(1)
    log_m = torch.minimum(log_p, log_q).masked_fill(nothing[:, None], 0.0)  # a row of -inf has no gradient but NaN
    return -log_m.logsumexp(1).masked_fill(nothing, 0.0)


def lk_hybrid(logits: Tensor, index: Tensor, prob: Tensor, eta: float) -> Tensor:
    """Return lam KL(p' || q) + (1 - lam) TV(p, q), [N], lam = exp(-eta alpha) detached: LK's L_lambda (arXiv 2602.23881).

    Shapes as in `soft_cross_entropy`; the two terms as in `forward_kl` and `total_variation`. Far from the target (alpha = 0)
    it is KL, whose gradient does not vanish there; close to it, TV. The paper's eta is 3 for EAGLE-3, 10 for Medusa.
    """
    log_q = log_probs_at(logits, index)
    p = prob.to(log_q.dtype).masked_fill(index < 0, 0.0)
    alpha = torch.minimum(p, log_q.exp()).sum(1)
    share = (-eta * alpha.detach()).exp()
    return share * _forward_kl(log_q, p) + (1.0 - share) * (1.0 - alpha)


def dpace_weights(path: Tensor, live: Tensor, smoothing: float) -> Tensor:
    """Return D-PACE's weights w [N, K], detached, for the cross-entropies -log q_i(y_i) of a round (arXiv 2605.18810).

    path [N, K]: q_i(y_i) of the data's tokens, 0 outside the draft vocabulary; live [N, K] bool: False behind the end.
    s_j = (1 - a) q_j(y_j) + a with a = `smoothing`, w_i = sum_{k>=i} prod_{j<=k} s_j. With a = 0 the gradient of
    sum_i w_i log q_i(y_i) is that of `expected_accepted_length` along the path; the paper's a is 0.5.
    """
    step = ((1.0 - smoothing) * path.detach() + smoothing).masked_fill(~live, 0.0)
    return step.cumprod(1).flip(1).cumsum(1).flip(1)


def dense_terms(logits: Tensor, prob: Tensor) -> tuple[Tensor, Tensor]:
    """Return (overlap [N], soft cross-entropy [N]) for p given on the whole draft vocabulary.

    logits [N, Vd] float; prob [N, Vd] float, the slice of the target's full softmax at the draft vocabulary (rows sum to
    at most 1). Exact. One pass for both, since stage 2 needs both at every position. At a tie q = p: the side w = 0.
    On GPUs one Triton kernel forward and one backward.
    """
    kernel = kernel_for("overlap_loss", logits, lambda module: module.supports(logits, prob))
    if kernel is None:
        alpha, entropy = _DenseTerms.apply(logits, prob)
    else:
        launch = launch_of("dense_terms", (logits.shape[1],), logits, len(logits))
        alpha, entropy = kernel.dense_terms(logits, prob, launch=launch)
    return alpha, entropy


def path_probability(logits: Tensor, token: Tensor) -> Tensor:
    """Return q(y), [N], of the target's greedy tokens y; 0 without gradient where y is not in the draft vocabulary.

    logits [N, Vd] float, token [N] int64 draft ids or -1. At temperature 0 q(y) is the overlap of q with a one-hot p.
    """
    return log_probs_at(logits, token[:, None]).exp().squeeze(1).masked_fill(token < 0, 0.0)


def expected_accepted_length(alphas: Tensor) -> Tensor:
    """Return J = sum_k prod_{i<=k} alpha_i, [N], for acceptance probabilities alphas [N, K]; the bonus token is not counted.

    With alphas = `path_probability` along the target's greedy path this is the exact E[L] at temperature 0 of a draft
    that samples, and its gradient is D-PACE's with a = 0: sum_i w_i grad log q_i(y_i), w_i = sum_{k>=i} prod_{j<=k} q_j(y_j).
    """
    return alphas.cumprod(1).sum(1)


@dataclass(frozen=True)
class PolicyTerms:
    """`surrogate` [N]: differentiate it, its gradient is the estimator. `value` [N]: unbiased estimate of E[L], detached."""

    surrogate: Tensor
    value: Tensor


def policy_terms(alphas: Tensor, log_q: Tensor, log_p: Tensor) -> PolicyTerms:
    """Return the exact policy gradient of the expected accepted length at temperature > 0, for drafts sampled from q.

    alphas [N, K]: overlap at each position of the draft's own sampled prefix, 0 where the draft has ended (differentiable).
    log_q, log_p [N, K]: log-probability of the sampled token x_i under the draft (differentiable) and the target (-inf allowed).

    Objective: E[L] = V_1, with V_i(x_<i) = sum_x m_i(x) (1 + V_{i+1}(x_<i, x)), m_i = min(p_i, q_i), V_{K+1} = 0. Hence
        grad E[L] = sum_i sum_{x_<i} prod_{j<i} m_j(x_j) * [ grad alpha_i + sum_x grad m_i(x) V_{i+1}(x) ].
    Estimator from one draft x ~ q, with a_j = min(1, p_j/q_j)(x_j), W_i = prod_{j<i} a_j, w = 1[q_i(x_i) < p_i(x_i)]:
        sum_i W_i [ (1 + b_i) grad alpha_i + (U_{i+1} - b_i) w grad log q_i(x_i) ],   U_i = alpha_i + a_i U_{i+1}.
    Unbiased: E_{x~q}[W_i f(x_<i)] = sum prod m f;  E_q[w grad log q(x)] = sum_x 1[q<p] grad q(x) = grad alpha, which pays
    for the baseline b_i; E[U_i | x_<i] = V_i. Rao-Blackwellised: accept bits are replaced by their expectations a_j, and the
    next token's acceptance by alpha_i over the whole vocabulary; only the worth of the continuation is sampled. Nothing
    flows after the first rejection (W_i is the probability that there was none). Treating the accept bits as an outside
    reward instead would be biased: the acceptance rule itself depends on q. The baseline b_i = sum_{k=1}^{K-i} alpha_i^k (what
    would follow if alpha stayed the same) depends on x_<i only, so it leaves the expectation unchanged.
    """
    k = alphas.shape[1]
    known = alphas.detach()
    with torch.no_grad():
        ratio = (log_p - log_q).clamp_max(0.0).exp()
        gains = (log_q < log_p).to(known.dtype)
        reach = torch.cat([torch.ones_like(ratio[:, :1]), ratio[:, :-1].cumprod(1)], dim=1)
        to_go = torch.zeros(k + 1, alphas.shape[0], dtype=known.dtype, device=known.device)
        for i in range(k - 1, -1, -1):
            to_go[i] = known[:, i] + ratio[:, i] * to_go[i + 1]
        follow = torch.stack([sum((known[:, i] ** n for n in range(1, k - i)), torch.zeros_like(known[:, i])) for i in range(k)], 1)
        credit = (to_go[1:].T - follow) * gains
    surrogate = (reach * ((1.0 + follow) * alphas + credit * log_q)).sum(1)
    return PolicyTerms(surrogate, to_go[0])
