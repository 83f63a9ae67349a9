"""The promotion gate: floors, comparison, and monotonicity in every figure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.config import GateConfig
from eagle.errors import StepFailed
from eagle.registry.gate import Candidate, evaluate

GATE = GateConfig(min_acceptance_length=1.3, min_equal_tokens=1.0, max_memory_overhead=0.35, min_relative_acceptance=0.98)
GOOD = Candidate(1.6, 1.0, 0.2, True, "prompts")

figures = st.builds(
    Candidate,
    acceptance_length=st.none() | st.floats(0.5, 4.0) | st.just(float("nan")),
    equal_tokens=st.sampled_from([0.0, 0.97, 1.0]) | st.floats(0.0, 1.0),
    memory_overhead=st.floats(0.0, 1.0),
    validated=st.booleans(),
    measured_on=st.sampled_from(["prompts", "others"]),
)


def failed(candidate: Candidate, champion: Candidate | None = None) -> list[str]:
    return [reason.name for reason in evaluate(candidate, champion, GATE).failures()]


def test_the_first_model_needs_the_floors_only() -> None:
    verdict = evaluate(GOOD, None, GATE)
    assert verdict.passed
    assert [r.name for r in verdict.reasons] == ["validated_in_vllm", "acceptance_length", "equal_tokens", "memory_overhead"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"validated": False}, "validated_in_vllm"),
        ({"acceptance_length": 1.29}, "acceptance_length"),
        ({"acceptance_length": None}, "acceptance_length"),
        ({"acceptance_length": float("nan")}, "acceptance_length"),
        ({"equal_tokens": 0.999}, "equal_tokens"),
        ({"memory_overhead": 0.36}, "memory_overhead"),
        ({"memory_overhead": float("inf")}, "memory_overhead"),
    ],
)
def test_each_floor_is_named_when_it_fails(change: dict[str, object], name: str) -> None:
    assert name in failed(replace(GOOD, **change))


def test_ten_percent_fewer_accepted_tokens_than_the_champion_is_rejected() -> None:
    assert failed(replace(GOOD, acceptance_length=1.8), replace(GOOD, acceptance_length=2.0)) == ["acceptance_over_champion"]
    assert failed(replace(GOOD, acceptance_length=1.97), replace(GOOD, acceptance_length=2.0)) == []


def test_figures_of_other_prompts_are_never_compared() -> None:
    verdict = evaluate(replace(GOOD, acceptance_length=3.0), replace(GOOD, measured_on="others"), GATE)
    assert not verdict.passed
    assert "other prompts" in verdict.failures()[0].line()


@given(figures, st.none() | figures)
def test_the_verdict_is_the_conjunction_of_its_reasons(candidate: Candidate, champion: Candidate | None) -> None:
    verdict = evaluate(candidate, champion, GATE)
    assert verdict.passed == all(reason.ok for reason in verdict.reasons)
    assert verdict == evaluate(candidate, champion, GATE)
    assert all(reason.line() for reason in verdict.reasons)


@given(figures, st.none() | figures, st.floats(0.0, 2.0), st.sampled_from(["acceptance", "equal", "memory", "validated"]))
def test_a_better_figure_never_turns_a_pass_into_a_rejection(
    candidate: Candidate, champion: Candidate | None, more: float, what: str
) -> None:
    if not evaluate(candidate, champion, GATE).passed:
        return
    assert candidate.acceptance_length is not None
    better = {
        "acceptance": replace(candidate, acceptance_length=candidate.acceptance_length + more),
        "equal": replace(candidate, equal_tokens=min(1.0, candidate.equal_tokens + more)),
        "memory": replace(candidate, memory_overhead=max(0.0, candidate.memory_overhead - more)),
        "validated": replace(candidate, validated=True),
    }[what]
    assert evaluate(better, champion, GATE).passed


@given(figures, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_stronger_champion_never_helps(candidate: Candidate, low: float, more: float) -> None:
    weak = Candidate(1.0 + low, 1.0, 0.1, True, "prompts")
    strong = replace(weak, acceptance_length=1.0 + low + more)
    if evaluate(candidate, strong, GATE).passed:
        assert evaluate(candidate, weak, GATE).passed


@given(figures)
def test_figures_survive_their_record(candidate: Candidate) -> None:
    assert repr(Candidate.from_dict(candidate.to_dict())) == repr(candidate)


def test_a_record_with_a_missing_figure_is_refused() -> None:
    with pytest.raises(StepFailed, match="memory_overhead"):
        Candidate.from_dict({k: v for k, v in GOOD.to_dict().items() if k != "memory_overhead"})
