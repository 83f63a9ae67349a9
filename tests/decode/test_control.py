"""The controller of the speculation length: regulator, probes, batch changes, survival estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from eagle.decode.control import ControlSettings, FixedLength, Pid, PidController, Plan
from eagle.decode.cost import CostTable
from eagle.decode.intake import Intake, Traffic
from eagle.decode.survival import SurvivalEstimator


def cpu_costs() -> CostTable:
    """Seconds as on a CPU, in units of a plain step at batch 1: wide passes are cheap at batch 1 and dear at batch 32."""
    shapes = {
        1: {1: 1.0, 2: 1.035, 4: 1.1, 9: 1.3},
        8: {1: 2.0, 2: 2.4, 4: 3.2, 9: 5.2},
        32: {1: 6.0, 2: 9.0, 4: 14.5, 9: 28.0},
    }
    target = {(batch, width): seconds for batch, row in shapes.items() for width, seconds in row.items()}
    step = {1: 0.1, 8: 0.205, 32: 0.565}
    return CostTable(target, {(batch, k): seconds * k for batch, seconds in step.items() for k in (1, 2, 4, 8)})


def settings(**changes: Any) -> ControlSettings:
    return dataclasses.replace(ControlSettings(), **changes)


def run(controller: PidController, batch: int, rounds: int, accept: Callable[[int], int]) -> list[int]:
    """Drive a controller: every request of every round would accept `accept(round)` tokens, if so many were drafted."""
    lengths = []
    for now in range(rounds):
        plan = controller.plan(batch)
        lengths.append(plan.length)
        controller.observe(batch, plan, [min(accept(now), plan.length)] * batch if plan.length else [])
    return lengths


def always(count: int) -> Callable[[int], int]:
    return lambda _: count


def geometric(rate: float, seed: int) -> Callable[[int], int]:
    rng = np.random.default_rng(seed)
    return lambda _: int(rng.geometric(1.0 - rate)) - 1


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": -1},
        {"memory": 0.5},
        {"prior_acceptance": 1.1},
        {"prior_weight": 0.0},
        {"beta": 0.0},
        {"kp": -1.0},
        {"ki": float("inf")},
        {"kd": float("nan")},
        {"trim_limit": -0.5},
        {"back_calculation": 2.0},
        {"leak": -0.1},
        {"dead_band": 1.0},
        {"dead_band": 0.3},
        {"surprise": 0.0},
        {"surprise_memory": 0},
        {"length_margin": -0.1},
        {"probe_every": 0},
        {"probe_limit": 4},
        {"probe_budget": 0.0},
        {"probe_drafts": 0},
        {"trace_rounds": 0},
    ],
)
def test_settings_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ControlSettings(**bad)


def test_fixed_length() -> None:
    policy = FixedLength(3, 2)
    policy.observe(1, Plan(3, 2), [0])
    assert policy.plan(1) == policy.plan(64) == Plan(3, 2)
    with pytest.raises(ValueError, match="draft tokens"):
        FixedLength(-1)


def test_pid_terms() -> None:
    proportional = Pid(2.0, 0.0, 0.0, 1.0, 0.0)
    assert proportional.update(0.6, 0.5) == pytest.approx(0.2)
    assert proportional.update(0.0, 0.9) == -1.0
    integral = Pid(0.0, 0.25, 0.0, 1.0, 0.0)
    assert [integral.update(0.6, 0.2) for _ in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_pid_derivative_is_on_the_measurement() -> None:
    pid = Pid(0.0, 0.0, 1.0, 1.0, 0.3)
    assert pid.update(0.5, 0.5) == 0.0
    assert pid.update(0.5, 0.1) == 0.0  # the setpoint steps: no kick
    assert pid.update(0.7, 0.1) == pytest.approx(0.2)
    pid.restart()
    assert pid.update(0.1, 0.1) == 0.0


def test_pid_comes_back_from_saturation() -> None:
    pid = Pid(2.0, 0.25, 0.5, 1.0, 0.3)
    assert {pid.update(1.0, 0.2) for _ in range(500)} == {1.0}
    assert -1.0 <= pid.integral <= 1.0
    outputs = [pid.update(0.1, 0.2) for _ in range(3)]
    assert outputs[-1] < 0.0  # a free integrator would hold 100 tokens


def test_pid_integrator_leaks() -> None:
    pid = Pid(0.0, 0.25, 0.0, 1.0, 0.3, 0.1)
    pid.update(1.0, 0.0)
    assert [pid.update(0.5, 0.5) for _ in range(3)] == pytest.approx([0.225, 0.2025, 0.18225])


def test_constant_input_stops_moving() -> None:
    for batch in (1, 8, 32):
        for count in (0, 1, 3, 8):
            controller = PidController(cpu_costs())
            run(controller, batch, 400, always(count))
            tail = [record.length for record in controller.trace if not record.probe][200:]
            # a deeper draft is tried again for some rounds when what was known of it has faded
            changes = sum(a != b for a, b in pairwise(tail))
            assert changes <= (0 if count in (0, 8) else 10 if batch == 1 else 4), (batch, count, tail)


def test_constant_input_finds_the_best_length() -> None:
    assert run(PidController(cpu_costs()), 1, 100, always(3))[-1] == 3
    assert run(PidController(cpu_costs()), 1, 100, always(8))[-1] == 8
    assert run(PidController(cpu_costs(), settings(max_tokens=5)), 1, 100, always(8))[-1] == 5


def test_dead_band_keeps_small_trims_out() -> None:
    controller = PidController(cpu_costs())
    accept = geometric(0.7, 1)
    steps = 0
    for _ in range(600):
        plan = controller.plan(1)
        controller.observe(1, plan, [min(accept(0), plan.length)] if plan.length else [])
        record = controller.trace[-1]
        moved = record.length - record.feed_forward
        if not record.probe and 1 < record.length < 8:
            assert abs(moved) <= 1
            assert moved == steps
        bucket_trim = record.trim
        if abs(bucket_trim - steps) > 0.75:
            steps = round(bucket_trim)
    assert any(r.length != r.feed_forward for r in controller.trace)
    assert any(0.5 < abs(r.trim) <= 0.75 for r in controller.trace)


def test_trim_is_ahead_of_the_survival_estimate() -> None:
    """After a jump of the acceptance the trim has the sign of the jump before the feed-forward has moved."""
    for before, after, sign in ((0.5, 0.9, 1), (0.9, 0.5, -1)):
        controller = PidController(cpu_costs(), settings(surprise=50.0))
        rng = np.random.default_rng(0)
        for now in range(220):
            plan = controller.plan(8)
            counts = rng.geometric(1.0 - (before if now < 200 else after), size=8) - 1
            controller.observe(8, plan, np.minimum(counts, plan.length).tolist() if plan.length else [])
        jump = controller.trace[200:208]
        assert max(sign * record.trim for record in jump) > 0.5
        assert all((record.hit_rate or 0.0) * sign > (record.setpoint or 0.0) * sign for record in jump[3:])


def test_off_when_nothing_is_accepted_and_back_when_it_is() -> None:
    controller = PidController(cpu_costs())
    lengths = run(controller, 1, 800, always(0))
    assert set(lengths[20:]) == {0, 1}
    seconds = sum(cpu_costs().round_seconds(1, k) for k in lengths)
    assert 1.0 - 800 / seconds < 0.02
    lengths = run(controller, 1, 120, always(8))
    assert lengths[-1] == 8
    assert lengths.index(8) < 80


def test_probes_are_bursts_at_growing_intervals_up_to_the_budget() -> None:
    rules = settings(probe_every=8, probe_limit=100, probe_budget=0.004, probe_drafts=4)
    controller = PidController(cpu_costs(), rules)
    lengths = run(controller, 1, 1500, always(0))
    starts = [i for i in range(40, 1500) if lengths[i] and not lengths[i - 1]]
    assert all(lengths[i : i + 5] == [1, 1, 1, 1, 0] for i in starts[:-1])
    gaps = [b - a - 4 for a, b in pairwise(starts)]
    assert gaps == sorted(gaps)
    assert max(gaps) == 100
    assert len(gaps) > 8
    assert all(record.probe == (record.length == 1) for record in controller.trace[40:])
    # at batch 32 a single round has evidence enough
    lengths = run(PidController(cpu_costs(), rules), 32, 300, always(0))
    assert all(a + b < 2 for a, b in pairwise(lengths[20:]))
    assert sum(lengths[20:]) >= 2


def test_batch_change_is_bumpless() -> None:
    controller = PidController(cpu_costs())
    accept = [0, 8, 4, 3, 8, 2, 8, 1]  # by request: a steady hit rate that needs a long K at batch 1, a short one at 32

    def rounds(batch: int, count: int) -> None:
        for _ in range(count):
            plan = controller.plan(batch)
            controller.observe(batch, plan, [min(accept[i % 8], plan.length) for i in range(batch)] if plan.length else [])

    rounds(8, 150)
    before = controller.trace[-1]
    rounds(32, 10)
    first, *after = controller.trace[150:]
    assert first.feed_forward < before.feed_forward
    assert first.hit_rate is not None
    assert before.setpoint is not None
    assert first.hit_rate > before.setpoint + 0.05  # comparing across the change would kick
    assert all(abs(record.trim) < 0.1 and record.length == record.feed_forward for record in (first, *after))
    rounds(8, 3)
    assert all(abs(r.trim - before.trim) < 0.1 and r.length == before.length for r in controller.trace[-3:])


def test_derivative_sees_no_batch_change() -> None:
    """Between two visits of a bucket the hit rate has moved: only what moves within a visit counts."""
    controller = PidController(cpu_costs(), settings(kp=0.0, ki=0.0, kd=1.0))
    run(controller, 1, 100, always(8))
    run(controller, 8, 8, always(2))
    assert controller.trace[-1].trim != 0.0
    run(controller, 1, 1, always(2))
    assert controller.trace[-1].trim == 0.0
    run(controller, 1, 1, always(0))
    assert controller.trace[-1].trim < 0.0


def test_deterministic_and_plan_changes_nothing() -> None:
    one, two = PidController(cpu_costs()), PidController(cpu_costs())
    accept, same = geometric(0.6, 3), geometric(0.6, 3)
    for now in range(300):
        batch = 1 + now // 100
        plan = one.plan(batch)
        assert two.plan(batch) == two.plan(batch) == plan
        for controller, draw in ((one, accept), (two, same)):
            controller.observe(batch, plan, [min(draw(0), plan.length) for _ in range(batch)])
    assert one.trace == two.trace


def test_bounds_and_bad_rounds() -> None:
    table = CostTable({(1, 1): 1.0, (1, 4): 1.0}, {(1, 6): 0.01})
    controller = PidController(table, settings(trace_rounds=5))
    assert max(run(controller, 1, 60, always(9))) == 3  # four tokens wide is what was measured
    assert len(controller.trace) == 5
    with pytest.raises(ValueError, match="batch of 2"):
        controller.observe(2, Plan(3), [1, 1, 1])
    with pytest.raises(ValueError, match="accepted counts"):
        controller.observe(1, Plan(2), [3])
    with pytest.raises(ValueError, match="batch 0"):
        controller.plan(0)
    never = PidController(table, settings(max_tokens=0))
    assert set(run(never, 1, 50, always(9))) == {0}


def test_survival_follows_the_truth() -> None:
    model = SurvivalEstimator(6)
    rng = np.random.default_rng(0)
    rates = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    for _ in range(200):
        accepted = np.cumprod(rng.random((16, 6)) < rates, axis=1).sum(1)
        model.observe(6, accepted.tolist())
    assert np.allclose(model.survival, np.cumprod(rates), atol=0.05)
    assert model.tau(6) == pytest.approx(1.0 + sum(model.survival))
    assert model.hit_rate(2) == pytest.approx((model.survival[0] + model.survival[1]) / 2)
    assert abs(model.deviation) < 4 * model.noise < 0.1


def test_survival_beyond_what_was_drafted_is_extrapolated() -> None:
    model = SurvivalEstimator(4)
    for now in range(200):
        model.observe(1, [int(now % 10 != 0)])
    first = model.survival[0]
    assert first == pytest.approx(0.9, abs=0.05)
    assert list(model.survival) == pytest.approx([first**k for k in range(1, 5)])


def test_survival_memory_is_in_rounds_whatever_the_batch() -> None:
    halves = []
    for batch in (1, 32):
        model = SurvivalEstimator(1, surprise=100.0, prior_weight=1e-6)
        for count in ([0] + [1] * 9) * 20 + [0] * 32:
            model.observe(1, [count] * batch)
        halves.append(model.survival[0])
    assert halves == pytest.approx([0.9 * (1 - 1 / 32) ** 32] * 2, abs=0.03)
    assert halves[0] == pytest.approx(halves[1])


def test_survival_forgets_fast_when_surprised_only() -> None:
    rounds = {}
    for surprise in (2.0, 100.0):
        model = SurvivalEstimator(4, surprise=surprise)
        for _ in range(100):
            model.observe(4, [4, 3, 4, 4])
        assert not model.surprised
        rounds[surprise] = 0
        while model.survival[0] > 0.5:
            model.observe(4, [0, 0, 1, 0])
            rounds[surprise] += 1
    assert rounds[2.0] < 12 < 18 < rounds[100.0]


def test_survival_rest_keeps_the_estimate() -> None:
    model = SurvivalEstimator(3)
    for _ in range(100):
        model.observe(3, [0, 1, 0, 0])
    before, evidence = list(model.survival), model.evidence
    for _ in range(500):
        model.rest(4.0)
    assert model.evidence == pytest.approx(4.0) != pytest.approx(evidence)
    assert list(model.survival) == pytest.approx(before, abs=0.03)
    for bad in ([], [4], [-1]):
        with pytest.raises(ValueError, match="accepted counts"):
            model.observe(3, bad)
    with pytest.raises(ValueError, match="prior weight"):
        SurvivalEstimator(3, prior_weight=0.0)


def short_answers(controller: PidController, batch: int, rounds: int, length: int, cost: float) -> list[int]:
    """Drive a controller with two accepted tokens a round: requests of `length` tokens whose prompts cost the draft `cost` each."""
    lengths, tokens, known = [], 0, 0
    for _ in range(rounds):
        plan = controller.plan(batch)
        lengths.append(plan.length)
        rows = (plan.rows or batch) if plan.length else 0
        taken, known = max(rows - known, 0), max(rows, known)
        tokens += batch + rows * min(2, plan.length)
        ended, tokens = divmod(tokens, length)
        known = max(known - ended, 0)
        controller.observe(batch, plan, [min(2, plan.length)] * rows, Traffic(ended, taken, cost * taken))
    return lengths


def test_short_answers_behind_dear_prompts_switch_speculation_off() -> None:
    dear = short_answers(PidController(cpu_costs(), settings()), 8, 400, 20, 4.0)
    assert max(dear[100:]) <= 1  # probes only
    assert sum(length > 0 for length in dear[100:]) < 15
    assert min(short_answers(PidController(cpu_costs(), settings()), 8, 400, 20, 0.1)[100:]) > 0
    assert min(short_answers(PidController(cpu_costs(), settings()), 8, 400, 2000, 4.0)[100:]) > 0  # long answers: seldom a prompt


def test_speculation_comes_back_when_answers_grow_long() -> None:
    controller = PidController(cpu_costs(), settings())
    assert short_answers(controller, 8, 300, 20, 4.0)[-1] == 0
    assert min(short_answers(controller, 8, 3000, 5000, 4.0)[-200:]) > 0


def test_nothing_is_added_before_a_request_has_ended() -> None:
    intake = Intake()
    assert intake.seconds(8, 2.0, on=False) == 0.0
    intake.learn(Traffic(0, 4, 2.0), 16)
    assert intake.per_request == 0.5
    assert intake.seconds(8, 2.0, on=True) == 0.0
    assert intake.seconds(8, 2.0, on=False) == pytest.approx(8 * 0.5 / 64)
    intake.learn(Traffic(2, 0, 0.0), 16)
    assert intake.seconds(8, 2.0, on=True) == pytest.approx(0.5 * 8 * 2.0 * 2 / 32, rel=0.01)
