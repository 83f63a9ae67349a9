"""Costs of a round, and the choice of K together with the chunk width of batch-sequential verification."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.decode.chooser import Chooser
from eagle.decode.control import ControlSettings, Plan
from eagle.decode.cost import CostTable, chunk_widths
from eagle.decode.replay import Round, best_fixed, replay
from tests.decode.test_control import cpu_costs


def linear(fixed: float, each: float, draft_fixed: float, draft_each: float, overhead: float = 0.0) -> CostTable:
    """A pass of n tokens costs fixed + each * n; a draft of K tokens draft_fixed + draft_each * K."""
    target = {(batch, width): fixed + each * batch * width for batch in (1, 2, 64) for width in (1, 9)}
    draft = {(batch, k): draft_fixed + draft_each * k for batch in (1, 64) for k in (1, 8)}
    return CostTable(target, draft, {1: overhead})


def teach(chooser: Chooser, batch: int, rates: Sequence[float], rounds: int = 150) -> None:
    """Show a chooser rounds of 8 drafts whose position k is accepted at rates[k] (given all before it)."""
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        accepted = np.cumprod(rng.random((batch, 8)) < np.asarray(rates), axis=1).sum(1)
        chooser.observe(batch, Plan(8), accepted.tolist())


def test_interpolation() -> None:
    costs = CostTable({(1, 1): 1.0, (1, 5): 2.0, (4, 1): 2.0, (4, 5): 6.0}, {(1, 2): 0.2, (1, 4): 0.4}, {1: 0.1, 3: 0.3})
    assert costs.target_seconds(1, 3) == pytest.approx(1.5)
    assert costs.target_seconds(2.5, 3) == pytest.approx(2.75)
    assert costs.target_seconds(1, 9) == pytest.approx(3.0)  # last slope
    assert costs.target_seconds(0.5, 1) == 1.0  # flat
    assert costs.target_seconds(7, 5) == pytest.approx(10.0)
    assert [costs.draft_seconds(9, k) for k in (0, 1, 2, 3, 5)] == pytest.approx([0.0, 0.2, 0.2, 0.3, 0.5])
    assert costs.round_seconds(2, 2) == pytest.approx(1.5 + (4.0 - 1.5) / 3 + 0.2 + 0.2)
    assert costs.max_length == 4
    assert CostTable({(1, 3): 1.0}, {(1, 8): 1.0}).max_length == 2


def test_noisy_measurements_are_made_monotone() -> None:
    costs = CostTable({(1, 1): 1.0, (1, 2): 0.9, (1, 3): 1.2, (8, 1): 0.8, (8, 3): 1.1}, {(1, 0): 0.05, (1, 1): 0.3, (1, 2): 0.2})
    grid = [[costs.target_seconds(b, w) for w in (1, 1.5, 2, 3, 4)] for b in (1, 3, 8, 20)]
    assert np.all(np.diff(grid, axis=0) >= 0)
    assert np.all(np.diff(grid, axis=1) >= 0)
    assert costs.target_seconds(1, 2) == 1.0
    assert [costs.draft_seconds(1, k) for k in (0, 1, 2)] == [0.05, 0.3, 0.3]


def test_json_round_trip() -> None:
    costs = CostTable({(1, 1): 1.0, (8, 3): 2.5}, {(1, 0): 0.0, (1, 4): 0.25}, {1: 0.125})
    assert CostTable.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version"),
        ({"target": []}, "at least one"),
        ({"draft": [[1, 0, 0.1]]}, "at least one"),
        ({"target": [[1, 1, 0.0]]}, "positive"),
        ({"target": [[1, 1, float("nan")]]}, "finite"),
        ({"target": [[1, 0, 1.0]]}, "start at 1"),
        ({"target": [[1.5, 1, 1.0]]}, "no row"),
        ({"target": [[1, 1]]}, "no row"),
        ({"target": [[1, 1, True]]}, "no row"),
        ({"target": [[1, 1, 1.0], [1, 1, 2.0]]}, "twice"),
        ({"draft": [[1, 1, -0.1]]}, "not negative"),
        ({"draft": None}, "list of rows"),
        ({"overhead": [[0, 0.1]]}, "start at 1"),
    ],
)
def test_bad_tables(change: dict[str, object], match: str) -> None:
    good = json.loads(CostTable({(1, 1): 1.0}, {(1, 1): 0.1}).to_json())
    with pytest.raises(ValueError, match=match):
        CostTable.from_json(json.dumps(good | change))
    with pytest.raises(ValueError, match="Expecting|version"):
        CostTable.from_json("[1]" if match == "version" else "{")


def test_chunk_widths() -> None:
    assert chunk_widths(8, 0) == chunk_widths(8, 9) == chunk_widths(8, 40) == [9]
    assert chunk_widths(8, 4) == [4, 4, 1]
    assert chunk_widths(7, 4) == [4, 4]
    assert chunk_widths(0, 3) == [1]


def test_expected_seconds_are_the_mean_over_outcomes() -> None:
    """Exactly, for linear costs: all outcomes of three rows are enumerated."""
    costs, rate, length, chunk = linear(2.0, 0.3, 1.0, 0.1, 0.2), 0.7, 5, 2
    survival = [rate**k for k in range(1, 9)]
    chance = [rate**a * (1.0 if a == length else 1.0 - rate) for a in range(length + 1)]
    mean = sum(
        float(np.prod([chance[a] for a in outcome])) * costs.verified_seconds(length, chunk, outcome)
        for outcome in product(range(length + 1), repeat=3)
    )
    assert costs.round_seconds(3, length, chunk, survival) == pytest.approx(mean)
    assert costs.verified_seconds(length, 0, [0, 5, 1]) == pytest.approx(costs.round_seconds(3, length))


def test_synchronous_passes_take_alive_rows_only() -> None:
    costs = linear(2.0, 0.3, 1.0, 0.0)
    # 8 drafts, 4 at a time: 4 tokens of two rows, 4 tokens of the row that passed, its last draft for the bonus token
    assert costs.verified_seconds(8, 4, [3, 8]) == pytest.approx(1.0 + (2 + 0.3 * 8) + (2 + 0.3 * 4) + (2 + 0.3))
    assert costs.verified_seconds(8, 4, [3, 4]) == pytest.approx(1.0 + (2 + 0.3 * 8) + (2 + 0.3 * 4))
    assert costs.verified_seconds(8, 4, [3, 3]) == pytest.approx(1.0 + (2 + 0.3 * 8))


def test_carry_over_seconds() -> None:
    costs = linear(2.0, 0.3, 1.0, 0.5)
    survival = [0.5**k for k in range(1, 9)]
    passes = 1 + 0.5**2 + 0.5**4
    assert costs.carry_seconds(8, 5, 2, survival) == pytest.approx(passes * (2 + 0.3 * 16 + 1.0 + 0.5 * 5))
    assert costs.carry_seconds(8, 5, 6, survival) == costs.round_seconds(8, 5)


def test_bad_rounds() -> None:
    costs = cpu_costs()
    with pytest.raises(ValueError, match="survival of 2"):
        costs.round_seconds(1, 5, 2, [0.5])
    with pytest.raises(ValueError, match="batch 0"):
        costs.round_seconds(0, 1)
    with pytest.raises(ValueError, match="batch 0"):
        costs.verified_seconds(3, 2, [])
    with pytest.raises(ValueError, match="widths"):
        Chooser(costs, chunks=(0,))
    with pytest.raises(ValueError, match="batch of 3"):
        Chooser(costs).observe(3, Plan(1), [])


def test_options_contain_every_single_pass() -> None:
    options = Chooser(cpu_costs(), chunks=(2, 4)).options
    assert [plan for plan in options if plan.chunk == 0] == [Plan(k) for k in range(9)]
    assert Plan(8, 4) in options
    assert all(plan.chunk <= plan.length for plan in options)
    assert len(set(options)) == len(options)


costs_strategy = st.builds(
    linear, st.floats(0.001, 20.0), st.floats(0.001, 1.0), st.floats(0.0, 20.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0)
)


@settings(max_examples=40, deadline=None)
@given(costs=costs_strategy, batch=st.integers(1, 64), rate=st.floats(0.0, 1.0), carry=st.booleans(), fade=st.floats(0.5, 1.0))
def test_never_worse_than_the_best_single_pass(costs: CostTable, batch: int, rate: float, carry: bool, fade: float) -> None:
    chooser = Chooser(costs, carry_over=carry)
    teach(chooser, batch, [rate * fade**k for k in range(8)], rounds=8)
    chooser.plan(batch)
    teach(chooser, batch, [rate * fade**k for k in range(8)], rounds=8)  # a plan is in force now: hysteresis applies
    chosen = chooser.plan(batch)
    best = max(chooser.expected_rate(batch, Plan(k)) for k in range(9))
    if chosen != Plan(1):  # K = 1 may be a probe
        assert chooser.expected_rate(batch, chosen) * 1.02 >= best * (1 - 1e-9)


@pytest.mark.parametrize(("fixed", "rate"), [(0.05, 0.5), (0.05, 0.8), (2.0, 0.8), (6.0, 0.5), (30.0, 0.8), (4.0, 0.95)])
def test_two_chunks_win_where_the_formula_says(fixed: float, rate: float) -> None:
    """c b (K + 1 - w)(1 - S_w) > F P(any row alive), K = 5, w = 3, in two passes."""
    each, batch, length, width = 0.05, 32, 5, 3
    costs = linear(fixed, each, 1.0, 0.0)
    survival = [rate**k for k in range(1, 9)]
    saved = each * batch * (length + 1 - width) * (1.0 - survival[width - 1])
    extra = fixed * (1.0 - (1.0 - survival[width - 1]) ** batch)
    wins = costs.round_seconds(batch, length, width, survival) < costs.round_seconds(batch, length)
    assert wins == (saved > extra)


def test_chunks_are_chosen_when_drafts_are_paid_for_and_passes_are_cheap() -> None:
    """A block drafter (eight drafts cost what one does) and a target whose passes cost little more than their tokens."""
    costs = linear(1.0, 0.5, 1.0, 0.0)
    chooser = Chooser(costs)
    teach(chooser, 1, [0.8] * 8)
    plan = chooser.plan(1)
    assert plan.chunk > 0
    assert chooser.expected_rate(1, plan) > 1.02 * max(chooser.expected_rate(1, Plan(k)) for k in range(9))
    dear = Chooser(linear(20.0, 0.5, 1.0, 0.0))
    teach(dear, 1, [0.8] * 8)
    assert dear.plan(1).chunk == 0
    assert dear.plan(1).length > 5


def test_chunks_win_in_replay_too() -> None:
    costs = linear(1.0, 0.5, 1.0, 0.0)
    rng = np.random.default_rng(5)
    stream = [Round(1, (int(min(a, 8)),)) for a in rng.geometric(0.15, size=1000) - 1]
    with_chunks = replay(stream, Chooser(costs), costs, 8)
    assert with_chunks.rate > 1.02 * best_fixed(stream, costs, 8).rate


def test_each_form_is_judged_by_its_own_costs() -> None:
    costs, plan = linear(2.0, 0.1, 0.5, 0.1), Plan(8, 4)
    for carry_over in (False, True):
        chooser = Chooser(costs, carry_over=carry_over)
        teach(chooser, 32, [0.8] * 8)
        seconds = (costs.carry_seconds if carry_over else costs.round_seconds)(32, 8, 4, chooser.survival)
        assert chooser.expected_rate(32, plan) == pytest.approx(32 * (1 + sum(chooser.survival)) / seconds)
        other = (costs.round_seconds if carry_over else costs.carry_seconds)(32, 8, 4, chooser.survival)
        assert seconds != pytest.approx(other, rel=0.02)


def test_plan_in_force_stays_within_the_margin() -> None:
    chooser = Chooser(cpu_costs(), ControlSettings(speculation_margin=10.0))
    teach(chooser, 1, [0.95] * 8)
    assert chooser.plan(1).length == 0  # nothing promises eleven times the speed
    eager = Chooser(cpu_costs())
    teach(eager, 1, [0.95] * 8)
    assert eager.plan(1) == Plan(8)


def test_off_and_back() -> None:
    costs = cpu_costs()
    chooser = Chooser(costs)
    stream = [Round(32, (0,) * 32)] * 500 + [Round(32, (8,) * 32)] * 100
    lengths = replay(stream, chooser, costs, 8).lengths
    assert set(lengths[5:500]) == {0, 1}
    assert 5 <= sum(lengths[5:500]) <= 20
    assert lengths[-1] >= 7
