"""Replay of policies over recorded acceptance, and what the controller loses on streams whose best K is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from eagle.decode.chooser import Chooser
from eagle.decode.control import ControlSettings, FixedLength, LengthPolicy, PidController, Plan
from eagle.decode.cost import CostTable
from eagle.decode.intake import QUIET, Traffic
from eagle.decode.replay import (
    Outcome,
    Round,
    best_fixed,
    good_lengths,
    load_trace,
    oracle,
    regret,
    replay,
    save_trace,
    settle_rounds,
    worst_window,
)
from eagle.errors import DataError
from tests.decode.test_control import cpu_costs

K_MAX = 8


def drawn(rate: float, batch: int, rounds: int, seed: int, fade: float = 1.0) -> list[Round]:
    """Independent requests; draft k is accepted at rate * fade^k given all before it."""
    rng = np.random.default_rng(seed)
    passed = rng.random((rounds, batch, K_MAX)) < rate * fade ** np.arange(K_MAX)
    return [Round(batch, tuple(row)) for row in np.cumprod(passed, axis=2).sum(2).tolist()]


def best_length(rate: float, batch: int, costs: CostTable) -> int:
    def speed(k: int) -> float:
        return sum(rate**i for i in range(k + 1)) / costs.round_seconds(batch, k)

    return max(range(K_MAX + 1), key=speed)


class Recorder:
    """A policy that says what it is told and writes down what it hears."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans, self.heard = list(plans), list[tuple[int, Plan, list[int]]]()

    def plan(self, batch: int) -> Plan:
        return self.plans[len(self.heard)]

    def observe(self, batch: int, plan: Plan, accepted: Sequence[int], traffic: Traffic = QUIET) -> None:
        self.heard.append((batch, plan, list(accepted)))


def test_replay_counts() -> None:
    costs = cpu_costs()
    policy = Recorder([Plan(3), Plan(0), Plan(5, 2)])
    stream = [Round(2, (5, 1)), Round(1, (8,)), Round(2, (0, 4))]
    outcome = replay(stream, policy, costs, 8)
    assert policy.heard == [(2, Plan(3), [3, 1]), (1, Plan(0), []), (2, Plan(5, 2), [0, 4])]
    assert outcome.lengths == (3, 0, 5)
    assert outcome.round_tokens == (6, 1, 6)
    assert outcome.tokens == 13
    chunked = costs.verified_seconds(5, 2, [0, 4])
    assert outcome.seconds == pytest.approx(costs.round_seconds(2, 3) + costs.round_seconds(1, 0) + chunked)
    assert outcome.rate == pytest.approx(13 / outcome.seconds)


def test_replay_refuses() -> None:
    costs = cpu_costs()
    with pytest.raises(ValueError, match="empty"):
        replay([], FixedLength(1), costs, 8)
    with pytest.raises(ValueError, match="above 4"):
        replay([Round(1, (5,))], FixedLength(1), costs, 4)
    with pytest.raises(ValueError, match="drafts 5"):
        replay([Round(1, (4,))], FixedLength(5), costs, 4)
    with pytest.raises(ValueError, match="cannot have"):
        Round(2, (1,))


def test_best_fixed_and_oracle_are_the_best() -> None:
    """Against every sequence of lengths of a short stream."""
    costs = cpu_costs()
    stream = [Round(1, (0,)), Round(8, (1, 2, 0, 3, 3, 1, 0, 2)), Round(1, (3,)), Round(8, (3,) * 8)]
    rates = {
        lengths: replay(stream, Recorder([Plan(k) for k in lengths]), costs, 3).rate for lengths in product(range(4), repeat=4)
    }
    assert oracle(stream, costs, 3).rate == pytest.approx(max(rates.values()))
    assert rates[oracle(stream, costs, 3).lengths] == pytest.approx(max(rates.values()))
    assert best_fixed(stream, costs, 3).rate == pytest.approx(max(rates[(k,) * 4] for k in range(4)))
    mine = regret(replay(stream, FixedLength(1), costs, 3), stream, costs, 3)
    assert mine.fixed == pytest.approx(1 - rates[(1,) * 4] / max(rates[(k,) * 4] for k in range(4)))
    assert mine.oracle == pytest.approx(1 - rates[(1,) * 4] / max(rates.values()))


def test_good_lengths_are_those_near_the_best_one() -> None:
    costs = CostTable({(1, 1): 1.0, (1, 5): 1.0}, {(1, 1): 0.1, (1, 4): 0.4})
    stream = [Round(1, (4,)), Round(1, (0,))] * 10
    rates = [1.0, 1.5 / 1.1, 2.0 / 1.2, 2.5 / 1.3, 3.0 / 1.4]
    for share in (0.5, 0.85, 0.9, 1.0):
        assert good_lengths(stream, costs, 4, share) == {k for k, rate in enumerate(rates) if rate >= share * max(rates)}
    assert settle_rounds([0, 0, 3, 4, 3, 4, 3, 0], 1, {3, 4}) == 1
    assert settle_rounds([0, 0, 3, 4, 0, 4, 3, 3], 1, {3, 4}) == 4
    assert settle_rounds([0, 0, 3], 0, {7}) is None


def test_settle_rounds() -> None:
    lengths = [1] * 10 + [2, 5, 2, 4, 5, 5, 4, 6, 2, 5, 5]
    assert settle_rounds(lengths, 10, range(4, 7)) == 3
    assert settle_rounds(lengths, 10, {5}) == 9  # holds to the end
    assert settle_rounds(lengths, 10, range(3)) is None
    assert settle_rounds(lengths, 0, range(3)) == 0


def test_worst_window() -> None:
    reference = Outcome((0,) * 6, (1,) * 6, (1.0,) * 6)
    slow = Outcome((0,) * 6, (1,) * 6, (1.0, 1.0, 2.0, 2.0, 1.0, 1.0))
    assert worst_window(slow, reference, 2) == pytest.approx(0.5)
    assert worst_window(slow, reference, 4) == pytest.approx(1 / 3)
    assert worst_window(slow, reference, 100) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="same stream"):
        worst_window(slow, Outcome((0,), (1,), (1.0,)))


def test_trace_round_trip(tmp_path: Path) -> None:
    stream = drawn(0.6, 3, 20, 0)
    save_trace(tmp_path / "trace.jsonl", stream)
    assert load_trace(tmp_path / "trace.jsonl") == stream


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "",
        "3",
        '{"batch": 1}',
        '{"batch": 2, "accepted": [1]}',
        '{"batch": 1, "accepted": [-1]}',
        '{"batch": 1, "accepted": [1.5]}',
        '{"batch": 1, "accepted": 1}',
        '{"batch": true, "accepted": [1]}',
        '{"batch": 1, "accepted": [1], "k": 3}',
        '{"batch": 0, "accepted": []}',
    ],
)
def test_bad_trace(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"batch": 1, "accepted": [1]}\n' + bad + "\n")
    with pytest.raises(DataError, match=r"trace\.jsonl, row 2: ") as caught:
        load_trace(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="missing"):
        load_trace(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("rate", [0.2, 0.3, 0.5, 0.7, 0.8, 0.9])
def test_regret_on_a_stationary_stream(rate: float, batch: int) -> None:
    costs = cpu_costs()
    for seed in (11, 12):
        stream = drawn(rate, batch, 1000, seed)
        mine = regret(replay(stream, PidController(costs), costs, K_MAX), stream, costs, K_MAX)
        assert mine.fixed <= 0.02
        assert mine.oracle >= mine.fixed - 1e-12


@pytest.mark.parametrize("fade", [0.85, 0.95])
def test_regret_when_deeper_drafts_are_worse(fade: float) -> None:
    costs = cpu_costs()
    stream = drawn(0.85, 1, 1500, 3, fade)
    assert regret(replay(stream, PidController(costs), costs, K_MAX), stream, costs, K_MAX).fixed <= 0.02


@pytest.mark.parametrize("make", [PidController, Chooser])
@pytest.mark.parametrize(("batch", "rate"), [(32, 0.0), (32, 0.2), (32, 0.4), (8, 0.1), (1, 0.0)])
def test_speculation_that_loses_costs_little(make: type[PidController] | type[Chooser], batch: int, rate: float) -> None:
    costs = cpu_costs()
    stream = drawn(rate, batch, 1000, 5)
    plain = replay(stream, FixedLength(0), costs, K_MAX)
    policy: LengthPolicy = make(costs)
    mine = replay(stream, policy, costs, K_MAX)
    assert mine.lengths.count(0) > 800
    assert 1.0 - mine.rate / plain.rate <= 0.02
    assert sum(mine.lengths[200:]) > 0  # it goes on trying


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.3), (0.8, 0.5), (0.9, 0.6), (0.5, 0.8)])
def test_settles_after_a_switch(before: float, after: float, batch: int) -> None:
    """Within a token of the new best K in 20 rounds (median of seeds); the trim and fast forgetting are what does it."""
    costs, waits, slow = cpu_costs(), list[int](), list[int]()
    target = best_length(after, batch, costs)
    without = ControlSettings(kp=0.0, ki=0.0, kd=0.0, surprise=1e9)
    for seed in range(7):
        stream = drawn(before, batch, 150, seed) + drawn(after, batch, 150, 100 + seed)
        for waited, policy in ((waits, PidController(costs)), (slow, PidController(costs, without))):
            settled = settle_rounds(replay(stream, policy, costs, K_MAX).lengths, 150, range(target - 1, target + 2))
            waited.append(150 if settled is None else settled)
    assert median(waits) <= 20
    assert sorted(waits)[-2] <= 25
    if abs(best_length(before, batch, costs) - target) > 2:
        assert median(waits) < median(slow)


def test_switching_stream_beats_the_best_fixed_length() -> None:
    """What adaptation is for: no single K suits both tasks."""
    costs = cpu_costs()
    stream = [r for part in range(6) for r in drawn((0.3, 0.9)[part % 2], 1, 200, part)]
    mine = replay(stream, PidController(costs), costs, K_MAX)
    assert mine.rate > 1.05 * best_fixed(stream, costs, K_MAX).rate
    assert regret(mine, stream, costs, K_MAX).oracle < 0.35
    assert worst_window(mine, best_fixed(stream, costs, K_MAX), 64) < 0.15
