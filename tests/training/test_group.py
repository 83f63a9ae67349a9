"""Sampled policy gradients by enumeration: group is unbiased, naive is not, and ascent raises the exact expected length."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from eagle.config import PolicyConfig
from eagle.train import group, objectives, reward
from eagle.train.rollout import Rounds
from tests.training.test_objectives import exact_length, tables

Outcomes = tuple[Tensor, Tensor, Tensor, Tensor]


def outcomes(theta: Tensor, levels: list[Tensor], v: int) -> Outcomes:
    """Every draft with every pattern of coins: (chance [M], log q [M, K], gains [M, K], coins [M, K])."""
    k = len(levels)
    paths = torch.tensor(list(itertools.product(range(v), repeat=k))).repeat_interleave(2**k, 0)
    coins = torch.tensor(list(itertools.product([False, True], repeat=k))).repeat(v**k, 1)
    at, log_q, log_p = torch.zeros(len(paths), dtype=torch.long), [], []
    for i, level in enumerate(levels):
        rows = level[at]
        log_q.append(objectives.log_probs_at(rows[:, :, :5] @ theta, paths[:, i : i + 1]).squeeze(1))
        log_p.append(rows[:, :, 5].gather(1, paths[:, i : i + 1]).squeeze(1).log())
        at = at * v + paths[:, i]
    logs, target = torch.stack(log_q, 1), torch.stack(log_p, 1)
    accept = (target - logs.detach()).clamp_max(0.0).exp()
    chance = (logs.detach().exp() * torch.where(coins, accept, 1.0 - accept)).prod(1)
    return chance, logs, (logs.detach() < target).double(), coins


def numeric_gradient(theta: Tensor, levels: list[Tensor], v: int) -> Tensor:
    step, numeric = 1e-6, torch.zeros(5, dtype=torch.float64)
    for j in range(5):
        nudge = torch.zeros(5, dtype=torch.float64)
        nudge[j] = step
        up, down = (exact_length(theta.detach() + sign * nudge, levels, v) for sign in (1, -1))
        numeric[j] = (up - down) / (2 * step)
    return numeric


def mean_gradient(theta: Tensor, levels: list[Tensor], v: int, *, naive: bool, baseline: str) -> Tensor:
    """The expectation, over all pairs of outcomes, of the gradient of pairs that serve as each other's baseline."""
    chance, log_q, gains, coins = outcomes(theta, levels, v)
    m, k = log_q.shape
    pair = torch.cartesian_prod(torch.arange(m), torch.arange(m)).flatten()  # two drafts in a row: one group or neighbours
    weight = (chance[pair].view(-1, 2).prod(1) / 2).repeat_interleave(2)
    gains = torch.ones_like(gains) if naive else gains
    hits = coins[pair]
    reached = group.reach(hits)
    credit = reached * gains[pair] * group.reward_to_go(hits)
    if baseline == "leave_one_out":
        c = group.leave_one_out(credit, reached, 2)
    elif baseline == "adjacent":
        c = group.adjacent(credit, reached, 1, torch.arange(m * m).repeat_interleave(2))
    else:
        c = group.promised(torch.full((1, k), 0.6, dtype=torch.float64)).expand(len(pair), k)
    advantage = group.advantages(hits, gains[pair], c)
    surrogate = group.clipped_surrogate(log_q[pair], log_q.detach()[pair], advantage, 0.2)
    (grad,) = torch.autograd.grad((weight * surrogate).sum(), theta)
    return grad


@pytest.mark.parametrize("baseline", ["leave_one_out", "adjacent", "reference"])
@pytest.mark.parametrize(("k", "v", "seed"), [(1, 4, 0), (2, 3, 1), (3, 2, 4)])
def test_group_is_unbiased_and_naive_is_not(k: int, v: int, seed: int, baseline: str) -> None:
    """Against finite differences of the enumerated E[L], over every draft and coin; naive is off by more than 3 % of its length."""
    theta, levels = tables(k, v, seed)
    theta.requires_grad_()
    true = numeric_gradient(theta, levels, v)
    ours = mean_gradient(theta, levels, v, naive=False, baseline=baseline)
    torch.testing.assert_close(ours, true, rtol=1e-6, atol=1e-8)
    naive = mean_gradient(theta, levels, v, naive=True, baseline=baseline)
    assert float((naive - true).norm()) > 0.03 * float(true.norm())


def test_at_temperature_zero_accept_bits_are_unbiased() -> None:
    """Bits that do not depend on q (the target's argmax): the sampled gradient equals the path form's, over all drafts."""
    g = torch.Generator().manual_seed(3)
    z = torch.randn(3, 4, generator=g, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1, 3, 0])
    paths = torch.tensor(list(itertools.product(range(4), repeat=3)))
    log_q = torch.log_softmax(z, 1)[torch.arange(3), paths]
    chance, hits = log_q.sum(1).exp().detach(), paths == y
    advantage = group.advantages(hits, torch.ones_like(log_q), torch.full_like(log_q, 0.4))
    (ours,) = torch.autograd.grad((chance * group.clipped_surrogate(log_q, log_q.detach(), advantage, 0.2)).sum(), z)
    value = objectives.expected_accepted_length(objectives.path_probability(z, y)[None]).sum()
    (exact,) = torch.autograd.grad(value, z)
    torch.testing.assert_close(ours, exact)


def test_no_gradient_after_the_first_rejection() -> None:
    hits = torch.tensor([[True, False, True, True], [True, True, True, False]])
    rewards = group.reward_to_go(hits)
    assert rewards.tolist() == [[1.0, 0.0, 2.0, 1.0], [3.0, 2.0, 1.0, 0.0]]
    advantage = group.advantages(hits, torch.ones(2, 4), torch.full((2, 4), 0.5))
    assert advantage.tolist() == [[0.5, -0.5, 0.0, 0.0], [2.5, 1.5, 0.5, -0.5]]


def test_baselines_of_others_by_hand() -> None:
    hits = torch.tensor([[True, True], [False, True], [True, False], [True, True]])
    reached = group.reach(hits)
    credit = reached * group.reward_to_go(hits)
    assert credit.tolist() == [[2.0, 1.0], [0.0, 0.0], [1.0, 0.0], [2.0, 1.0]]
    one_out = group.leave_one_out(credit, reached, 2)
    assert one_out.tolist() == [[0.0, 0.0], [2.0, 1.0], [2.0, 1.0], [1.0, 0.0]]
    near = group.adjacent(credit, reached, 1, torch.tensor([0, 0, 0, 1]))
    assert near.tolist() == [[0.0, 0.0], [1.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(group.promised(torch.tensor([[0.5, 0.2]])), torch.tensor([[0.75, 0.2]]))


def test_the_clip_ends_the_pull_of_a_ratio_that_went_far_enough() -> None:
    old = torch.zeros(4, 1)
    log_q = torch.tensor([[0.3], [0.3], [-0.3], [-0.3]], requires_grad=True)  # ratios 1.35 and 0.74
    advantage = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    surrogate = group.clipped_surrogate(log_q, old, advantage, 0.2)
    torch.testing.assert_close(surrogate.detach(), torch.tensor([1.2, -1.34986, 0.74082, -0.8]), rtol=1e-4, atol=0.0)
    (grad,) = torch.autograd.grad(surrogate.sum(), log_q)
    assert grad.squeeze(1).tolist() == pytest.approx([0.0, -1.34986, 0.74082, 0.0], rel=1e-4)


def test_proposals_that_an_early_end_saves() -> None:
    live = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    assert group.saved_drafts(live).tolist() == [[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]


def toy_rounds(theta: Tensor, levels: list[Tensor], drafts: int, generator: torch.Generator) -> Rounds:
    v, at = levels[0].shape[1], torch.zeros(drafts, dtype=torch.long)
    logits, tokens, dense = [], [], []
    for level in levels:
        logits.append(level[at][:, :, :5] @ theta)
        dense.append(level[at][:, :, 5])
        tokens.append(torch.multinomial(logits[-1].detach().softmax(1), 1, generator=generator).squeeze(1))
        at = at * v + tokens[-1]
    token = torch.stack(tokens, 1)
    return Rounds(1.0, tuple(logits), token, torch.ones_like(token, dtype=torch.bool), dense=torch.stack(dense, 1))


def fitted(k: int, v: int) -> tuple[Tensor, list[Tensor]]:
    """A draft of few parameters at its least cross-entropy: what stage 1 leaves to stage 2."""
    theta, levels = tables(k, v, 11)
    theta.requires_grad_()
    fit = torch.optim.Adam([theta], lr=0.05)
    for _ in range(200):
        loss = sum(objectives.dense_terms(level[:, :, :5] @ theta, level[:, :, 5])[1].mean() for level in levels)
        fit.zero_grad()
        loss.backward()
        fit.step()
    return theta.detach(), levels


def ascended(start: Tensor, levels: list[Tensor], steps: int, **keys: object) -> float:
    """E[L], enumerated, after `steps` steps of stage 2's own objective from `start`."""
    theta = start.clone().requires_grad_()
    config = PolicyConfig.model_validate({"anchor_weight": 0.0, **keys})
    ascent, g = torch.optim.Adam([theta], lr=0.02), torch.Generator().manual_seed(0)
    for _ in range(steps):
        rounds = toy_rounds(theta, levels, 64, g)
        goal = reward.objective(rounds, config, g, reference=torch.full(rounds.token.shape, 0.5))
        for update in range(config.updates):
            if update:
                at, logits = torch.zeros(64, dtype=torch.long), []
                for i, level in enumerate(levels):
                    logits.append(level[at][:, :, :5] @ theta)
                    at = at * levels[0].shape[1] + rounds.token[:, i]
                rounds = Rounds(1.0, tuple(logits), rounds.token, rounds.live, dense=rounds.dense)
                goal = reward.objective(rounds, config, g, goal.judged)
            ascent.zero_grad()
            goal.loss.backward()
            ascent.step()
    return float(exact_length(theta.detach(), levels, levels[0].shape[1]))


@pytest.mark.parametrize(
    "keys",
    [{"method": "exact"}, {"method": "group", "group_size": 64}, {"method": "group", "baseline": "reference", "updates": 2}],
    ids=["exact", "group", "group, reference, two updates"],
)
def test_stage_2_raises_the_enumerated_length_where_cross_entropy_ends(keys: dict[str, object]) -> None:
    start, levels = fitted(2, 4)
    before = float(exact_length(start, levels, 4))
    assert ascended(start, levels, 150, **keys) > 1.02 * before


def test_naive_reward_gains_less_than_the_unbiased_methods() -> None:
    start, levels = fitted(2, 4)
    before = float(exact_length(start, levels, 4))
    gains = {
        method: ascended(start, levels, 150, method=method, group_size=64) - before for method in ("exact", "group", "naive")
    }
    assert gains["naive"] < 0.9 * min(gains["exact"], gains["group"])
