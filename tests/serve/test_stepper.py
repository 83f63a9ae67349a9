"""The controller behind vLLM's step cycle: drafts are judged a step later, costs are learnt from the steps' times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks import serving
from eagle.decode.cost import CostTable
from eagle.serve.plugin.costs import LearntCosts
from eagle.serve.plugin.metrics import PidMetrics
from eagle.serve.plugin.settings import VARIABLE, PidSettings, load_settings
from eagle.serve.plugin.stepper import StepController

ROOT = Path(__file__).parents[2]


def cycle(
    controller: StepController, batch: int, steps: int, accept: Callable[[int], int], cost: Callable[[int, int], float],
    *, lag: int = 1, start: float = 0.0,
) -> tuple[list[int], float]:
    """Run vLLM's cycle: the length planned in step t is drafted at its end and judged in step t + lag. Returns lengths, time."""
    now, lengths = start, []
    pipe: deque[int] = deque([0] * lag)
    for step in range(steps):
        planned = controller.next_length(batch)
        lengths.append(planned)
        judged = pipe.popleft()
        pipe.append(planned)
        now += cost(batch, judged) * 0.5 + cost(batch, planned) * 0.5
        drafted = [judged] * batch if judged else []
        controller.observe(batch, drafted, [min(accept(step), judged)] * len(drafted))
        controller.time(now, (batch, judged) if judged == planned else None)
    return lengths, now


def dear(batch: int, length: int) -> float:
    """Seconds of a round where every draft costs half a round."""
    return 0.01 * batch * (1.0 + 0.5 * length)


def cheap(batch: int, length: int) -> float:
    """Seconds of a round where drafts cost next to nothing."""
    return 0.01 * batch * (1.0 + 0.02 * length)


@pytest.mark.parametrize("lag", [1, 2])
def test_accepted_drafts_that_cost_little_are_drafted_at_full_length(lag: int) -> None:
    lengths, _ = cycle(StepController(PidSettings(), 5), 4, 120, lambda _: 5, cheap, lag=lag)
    assert set(lengths[-40:]) == {5}


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("batch", [1, 8])
def test_rejected_drafts_switch_speculation_off_but_for_probes(lag: int, batch: int) -> None:
    lengths, _ = cycle(StepController(PidSettings(), 5), batch, 600, lambda _: 0, dear, lag=lag)
    late = lengths[300:]
    assert set(late) == {0, 1}
    assert 0 < late.count(1) < 0.1 * len(late)


def test_speculation_comes_back_when_drafts_are_accepted_again() -> None:
    controller = StepController(PidSettings(), 4)
    _, now = cycle(controller, 1, 200, lambda _: 0, cheap)
    lengths, _ = cycle(controller, 1, 400, lambda _: 4, cheap, start=now)
    assert set(lengths[-20:]) == {4}


def test_load_alone_switches_it_off() -> None:
    """The same acceptance pays at one request and not at 32, as the step times say."""

    def cost(batch: int, length: int) -> float:
        return 0.01 * (1.0 + 0.05 * length if batch == 1 else 8.0 * (1.0 + 2.0 * length))

    controller = StepController(PidSettings(), 3)
    one, now = cycle(controller, 1, 100, lambda step: 2 - step % 2, cost)
    many, now = cycle(controller, 32, 200, lambda step: 2 - step % 2, cost, start=now)
    again, _ = cycle(controller, 1, 60, lambda step: 2 - step % 2, cost, start=now)
    assert min(one[-20:]) >= 2
    assert Counter(many[-100:])[0] > 90
    assert min(again[-20:]) >= 2


def test_each_length_is_tried_when_a_batch_size_is_new_and_only_then() -> None:
    controller = StepController(PidSettings(), 5)
    cycle(controller, 1, 60, lambda _: 5, cheap)
    tried = {length for (mode, length) in controller.state.rounds if mode == "trial"}
    assert tried == {0, 1, 3, 5}
    before = sum(count for (mode, _), count in controller.state.rounds.items() if mode == "trial")
    cycle(controller, 1, 200, lambda _: 5, cheap, start=1e3)
    assert sum(count for (mode, _), count in controller.state.rounds.items() if mode == "trial") == before


def test_a_prompt_among_few_requests_is_drafted_for_by_one_token_at_most() -> None:
    controller = StepController(PidSettings(), 5)
    cycle(controller, 8, 100, lambda _: 5, cheap)
    planned = {prompts: controller.next_length(8, prompts) for prompts in (0, 1, 2, 8)}
    assert planned == {0: 5, 1: 5, 2: 1, 8: 1}  # one first token does not hold seven others back
    assert controller.state.rounds["intake", 1] == 2
    unlimited = StepController(PidSettings(intake_length=16), 5)
    cycle(unlimited, 8, 100, lambda _: 5, cheap)
    assert unlimited.next_length(8, 8) == 5
    rejected = StepController(PidSettings(), 5)
    cycle(rejected, 1, 300, lambda _: 0, dear)
    assert {rejected.next_length(1, 1) for _ in range(5)} <= {0, 1}


def test_no_trial_is_spent_on_a_step_that_tells_no_cost() -> None:
    controller = StepController(PidSettings(), 5)
    for _ in range(200):
        assert controller.next_length(1, 1) <= 1
    assert not any(mode == "trial" for mode, _ in controller.state.rounds)
    cycle(controller, 1, 60, lambda _: 5, cheap)
    assert {length for mode, length in controller.state.rounds if mode == "trial"} == {0, 1, 3, 5}


@pytest.mark.parametrize("lag", [1, 2])
def test_the_first_round_after_a_change_of_length_is_no_cost(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compiles for a new shape in it: a second that would make the length look dear until it is tried again."""
    calls: list[int] = []  # judged, planned, judged, planned, ..

    def cost(batch: int, length: int) -> float:
        calls.append(length)
        new_shape = len(calls) % 2 == 1 and len(calls) > 2 and calls[-3] != length
        return cheap(batch, length) + (2.0 if new_shape else 0.0)

    controller, taken = StepController(PidSettings(), 5), list[tuple[int, float]]()
    add = controller.costs.add
    monkeypatch.setattr(controller.costs, "add", lambda batch, *one: (taken.append(one), add(batch, *one)))
    lengths, _ = cycle(controller, 1, 120, lambda _: 5, cost, lag=lag)
    assert {length for length, _ in taken} == {0, 1, 3, 5}
    assert all(seconds == pytest.approx(cheap(1, length)) for length, seconds in taken)
    assert set(lengths[-40:]) == {5}


def test_a_prompt_between_two_rounds_of_one_length_changes_no_length() -> None:
    controller = StepController(PidSettings(), 3)
    for now, steady, verified in ((1.0, (2, 3), 3), (2.0, None, 3), (3.0, (3, 3), 3), (4.0, None, None), (5.0, (3, 3), 3)):
        controller.time(now, steady, verified)
    assert controller.costs.measured(3) == {3: 1.0}
    assert controller.costs.measured(2) == {}


def test_cut_drafts_say_nothing_of_the_cut_positions() -> None:
    whole, cut = StepController(PidSettings(), 4), StepController(PidSettings(), 4)
    for _ in range(20):
        whole.observe(2, [4], [4])
        cut.observe(2, [4, 1], [4, 1])
    assert list(cut.survival) == list(whole.survival)
    cut.observe(0, [], [])  # a step of prompts only is no round


def test_what_is_drafted_is_within_the_servers_limit() -> None:
    controller = StepController(PidSettings(max_tokens=16), 2)
    lengths, _ = cycle(controller, 1, 100, lambda _: 16, cheap)
    assert max(lengths) == 2


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(1e-4, 10.0)), max_size=60), st.integers(1, 64))
def test_costs_are_positive_and_never_fall_with_the_length(samples: list[tuple[int, float]], batch: int) -> None:
    costs = LearntCosts(6)
    for length, seconds in samples:
        costs.add(batch, length, seconds)
    curve = [costs.round_seconds(batch, length) for length in range(7)]
    assert all(value > 0.0 for value in curve)
    assert curve == sorted(curve)


def test_measured_costs_replace_the_prior_and_scale_the_rest_of_it() -> None:
    prior = CostTable({(1, 1): 1.0, (1, 5): 1.4}, {(1, 1): 0.1, (1, 4): 0.4})
    costs = LearntCosts(4, prior)
    assert costs.round_seconds(1, 4) == pytest.approx(1.8)
    for length, seconds in ((0, 2.0), (4, 3.6)):
        for _ in range(3):
            costs.add(1, length, seconds)
    assert [costs.round_seconds(1, length) for length in (0, 2, 4)] == pytest.approx([2.0, 2.8, 3.6])
    assert costs.round_seconds(32, 0) == pytest.approx(prior.round_seconds(32, 0))  # another bucket: still the prior


def test_a_trial_that_never_gets_a_steady_round_is_given_up() -> None:
    costs = LearntCosts(3)
    asked = [costs.trial(1) for _ in range(200)]
    assert asked[-1] is None
    assert set(asked) == {0, 1, 2, 3, None}


def test_lengths_that_cannot_win_are_not_tried() -> None:
    costs = LearntCosts(4)
    rejected, accepted = [0.05, 0.01, 0.0, 0.0], [0.9, 0.8, 0.7, 0.6]
    for length, seconds in ((0, 1.0), (1, 1.6)):
        for _ in range(3):
            assert costs.trial(8, rejected) == length
            costs.add(8, length, seconds)
    assert [costs.trial(8, rejected) for _ in range(50)] == [None] * 50
    assert costs.trial(8, accepted) == 2  # when the text changes, they are


def test_an_unused_length_is_timed_again_and_its_old_samples_go() -> None:
    costs = LearntCosts(2, refresh=50)
    seconds = 1.0
    for turn in range(400):
        if turn == 60:
            seconds = 5.0
        tried = costs.trial(1)
        costs.add(1, 2 if tried is None else tried, seconds)
    assert costs.measured(1)[0] == pytest.approx(5.0)


def test_settings_come_as_text_or_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pid.json"
    file.write_text(json.dumps({"max_tokens": 3, "control": {"kp": 1.0, "probe_every": 7}}))
    found = load_settings({VARIABLE: str(file)})
    assert found == load_settings({VARIABLE: file.read_text()})
    assert (found.control_settings(8).max_tokens, found.control_settings(8).probe_every) == (3, 7)
    assert found.control_settings(2).max_tokens == 2
    assert load_settings({}) == PidSettings()


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ('{"max_token": 3}', "max_token"),
        ('{"max_tokens": 0}', "max_tokens"),
        ('{"control": {"kq": 1.0}}', "kq"),
        ('{"control": {"beta": 7.0}}', "beta"),
        ('{"costs": {"version": 99}}', "version"),
        ("{not json", "not json"),
        ("/nowhere/pid.json", "/nowhere/pid.json"),
    ],
)
def test_bad_settings_are_one_line_that_names_them(given: str, word: str) -> None:
    with pytest.raises(ValueError, match=VARIABLE) as raised:
        load_settings({VARIABLE: given})
    assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_metrics_count_every_step_once() -> None:
    registry, controller = CollectorRegistry(), StepController(PidSettings(), 3)
    metrics = PidMetrics("0.32.0", 0.5, registry)
    metrics.active()
    for steps in (30, 40):
        cycle(controller, 2, steps, lambda _: 3, cheap)
        metrics.spent(0.25)
        metrics.write(controller, 1.0)
    text = generate_latest(registry).decode()
    assert "eagle_pid_steps_total 70.0" in text
    assert "eagle_pid_overhead_seconds_total 0.5" in text
    assert "eagle_pid_draft_tokens 3.0" in text
    assert 'eagle_pid_active{reason="",vllm="0.32.0"} 1.0' in text
    assert 'eagle_pid_survival{position="3"}' in text
    assert (metrics.due(1.4), metrics.due(1.5)) == (False, True)


def test_the_plugin_needs_nothing_that_vllm_lacks() -> None:
    code = (
        "import sys; import eagle.serve.plugin.stepper, eagle.serve.plugin.metrics\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'numpy', 'mlflow', 'prefect', 'typer'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_overhead_benchmark_drives_the_real_objects() -> None:
    found = serving.measure([1, 3], 2)
    assert [row["batch"] for row in found] == [1, 3]
    assert all(row["us_per_step"]["median"] > 0.0 for row in found)
