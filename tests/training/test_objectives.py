"""Objectives against float64 formulas written out naively, finite differences, and full enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle.train import objectives


def sparse_case(n: int, vd: int, k: int, seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, distinct draft ids with about a third outside the draft vocabulary, unnormalised top-k probabilities."""
    g = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, vd, generator=g, dtype=torch.float64)
    index = torch.stack([torch.randperm(vd, generator=g)[:k] for _ in range(n)])
    index[torch.rand(n, k, generator=g) < 0.34] = -1
    prob = torch.softmax(2 * torch.randn(n, k + 1, generator=g, dtype=torch.float64), -1)[:, :k]
    return logits, index, prob


def densify(index: Tensor, prob: Tensor, vd: int) -> Tensor:
    dense = torch.zeros(index.shape[0], vd, dtype=prob.dtype)
    for row, (ids, ps) in enumerate(zip(index.tolist(), prob.tolist(), strict=True)):
        for i, p in zip(ids, ps, strict=True):
            if i >= 0:
                dense[row, i] += p
    return dense


def naive(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    log_q = torch.log_softmax(logits.double(), -1)
    return torch.minimum(p, log_q.exp()).sum(1), -(p * log_q).sum(1)


@given(
    n=st.integers(1, 7), vd=st.integers(3, 40), k=st.integers(1, 3), seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 2.0, 30.0]),
)
@settings(max_examples=40, deadline=None)
def test_sparse_and_dense_equal_the_naive_oracle_in_value_and_gradient(n: int, vd: int, k: int, seed: int, scale: float) -> None:
    logits, index, prob = sparse_case(n, vd, k, seed, scale)
    p = densify(index, prob, vd)
    weights = torch.randn(2, n, dtype=torch.float64)
    results = []
    for form in ("naive", "sparse", "dense"):
        z = logits.clone().requires_grad_()
        if form == "naive":
            alpha, ce = naive(z, p)
        elif form == "sparse":
            alpha, ce = objectives.overlap(z, index, prob), objectives.soft_cross_entropy(z, index, prob)
        else:
            alpha, ce = objectives.dense_terms(z, p)
        (weights[0] * alpha + weights[1] * ce).sum().backward()
        results.append((alpha.detach(), ce.detach(), z.grad))
    for other in results[1:]:
        for ours, oracle in zip(other, results[0], strict=True):
            torch.testing.assert_close(ours, oracle, rtol=1e-9, atol=1e-12)


def oracle(name: str, logits: Tensor, p: Tensor) -> Tensor:
    """The row objectives of LK written out in float64 with p [N, Vd] on the whole draft vocabulary."""
    log_q = torch.log_softmax(logits.double(), -1)
    alpha = torch.minimum(p, log_q.exp()).sum(1)
    mass = p.sum(1, keepdim=True)
    share = p / torch.where(mass > 0, mass, 1.0)
    kl = torch.where(share > 0, share * (share.clamp_min(1e-300).log() - log_q), 0.0).sum(1)
    if name == "forward_kl":
        return kl
    if name == "total_variation":
        return 1 - alpha
    if name == "negative_log_overlap":
        return -torch.where(mass[:, 0] > 0, alpha, 1.0).log()
    weight = (-3.0 * alpha.detach()).exp()
    return weight * kl + (1 - weight) * (1 - alpha)


ROW_OBJECTIVES = {
    "forward_kl": objectives.forward_kl, "total_variation": objectives.total_variation,
    "negative_log_overlap": objectives.negative_log_overlap, "lk_hybrid": lambda *given: objectives.lk_hybrid(*given, eta=3.0),
}


@pytest.mark.parametrize("name", list(ROW_OBJECTIVES))
@given(
    n=st.integers(1, 7), vd=st.integers(3, 40), k=st.integers(1, 3), seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 2.0, 30.0]),
)
@settings(max_examples=25, deadline=None)
def test_row_objectives_equal_their_formulas_in_value_and_gradient(
    name: str, n: int, vd: int, k: int, seed: int, scale: float
) -> None:
    logits, index, prob = sparse_case(n, vd, k, seed, scale)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value, expected = ROW_OBJECTIVES[name](ours, index, prob), oracle(name, theirs, densify(index, prob, vd))
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    weights = torch.linspace(-1.0, 2.0, n, dtype=torch.float64)
    (weights * value).sum().backward()
    (weights * expected).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in ROW_OBJECTIVES if name != "lk_hybrid"])
def test_row_objectives_by_finite_differences(name: str) -> None:
    logits, index, prob = sparse_case(4, 9, 3, 5)
    given = (logits.clone().requires_grad_(),)
    assert torch.autograd.gradcheck(lambda z: ROW_OBJECTIVES[name](z, index, prob), given, eps=1e-6, atol=1e-7)


def test_the_hybrids_gradient_with_its_share_held_fixed_by_finite_differences() -> None:
    """The share is detached (stop-gradient in the paper): differences are taken at the share of the point itself."""
    logits, index, prob = sparse_case(4, 9, 3, 5)
    share = (-3.0 * objectives.overlap(logits, index, prob)).exp()

    def held(z: Tensor) -> Tensor:
        return (share * objectives.forward_kl(z, index, prob) + (1 - share) * objectives.total_variation(z, index, prob)).sum()

    z = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(objectives.lk_hybrid(z, index, prob, 3.0).sum(), z)
    step, numeric = 1e-6, torch.zeros_like(logits)
    for row in range(logits.shape[0]):
        for column in range(logits.shape[1]):
            nudge = torch.zeros_like(logits)
            nudge[row, column] = step
            numeric[row, column] = (held(logits + nudge) - held(logits - nudge)) / (2 * step)
    torch.testing.assert_close(grad, numeric, rtol=1e-6, atol=1e-8)


def test_published_gradient_forms_of_lk() -> None:
    """d KL = q - p', d TV = -q (w - E_q w), d (-log alpha) = d TV / alpha (arXiv 2602.23881, appendix A)."""
    logits, index, prob = sparse_case(5, 12, 3, 1)
    index[0, :] = torch.tensor([3, 5, 7])  # a row with all its kept tokens in the draft vocabulary
    kept = (index >= 0).any(1)
    p, q = densify(index, prob, 12), torch.softmax(logits, -1)
    w = (q < p).double()
    tv = -q * (w - (q * w).sum(1, keepdim=True))
    alpha = torch.minimum(p, q).sum(1, keepdim=True)
    forms = {
        "forward_kl": q - p / p.sum(1, keepdim=True), "total_variation": tv, "negative_log_overlap": tv / alpha,
    }
    for name, form in forms.items():
        z = logits.clone().requires_grad_()
        (grad,) = torch.autograd.grad(ROW_OBJECTIVES[name](z, index, prob).sum(), z)
        torch.testing.assert_close(grad[kept], form[kept])
        assert not grad[~kept].any()


@pytest.mark.parametrize("name", list(ROW_OBJECTIVES))
def test_row_objectives_with_extreme_logits(name: str) -> None:
    """A target token at logit -2e4 below the draft's choice: its overlap underflows, -log overlap keeps value and pull."""
    z = torch.tensor([[1e4, -1e4, 0.0, 88.0], [-1e30, 1e30, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    index, prob = torch.tensor([[1, -1], [0, 1], [-1, -1]]), torch.tensor([[0.6, 0.4], [0.0, 1.0], [0.5, 0.5]])
    value = ROW_OBJECTIVES[name](z, index, prob)
    (grad,) = torch.autograd.grad(value.sum(), z)
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(grad).all())
    assert value[2] == (1.0 if name == "total_variation" else 0.0)
    assert not grad[2].any()
    torch.testing.assert_close(value[1].detach(), torch.tensor(0.0))
    if name in ("forward_kl", "negative_log_overlap"):
        torch.testing.assert_close(value[0].item(), 2e4, rtol=1e-4, atol=0.0)
        torch.testing.assert_close(grad[0], torch.tensor([1.0, -1.0, 0.0, 0.0]))


@pytest.mark.parametrize("name", list(ROW_OBJECTIVES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_objectives_in_low_precision_are_summed_in_float32(name: str, dtype: torch.dtype) -> None:
    logits, index, prob = sparse_case(40, 8192, 32, 3)
    low = logits.to(dtype)
    z = low.clone().requires_grad_()
    value = ROW_OBJECTIVES[name](z, index, prob.float())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), oracle(name, low, densify(index, prob, 8192)), rtol=2e-5, atol=2e-6)
    value.sum().backward()
    assert z.grad is not None
    assert z.grad.dtype == dtype


@pytest.mark.parametrize("a", [0.0, 0.5, 1.0])
def test_dpace_weights_are_the_sums_of_smoothed_prefix_products(a: float) -> None:
    path = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.0, 0.7]], dtype=torch.float64)
    live = torch.tensor([[True, True, True], [True, True, False]])
    weights = objectives.dpace_weights(path, live, a)
    for row in range(2):
        s = [((1 - a) * float(path[row, j]) + a) * bool(live[row, j]) for j in range(3)]
        prefix = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
        assert weights[row].tolist() == pytest.approx([sum(prefix[i:]) for i in range(3)])
    assert weights[1, 2] == 0


def test_gradients_by_finite_differences() -> None:
    logits, index, prob = sparse_case(4, 9, 3, 5)
    dense = densify(index, prob, 9)
    token = torch.tensor([0, -1, 8, 3])
    for function in (
        lambda z: objectives.soft_cross_entropy(z, index, prob),
        lambda z: objectives.overlap(z, index, prob),
        lambda z: objectives.dense_terms(z, dense),
        lambda z: objectives.path_probability(z, token),
        lambda z: objectives.log_probs_at(z, index),
        lambda z: objectives.expected_accepted_length(objectives.path_probability(z, token.clamp_min(0)).view(2, 2)),
    ):
        assert torch.autograd.gradcheck(function, (logits.clone().requires_grad_(),), eps=1e-6, atol=1e-7)


def test_published_gradient_forms() -> None:
    """d CE = sum(p) q - p and d alpha = q (w - E_q w), w = 1[q < p]."""
    logits, index, prob = sparse_case(5, 12, 3, 1)
    p, q = densify(index, prob, 12), torch.softmax(logits, -1)
    z = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(objectives.soft_cross_entropy(z, index, prob).sum(), z)
    torch.testing.assert_close(grad, q * p.sum(1, keepdim=True) - p)
    (grad,) = torch.autograd.grad(objectives.overlap(z, index, prob).sum(), z)
    w = (q < p).double()
    torch.testing.assert_close(grad, q * (w - (q * w).sum(1, keepdim=True)))


def test_extreme_logits_stay_finite() -> None:
    z = torch.tensor([[1e4, -1e4, 0.0, 88.0], [-1e30, 1e30, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    index, prob = torch.tensor([[1, -1], [0, 1], [3, 2]]), torch.tensor([[0.6, 0.4], [0.0, 1.0], [0.5, 0.5]])
    p = densify(index, prob.double(), 4).float()
    terms = [objectives.overlap(z, index, prob), objectives.soft_cross_entropy(z, index, prob), *objectives.dense_terms(z, p)]
    (grad,) = torch.autograd.grad(sum(term.sum() for term in terms), z)
    assert all(bool(torch.isfinite(term).all()) for term in terms)
    assert bool(torch.isfinite(grad).all())
    torch.testing.assert_close(terms[0].detach(), torch.tensor([0.0, 1.0, 0.5]))
    torch.testing.assert_close(terms[1][0].item(), 0.6 * 2e4, rtol=1e-6, atol=0.0)


def test_masked_vocabulary_logit_of_minus_infinity() -> None:
    z = torch.tensor([[0.0, float("-inf"), 1.0]], requires_grad=True)
    alpha, ce = objectives.dense_terms(z, torch.tensor([[0.5, 0.0, 0.5]]))
    (grad,) = torch.autograd.grad((alpha + ce).sum(), z)
    assert bool(torch.isfinite(ce).all())
    assert bool(torch.isfinite(grad).all())
    assert grad[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    vd = 8192
    logits, index, prob = sparse_case(40, vd, 32, 3)
    low = logits.to(dtype)
    alpha, ce = naive(low, densify(index, prob, vd))
    z = low.clone().requires_grad_()
    ours_ce, ours_alpha = objectives.soft_cross_entropy(z, index, prob), objectives.overlap(z, index, prob)
    assert ours_ce.dtype == ours_alpha.dtype == torch.float32
    torch.testing.assert_close(ours_ce.double(), ce, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(ours_alpha.double(), alpha, rtol=2e-5, atol=1e-7)
    (ours_ce.sum() + ours_alpha.sum()).backward()
    assert z.grad is not None
    assert z.grad.dtype == dtype


def test_nothing_in_the_draft_vocabulary_gives_zero_and_no_gradient() -> None:
    z = torch.randn(2, 5, requires_grad=True)
    index, prob = torch.full((2, 3), -1), torch.full((2, 3), 0.3)
    terms = objectives.overlap(z, index, prob) + objectives.soft_cross_entropy(z, index, prob)
    terms = terms + objectives.path_probability(z, index[:, 0])
    terms.sum().backward()
    assert terms.tolist() == [0.0, 0.0]
    assert z.grad is not None
    assert not z.grad.any()


def test_expected_accepted_length_is_the_sum_of_prefix_products() -> None:
    a = torch.tensor([[0.5, 0.4, 0.9], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    by_hand = torch.tensor([0.5 + 0.2 + 0.18, 0.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(objectives.expected_accepted_length(a), by_hand)
    assert torch.autograd.gradcheck(objectives.expected_accepted_length, (a.clone().requires_grad_(),))


def test_greedy_path_gradient_is_dpace_without_smoothing() -> None:
    n, k, vd = 3, 4, 6
    logits, y = torch.randn(n, k, vd, dtype=torch.float64, requires_grad=True), torch.randint(0, vd, (n, k))
    q = objectives.path_probability(logits.view(-1, vd), y.view(-1)).view(n, k)
    (grad,) = torch.autograd.grad(objectives.expected_accepted_length(q).sum(), logits)
    weight = objectives.dpace_weights(q, torch.ones_like(q, dtype=torch.bool), 0.0)
    log_q = torch.log_softmax(logits, -1).gather(2, y[..., None]).squeeze(2)
    (dpace,) = torch.autograd.grad((weight * log_q).sum(), logits)
    torch.testing.assert_close(grad, dpace)


def tables(k: int, v: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """A one-parameter-vector draft whose logits at every prefix are linear in it, and a target for every prefix.

    Prefix x_1..x_i (i < k) is numbered in base v; targets give 10 % of their mass to tokens outside the draft vocabulary.
    """
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(5, generator=g, dtype=torch.float64)
    return theta, [
        torch.cat([1.5 * torch.randn(v**i, v, 5, generator=g, dtype=torch.float64).flatten(2),
                   0.9 * torch.softmax(2 * torch.randn(v**i, v, 1, generator=g, dtype=torch.float64), 1)], 2)
        for i in range(k)
    ]


def exact_length(theta: Tensor, levels: list[Tensor], v: int) -> Tensor:
    """E[L] = sum_k sum_{x_1..k} prod min(p, q) by enumeration."""
    reach, total = torch.ones(1, dtype=theta.dtype), torch.zeros((), dtype=theta.dtype)
    for level in levels:
        q = torch.softmax(level[:, :, :5] @ theta, -1)
        reach = (reach[:, None] * torch.minimum(level[:, :, 5], q)).reshape(-1)
        total = total + reach.sum()
    return total


@pytest.mark.parametrize(("k", "v", "seed"), [(1, 4, 0), (2, 4, 1), (3, 3, 2), (3, 4, 3), (4, 2, 4)])
def test_policy_gradient_is_unbiased_by_enumeration(k: int, v: int, seed: int) -> None:
    """The q-weighted mean over ALL drafts of value and gradient equals E[L] and its finite-difference gradient."""
    theta, levels = tables(k, v, seed)
    theta.requires_grad_()
    paths = torch.tensor(list(itertools.product(range(v), repeat=k)))
    at = torch.zeros(len(paths), dtype=torch.long)
    alphas, log_q, log_p = [], [], []
    for i, level in enumerate(levels):
        rows = level[at]
        alpha, _ = objectives.dense_terms(rows[:, :, :5] @ theta, rows[:, :, 5])
        alphas.append(alpha)
        log_q.append(objectives.log_probs_at(rows[:, :, :5] @ theta, paths[:, i : i + 1]).squeeze(1))
        log_p.append(rows[:, :, 5].gather(1, paths[:, i : i + 1]).squeeze(1).log())
        at = at * v + paths[:, i]
    terms = objectives.policy_terms(torch.stack(alphas, 1), torch.stack(log_q, 1), torch.stack(log_p, 1))
    chance = torch.stack(log_q, 1).sum(1).exp().detach()
    torch.testing.assert_close(chance.sum().item(), 1.0)
    (grad,) = torch.autograd.grad((chance * terms.surrogate).sum(), theta)

    torch.testing.assert_close((chance * terms.value).sum(), exact_length(theta, levels, v).detach())
    step, numeric = 1e-6, torch.zeros(5, dtype=torch.float64)
    for j in range(5):
        up, down = theta.detach().clone(), theta.detach().clone()
        up[j] += step
        down[j] -= step
        numeric[j] = (exact_length(up, levels, v) - exact_length(down, levels, v)) / (2 * step)
    torch.testing.assert_close(grad, numeric, rtol=1e-6, atol=1e-8)


def test_no_gradient_after_a_certain_rejection() -> None:
    """A first token that the target never emits (p = 0) silences everything behind it."""
    alphas = torch.tensor([[0.5, 0.7, 0.6]], requires_grad=True)
    log_q = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    terms = objectives.policy_terms(alphas, log_q, torch.tensor([[float("-inf"), -0.1, -0.1]]))
    grad_alpha, grad_q = torch.autograd.grad(terms.surrogate.sum(), (alphas, log_q))
    assert grad_alpha[0, 1:].tolist() == [0.0, 0.0]
    assert grad_q.tolist() == [[0.0, 0.0, 0.0]]
    assert terms.value.tolist() == [0.5]


def test_ascent_on_the_sampled_estimator_raises_the_exact_expected_length() -> None:
    """From a converged cross-entropy fit, the exact E[L] (enumerated) goes up: the reason for stage 2."""
    k, v = 3, 4
    theta, levels = tables(k, v, 11)
    theta.requires_grad_()
    fit = torch.optim.Adam([theta], lr=0.05)
    for _ in range(300):
        loss = sum(objectives.dense_terms(level[:, :, :5] @ theta, level[:, :, 5])[1].mean() for level in levels)
        fit.zero_grad()
        loss.backward()
        fit.step()
    before = exact_length(theta, levels, v).item()
    ascent = torch.optim.Adam([theta], lr=0.02)
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        at, parts = torch.zeros(64, dtype=torch.long), []
        for level in levels:
            z, p = level[at][:, :, :5] @ theta, level[at][:, :, 5]
            x = torch.multinomial(torch.softmax(z.detach(), -1), 1, generator=g)
            alpha, log_q = objectives.dense_terms(z, p)[0], objectives.log_probs_at(z, x).squeeze(1)
            parts.append((alpha, log_q, p.gather(1, x).squeeze(1).log()))
            at = at * v + x.squeeze(1)
        terms = objectives.policy_terms(*(torch.stack(column, 1) for column in zip(*parts, strict=True)))
        ascent.zero_grad()
        (-terms.surrogate.mean()).backward()
        ascent.step()
    after = exact_length(theta, levels, v).item()
    assert after > 1.02 * before
