"""Losslessness of verification: by exact enumeration, and of the composed function by counting."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.decode.randomness import Stream, uniforms
from eagle.decode.verify import acceptance, draw, residual, scatter, verify_greedy, verify_sampled
from tests.decode.models import surprise

V, K = 5, 3
IDS = torch.tensor([0, 2, 4])  # the draft's vocabulary is smaller than the target's


def tables(seed: int, width: int, sharp: float = 1.5) -> dict[tuple[int, ...], torch.Tensor]:
    """A distribution over `width` tokens for every history of up to K target tokens, float64."""
    rng = np.random.default_rng(seed)
    histories = [h for n in range(K + 1) for h in product(range(V), repeat=n)]
    return {h: torch.softmax(torch.from_numpy(rng.normal(size=width) * sharp), 0) for h in histories}


def joint(p: dict[tuple[int, ...], torch.Tensor]) -> dict[tuple[int, ...], float]:
    """The target's own distribution of K + 1 tokens."""
    return {w: float(np.prod([p[w[:i]][w[i]] for i in range(K + 1)])) for w in product(range(V), repeat=K + 1)}


def speculative_joint(
    p: dict[tuple[int, ...], torch.Tensor], q: dict[tuple[int, ...], torch.Tensor]
) -> dict[tuple[int, ...], float]:
    """The distribution of the first K + 1 tokens with speculation, every draft and every outcome enumerated."""
    out = dict.fromkeys(product(range(V), repeat=K + 1), 0.0)

    def spread(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) == K + 1:
            out[prefix] += mass
            return
        for token in range(V):
            spread((*prefix, token), mass * float(p[prefix][token]))

    def verify(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) == K:  # all accepted: bonus token from p
            return spread(prefix, mass)
        for index, token in enumerate(IDS.tolist()):
            drawn = mass * float(q[prefix][index])
            kept = float(acceptance(p[prefix][token], q[prefix][index]))
            verify((*prefix, token), drawn * kept)
            rest = residual(p[prefix][None], scatter(q[prefix][None], IDS, V))[0]
            for other, weight in enumerate((rest / rest.sum()).tolist()):
                if drawn * (1 - kept) * weight:
                    spread((*prefix, other), drawn * (1 - kept) * weight)
        return None

    verify((), 1.0)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_enumeration_equals_target(seed: int) -> None:
    p, q = tables(seed, V), tables(seed + 100, len(IDS))
    truth, found = joint(p), speculative_joint(p, q)
    distance = 0.5 * sum(abs(truth[w] - found[w]) for w in truth)
    assert distance <= 1e-12
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("deterministic", [False, True])
def test_composed_function_chi_square(deterministic: bool) -> None:
    """verify_sampled on 200k rows with history-dependent p and q: joint of K + 1 tokens against the target's."""
    count, p, q = 200_000, tables(7, V), tables(8, len(IDS))
    code = torch.tensor([V**i for i in range(K)])
    p_table = torch.zeros(K + 1, V**K, V, dtype=torch.float64)
    q_table = torch.zeros(K + 1, V**K, len(IDS), dtype=torch.float64)
    for history in p:
        at = sum(token * V**i for i, token in enumerate(history))
        p_table[len(history), at], q_table[len(history), at] = p[history], q[history]
    requests = list(range(count))
    u_draft, u_accept, u_token = (uniforms(3, s, requests, [0] * count, K + 1) for s in (Stream.DRAFT, Stream.ACCEPT, Stream.TOKEN))
    drafts = torch.zeros(count, K, dtype=torch.long)
    q_rows, p_rows, chosen = [], [p_table[0, torch.zeros(count, dtype=torch.long)]], []
    for i in range(K):
        history = (drafts[:, :i] * code[:i]).sum(1)
        q_here = q_table[i, history]
        index = q_here.argmax(1) if deterministic else draw(q_here, u_draft[:, i])
        drafts[:, i] = IDS[index]
        q_rows.append(q_here)
        chosen.append(torch.ones(count, dtype=torch.float64) if deterministic else q_here.gather(1, index[:, None])[:, 0])
        p_rows.append(p_table[i + 1, (drafts[:, : i + 1] * code[: i + 1]).sum(1)])
    verdict = verify_sampled(
        drafts,
        torch.stack(chosen, 1),
        None if deterministic else torch.stack(q_rows, 1),
        torch.stack(p_rows, 1),
        IDS,
        u_accept[:, :K],
        u_token,
    )
    words = torch.cat([drafts, drafts[:, :1]], 1)
    words[torch.arange(count), verdict.accepted] = verdict.following
    for i in range(1, K + 1):  # what a round did not decide is continued by the target
        fresh = draw(p_table[i, (words[:, :i] * code[:i]).sum(1)], uniforms(4, Stream.TOKEN, requests, [i] * count, 1)[:, 0])
        words[:, i] = torch.where(verdict.accepted < i, fresh, words[:, i])
    cells = torch.tensor([V**i for i in range(K + 1)])
    observed = torch.bincount((words * cells).sum(1), minlength=V ** (K + 1)).double()
    expected = torch.zeros(V ** (K + 1), dtype=torch.float64)
    for word, mass in joint(p).items():
        expected[sum(token * V**i for i, token in enumerate(word))] = mass * count
    assert surprise(observed, expected) < 4
    assert 0 < verdict.accepted.double().mean() < K


def test_greedy() -> None:
    draft = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    choices = torch.tensor([[1, 2, 3, 4]]).expand(4, 4)
    verdict = verify_greedy(draft, choices)
    assert verdict.accepted.tolist() == [3, 1, 0, 2]
    assert verdict.following.tolist() == [4, 2, 1, 3]
    empty = verify_greedy(draft[:, :0], choices[:, :1])
    assert empty.accepted.tolist() == [0] * 4
    assert empty.following.tolist() == [1] * 4


def test_equal_distributions_accept_everything_and_never_fail() -> None:
    p = torch.softmax(torch.randn(64, 1, V), -1).expand(64, K + 1, V)
    drafts = torch.randint(0, V, (64, K))
    chosen = p[:, :K].gather(2, drafts[:, :, None])[:, :, 0]
    top = 1 - 2.0**-52
    verdict = verify_sampled(
        drafts, chosen, p[:, :K], p, None, *(torch.full((64, n), top, dtype=torch.float64) for n in (K, K + 1))
    )
    assert (verdict.accepted == K).all()
    assert residual(p[:, 0], p[:, 0]).equal(p[:, 0])


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
