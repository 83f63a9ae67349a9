"""Losslessness of chain verification: exact distributions of the real functions, and counting."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle.decode.randomness import Stream, uniforms
from eagle.decode.sampling import SamplingParams
from eagle.decode.verify import (
    Verdict,
    acceptance,
    draw,
    residual,
    scatter,
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_sampled,
)
from tests.decode.exact import TOP, continued, distance, edge, tables, target_joint, token_masses
from tests.decode.models import surprise

V, K = 8, 3
SMALL = torch.tensor([5, 0, 6, 3])  # a draft vocabulary that is smaller than the target's, in no order
Verifier = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor], Verdict]

SETTINGS = {
    "plain": SamplingParams(1.0),
    "cool": SamplingParams(0.6),
    "top_k": SamplingParams(0.9, top_k=3),
    "top_p": SamplingParams(1.2, top_p=0.7),
    "both": SamplingParams(0.8, top_k=5, top_p=0.9),
}


class Round:
    """Every draft of K tokens that a draft model can make (rows), and what a verifier makes of it.

    `weights` [m]: the probability of the draft; a deterministic draft model makes one, its most probable tokens.
    """

    def __init__(self, verify: Verifier, seed: int, params: SamplingParams, ids: Tensor | None, *, bonus: bool, drawn: bool):
        self.verify, self.bonus, self.drawn, self.ids = verify, bonus, drawn, ids
        width = V if ids is None else len(ids)
        self.p = tables(seed, V, K + 1, params)
        q = tables(seed, V, K, params, ids, noise=1.0)
        names = torch.arange(V) if ids is None else ids
        index = torch.tensor(list(product(range(width), repeat=K)))
        history, rows = torch.zeros(len(index), dtype=torch.long), []
        for i in range(K):
            rows.append(q[i][history])
            history = history * V + names[index[:, i]]
        self.q = torch.stack(rows, 1)
        best = (self.q.argmax(2) == index).all(1)
        chosen = self.q.gather(2, index[:, :, None])[:, :, 0]
        keep = chosen.prod(1) > 0 if drawn else best
        self.draft, self.q, self.chosen = names[index[keep]], self.q[keep], chosen[keep]
        self.weights = self.chosen.prod(1) if drawn else torch.ones(1, dtype=torch.float64)
        if not drawn:
            self.chosen = torch.ones_like(self.chosen)
        self.codes = [torch.zeros(len(self.draft), dtype=torch.long)]
        for i in range(K):
            self.codes.append(self.codes[-1] * V + self.draft[:, i])
        self.p_rows = torch.stack([self.p[i][self.codes[i]] for i in range(K + bonus)], 1)

    def __call__(self, accept: Tensor, token: Tensor) -> Verdict:
        return self.verify(self.draft, self.chosen, self.q if self.drawn else None, self.p_rows, self.ids, accept, token)

    def accept_at(self, place: int, others: list[float], u: Tensor) -> Tensor:
        """Accept-uniforms `others` [K] for every row, with u [m] at one place."""
        numbers = torch.tensor(others, dtype=torch.float64).repeat(len(self.draft), 1)
        numbers[:, place] = u
        return numbers

    def measure(self, *, block: bool) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return P(accepted = k) [m, K+1], masses as `continued` takes them, and the thresholds [m, K].

        The threshold of place i is where the real function stops accepting it, seen with the uniforms before it at 0 (and,
        for a block, those after it at the top, where they pass only if they always do).
        """
        count = len(self.draft)
        token = torch.zeros(count, K + 1, dtype=torch.float64)
        thresholds = []
        for i in range(K):
            others = [TOP if block else 0.0] * K
            thresholds.append(
                edge(lambda u, i=i, o=others: self(self.accept_at(i, o, u), token).accepted > i, count)  # type: ignore[misc]
            )
        t = torch.stack(thresholds, 1)
        one = torch.ones(count, 1, dtype=torch.float64)
        if block:
            later = torch.cat([(1 - t).flip(1).cumprod(1).flip(1), one], 1)
            odds = torch.cat([one, t], 1) * later
        else:
            odds = torch.cat([one, t.cumprod(1)], 1) * torch.cat([1 - t, one], 1)
        masses = [torch.zeros(V ** (i + 1), dtype=torch.float64) for i in range(K + 1)]
        for k in range(K + 1):
            accept = torch.zeros(count, K, dtype=torch.float64)
            accept[:, k:] = TOP
            live = odds[:, k] > 1e-14
            assert (self(accept, token).accepted == k)[live].all()
            mass = odds[:, k] * self.weights
            if k == K and not self.bonus:
                assert (self(accept, token).following == -1)[live].all()
                masses[K - 1].index_add_(0, self.codes[K], mass)
                continue

            def following(u: Tensor, accept: Tensor = accept, k: int = k) -> Tensor:
                numbers = token.clone()
                numbers[:, k] = u
                return self(accept, numbers).following

            found = token_masses(following, count, V) * mass[:, None]
            cells = self.codes[k][:, None] * V + torch.arange(V)
            masses[k].index_add_(0, cells.flatten(), found.flatten())
        return odds, masses, t


@pytest.mark.parametrize("ids", [None, SMALL], ids=["full", "small"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("verify", [verify_sampled, verify_block])
def test_joint_is_exactly_the_target(verify: Verifier, name: str, ids: Tensor | None) -> None:
    """All drafts of K = 3 tokens are enumerated; what the verifier does with each is measured on the verifier itself.

    That the outcome is `first failure` or `longest pass` of the thresholds, place by place, is assumed in the products
    and checked on random uniforms.
    """
    block = verify is verify_block
    seed = 10 * list(SETTINGS).index(name)
    round_ = Round(verify, seed, SETTINGS[name], ids, bonus=ids is None, drawn=True)
    odds, masses, t = round_.measure(block=block)
    assert distance(continued(masses, round_.p), target_joint(round_.p)) <= 1e-12
    assert 0.05 < float((odds * torch.arange(K + 1) * round_.weights[:, None]).sum()) < K
    for trial in range(5):
        accept = torch.rand(t.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(trial))
        passed = accept < t
        wanted = (passed * torch.arange(1, K + 1)).amax(1) if block else passed.long().cumprod(1).sum(1)
        sure = ((accept - t).abs() > 1e-9).all(1)
        assert round_(accept, torch.zeros(len(t), K + 1, dtype=torch.float64)).accepted[sure].equal(wanted[sure])


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("verify", [verify_sampled, verify_block])
def test_deterministic_drafts_and_no_bonus_row(verify: Verifier, bonus: bool) -> None:
    round_ = Round(verify, 7, SETTINGS["plain"], None, bonus=bonus, drawn=False)
    assert len(round_.draft) == 1
    masses = round_.measure(block=verify is verify_block)[1]
    assert distance(continued(masses, round_.p), target_joint(round_.p)) <= 1e-12


def test_a_wrong_verifier_is_seen() -> None:
    """The measure itself: residuals drawn from p instead of (p - q)+ are found out."""

    def wrong(draft: Tensor, chosen: Tensor, q: Tensor | None, p: Tensor, *rest: Tensor | None) -> Verdict:
        right = verify_sampled(draft, chosen, q, p, rest[0], rest[1], rest[2])  # type: ignore[arg-type]
        rows = torch.arange(len(draft))
        return Verdict(right.accepted, draw(p[rows, right.accepted], rest[2][rows, right.accepted]))  # type: ignore[index]

    round_ = Round(wrong, 3, SETTINGS["plain"], None, bonus=True, drawn=True)
    masses = round_.measure(block=False)[1]
    assert distance(continued(masses, round_.p), target_joint(round_.p)) > 1e-2


@pytest.mark.parametrize("ids", [None, SMALL], ids=["full", "small"])
def test_block_accepts_no_less_than_token_by_token(ids: Tensor | None) -> None:
    gains = []
    for seed in range(4):
        expected = []
        for verify in (verify_sampled, verify_block):
            round_ = Round(verify, seed, SETTINGS["plain"], ids, bonus=True, drawn=True)
            odds = round_.measure(block=verify is verify_block)[0] * round_.weights[:, None]
            expected.append(float((odds * torch.arange(K + 1)).sum()))
        gains.append(expected[1] - expected[0])
    assert min(gains) >= -1e-12
    assert max(gains) > 1e-3


@pytest.mark.parametrize("verify", [verify_sampled, verify_block])
@pytest.mark.parametrize("deterministic", [False, True])
def test_counting_on_whole_batches(verify: Verifier, deterministic: bool) -> None:
    """100k rows at once, whose uniforms are those of `randomness`: the joint of K + 1 tokens against the target's."""
    count, size = 100_000, 5
    ids = torch.tensor([0, 2, 4])
    p, q = tables(7, size, K + 1, SETTINGS["plain"]), tables(7, size, K, SETTINGS["plain"], ids, noise=1.5)
    requests = list(range(count))
    u_draft, u_accept, u_token = (uniforms(3, s, requests, [0] * count, K + 1) for s in (Stream.DRAFT, Stream.ACCEPT, Stream.TOKEN))
    history = torch.zeros(count, dtype=torch.long)
    drafts, chosen, q_rows, p_rows = [], [], [], [p[0][history]]
    for i in range(K):
        q_rows.append(q[i][history])
        index = q_rows[i].argmax(1) if deterministic else draw(q_rows[i], u_draft[:, i])
        chosen.append(torch.ones(count) if deterministic else q_rows[i].gather(1, index[:, None])[:, 0])
        drafts.append(ids[index])
        history = history * size + drafts[i]
        p_rows.append(p[i + 1][history])
    verdict = verify(
        torch.stack(drafts, 1),
        torch.stack(chosen, 1),
        None if deterministic else torch.stack(q_rows, 1),
        torch.stack(p_rows, 1),
        ids,
        u_accept[:, :K],
        u_token,
    )
    words = torch.stack([*drafts, drafts[0]], 1)
    words[torch.arange(count), verdict.accepted] = verdict.following
    history = torch.zeros(count, dtype=torch.long)
    for i in range(K + 1):  # what a round did not decide is continued by the target
        fresh = draw(p[i][history], uniforms(4, Stream.TOKEN, requests, [i] * count, 1)[:, 0])
        words[:, i] = torch.where(verdict.accepted < i, fresh, words[:, i])
        history = history * size + words[:, i]
    observed = torch.bincount(history, minlength=size ** (K + 1)).double()
    assert surprise(observed, target_joint(p) * count) < 4
    assert 0 < verdict.accepted.double().mean() < K


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 4), st.booleans(), st.sampled_from([0.2, 0.6, 1.0]))
def test_coupled_text_is_that_of_plain_sampling(seed: int, length: int, bonus: bool, skill: float) -> None:
    """Rounds of deterministic drafts, good and bad ones, against one token at a time with the same uniforms."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.softmax(torch.randn(V, V, generator=generator) * 2, -1)  # the next token by the last one
    numbers = torch.rand(12 + 2 * length, dtype=torch.float64, generator=generator)
    plain = [0]
    for u in numbers:
        plain.append(int(draw(table[plain[-1]][None], u[None])))
    text, drafted, accepted = [0], 0, 0
    while len(text) <= 12:
        at = len(text) - 1
        good = torch.rand(length, generator=generator) < skill
        bad = torch.randint(0, V, (length,), generator=generator)
        draft = torch.where(good, torch.tensor(plain[at + 1 : at + 1 + length]), bad)
        rows = table[torch.tensor([text[-1], *draft.tolist()])][None, : length + bonus]
        verdict = verify_coupled(draft[None], rows, numbers[None, at : at + length + 1])
        kept = int(verdict.accepted)
        text += draft[:kept].tolist()
        if kept < length or bonus:
            text.append(int(verdict.following))
        else:
            assert int(verdict.following) == -1
        drafted, accepted = drafted + length, accepted + kept
    assert text == plain[: len(text)]
    assert accepted == drafted or skill < 1


def test_greedy() -> None:
    draft = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    choices = torch.tensor([[1, 2, 3, 4]]).expand(4, 4)
    verdict = verify_greedy(draft, choices)
    assert verdict.accepted.tolist() == [3, 1, 0, 2]
    assert verdict.following.tolist() == [4, 2, 1, 3]
    empty = verify_greedy(draft[:, :0], choices[:, :1])
    assert empty.accepted.tolist() == [0] * 4
    assert empty.following.tolist() == [1] * 4


def test_greedy_without_a_bonus_row() -> None:
    draft = torch.tensor([[1, 2, 3], [1, 9, 3]])
    verdict = verify_greedy(draft, torch.tensor([[1, 2, 3]]).expand(2, 3))
    assert verdict.accepted.tolist() == [3, 1]
    assert verdict.following.tolist() == [-1, 2]
    nothing = verify_greedy(draft[:, :0], draft[:, :0])
    assert nothing.following.tolist() == [-1, -1]


@pytest.mark.parametrize("verify", [verify_sampled, verify_block])
@pytest.mark.parametrize("rows", [0, 1])
def test_no_draft_at_all(verify: Verifier, rows: int) -> None:
    p = torch.softmax(torch.randn(4, rows, V), -1)
    none, u = torch.zeros(4, 0), torch.rand(4, 1, dtype=torch.float64)
    verdict = verify(none.long(), none, None, p, None, none.double(), u)
    assert verdict.accepted.tolist() == [0] * 4
    assert verdict.following.equal(draw(p[:, 0], u[:, 0]) if rows else torch.full((4,), -1))
    coupled = verify_coupled(none.long(), p, u)
    assert coupled.following.equal(verdict.following)


@pytest.mark.parametrize("verify", [verify_sampled, verify_block])
def test_a_shorter_draft_can_be_padded(verify: Verifier) -> None:
    """Padding has q = 0 everywhere, probability 1 and a uniform of 1: the outcome is that of the shorter draft."""
    n, short = 500, K - 1
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(n, K + 1, V, generator=generator), -1)
    q = torch.softmax(p[:, :K, SMALL].log() + torch.randn(n, K, len(SMALL), generator=generator), -1)
    index = torch.stack([draw(q[:, i], torch.rand(n, generator=generator)) for i in range(K)], 1)
    chosen, tokens = q.gather(2, index[:, :, None])[:, :, 0], SMALL[index]
    accept, number = (torch.rand(n, width, generator=generator, dtype=torch.float64) for width in (K, K + 1))
    want = verify(tokens[:, :short], chosen[:, :short], q[:, :short], p[:, : short + 1], SMALL, accept[:, :short], number)
    q[:, short:], chosen[:, short:], accept[:, short:], tokens[:, short:] = 0.0, 1.0, 1.0, 0
    found = verify(tokens, chosen, q, p, SMALL, accept, number)
    assert found.accepted.equal(want.accepted)
    assert found.following.equal(want.following)
    assert set(want.accepted.tolist()) == {0, 1, 2}


def test_equal_distributions_accept_everything_and_never_fail() -> None:
    p = torch.softmax(torch.randn(64, 1, V), -1).expand(64, K + 1, V)
    drafts = torch.randint(0, V, (64, K))
    chosen = p[:, :K].gather(2, drafts[:, :, None])[:, :, 0]
    top = [torch.full((64, n), TOP, dtype=torch.float64) for n in (K, K + 1)]
    for verify in (verify_sampled, verify_block):
        assert (verify(drafts, chosen, p[:, :K], p, None, *top).accepted == K).all()
    assert residual(p[:, 0], p[:, 0]).equal(p[:, 0])


def test_the_parts() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.8]])
    wide = scatter(q, torch.tensor([2, 1]), 3)
    assert wide.tolist() == [[0.0, pytest.approx(0.8), pytest.approx(0.2)]]
    assert residual(p, wide).tolist() == [[0.5, 0.0, 0.0]]
    assert acceptance(p, wide).tolist() == [[1.0, pytest.approx(0.375), 1.0]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.3, 1.0]), min_size=1, max_size=6).filter(any), st.integers(0, 2**52 - 1))
def test_draw_returns_positive_weight(weights: list[float], bits: int) -> None:
    found = draw(torch.tensor([weights], dtype=torch.float64), torch.tensor([bits / 2**52], dtype=torch.float64))
    assert weights[int(found)] > 0


def test_uniforms_depend_on_key_only() -> None:
    alone = uniforms(5, Stream.DRAFT, [3], [17], 4)
    among = uniforms(5, Stream.DRAFT, [9, 3], [0, 15], 6)
    assert alone[0].equal(among[1, 2:6])
    others = [
        uniforms(6, Stream.DRAFT, [3], [17], 4),
        uniforms(5, Stream.ACCEPT, [3], [17], 4),
        uniforms(5, Stream.DRAFT, [4], [17], 4),
    ]
    assert not any(alone.equal(x) for x in others)
    many = uniforms(0, Stream.TOKEN, list(range(2000)), [0] * 2000, 50).flatten()
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(torch.corrcoef(torch.stack([many[:-1], many[1:]]))[0, 1]) < 0.02
