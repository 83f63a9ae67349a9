"""The engine's output is the target's own: token for token at temperature 0, in distribution above it."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.decode.engine import DecodeResult, Engine
from eagle.decode.stats import DecodeStats
from tests.decode.models import AUX, OracleDrafter, cut, draft, greedy, prompts, surprise, target

RAGGED = [1, 9, 3, 20, 11, 7, 2, 30]
COUNT = 24


@functools.cache
def reference(kind: str = "llama", **extra: object) -> tuple:
    model = target(kind, **extra)
    questions = prompts(RAGGED)
    return model, questions, [greedy(model, q, COUNT + 8) for q in questions]


@functools.cache
def own_draft() -> object:
    return draft(reference()[0])


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 3, 16])
def test_greedy_equals_transformers(batch: int, length: int) -> None:
    model, questions, answers = reference()
    result = Engine(model, own_draft(), AUX, max_length=60, batch=batch).generate(
        questions, max_new_tokens=COUNT, draft_tokens=length
    )
    assert result.tokens == [a[:COUNT] for a in answers]
    assert result.finish == ["length"] * len(questions)
    assert (result.stats.rounds > 0) == (length > 0)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ],
    ids=["mistral-sliding", "qwen2", "qwen2-mixed"],
)
def test_other_targets(kind: str, extra: dict) -> None:
    model = target(kind, **extra)
    questions = prompts(RAGGED)
    wanted = [greedy(model, q, 12) for q in questions]
    for batch, length in ((1, 0), (8, 0), (1, 3), (8, 3)):
        engine = Engine(model, draft(model), AUX, max_length=50, batch=batch)
        assert engine.generate(questions, max_new_tokens=12, draft_tokens=length).tokens == wanted


def oracle_run(period: int, length: int, batch: int, count: int = COUNT, stop: frozenset[int] = frozenset()) -> DecodeResult:
    model, questions, answers = reference()
    engine = Engine(model, OracleDrafter(questions, answers, period), AUX, max_length=60, batch=batch)
    return engine.generate(questions, max_new_tokens=count, draft_tokens=length, stop=stop)


@pytest.mark.parametrize("batch", [1, 8])
def test_all_accepted(batch: int) -> None:
    result = oracle_run(0, 3, batch)
    rounds = -(-(COUNT - 1) // 4)
    assert result.tokens == [a[:COUNT] for a in reference()[2]]
    assert (result.stats.rounds, result.stats.accepted) == (8 * rounds, 8 * rounds * 3)
    assert result.stats.accepted_by_position == [8 * rounds] * 3
    assert result.stats.acceptance_length == 4.0
    assert result.stats.target_steps == rounds * (8 // batch)
    assert result.stats.draft_steps == 3 * (rounds - 1) * (
        8 // batch
    )  # the first draft belongs to the prefill, the last needs none


@pytest.mark.parametrize("batch", [1, 8])
def test_all_rejected(batch: int) -> None:
    result = oracle_run(1, 3, batch)
    assert result.tokens == [a[:COUNT] for a in reference()[2]]
    assert (result.stats.accepted, result.stats.rounds, result.stats.acceptance_length) == (0, 8 * (COUNT - 1), 1.0)
    assert result.stats.accepted_by_position == [0, 0, 0]


@pytest.mark.parametrize("length", [0, 3])
def test_one_token_needs_no_round(length: int) -> None:
    result = oracle_run(0, length, 8, count=1)
    assert result.tokens == [a[:1] for a in reference()[2]]
    assert (result.stats.rounds, result.stats.target_steps, result.stats.token_seconds) == (0, 0, [])


@pytest.mark.parametrize("place", range(9))
def test_stop_at_every_place_of_a_round(place: int) -> None:
    """A stop inside a draft, as the bonus token, as the very first token: each place of the first rounds."""
    model, questions, answers = reference()
    stop = frozenset({answers[3][place]})
    result = oracle_run(0, 3, 8, stop=stop)
    assert result.tokens == [cut(a, COUNT, stop) for a in answers]
    assert [f == "stop" for f in result.finish] == [t[-1] in stop for t in result.tokens]
    free = Engine(model, None, AUX, max_length=60, batch=8).generate(
        questions, max_new_tokens=COUNT, draft_tokens=3, stop=stop, ignore_eos=True
    )
    assert free.tokens == [a[:COUNT] for a in answers]


@settings(max_examples=30, deadline=None)
@given(
    picks=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    batch=st.integers(1, 8),
    length=st.integers(0, 9),
    period=st.integers(0, 6),
    count=st.integers(1, COUNT),
    stops=st.sets(st.integers(0, 63), max_size=6),
)
def test_speculation_changes_nothing(picks: list[int], batch: int, length: int, period: int, count: int, stops: set[int]) -> None:
    model, questions, answers = reference()
    engine = Engine(model, OracleDrafter(questions, answers, period), AUX, max_length=60, batch=batch)
    result = engine.generate([questions[i] for i in picks], max_new_tokens=count, draft_tokens=length, stop=stops)
    assert result.tokens == [cut(answers[i], count, frozenset(stops)) for i in picks]
    assert len(result.stats.token_seconds) == sum(len(t) - 1 for t in result.tokens)
    assert result.stats.tokens == sum(len(t) for t in result.tokens)


@pytest.mark.parametrize("length", [0, 3])
def test_sampling_does_not_depend_on_the_batch(length: int) -> None:
    model, questions, _ = reference()
    runs = [
        Engine(model, own_draft(), AUX, max_length=60, batch=batch)
        .generate(questions, max_new_tokens=12, draft_tokens=length, temperature=1.0, seed=4)
        .tokens
        for batch in (1, 3, 8)
    ]
    assert runs[0] == runs[1] == runs[2]
    other = Engine(model, own_draft(), AUX, max_length=60, batch=8).generate(
        questions, max_new_tokens=12, draft_tokens=length, temperature=1.0, seed=5
    )
    assert other.tokens != runs[0]


@pytest.mark.parametrize("kind", ["none", "eagle", "deterministic"])
def test_sampled_output_chi_square(kind: str) -> None:
    """The second and third token of 4000 answers to one prompt, against the target's exact distribution."""
    vocab, count, temperature = 24, 4000, 0.8
    model = target(vocab=vocab, scale=1.0)
    prompt = prompts([6], vocab)[0]

    class Fixed:
        aux_layers = AUX

        def propose(self, tokens, aux, starts, counts, length, sampling):  # noqa: ANN001, ANN202
            from eagle.decode.drafting import Proposal

            return Proposal(torch.full((len(starts), length), 3) + torch.arange(length))

        def move(self, source: int, destination: int, length: int) -> None: ...

    drafter = {"none": None, "eagle": draft(model, vocab=15), "deterministic": Fixed()}[kind]
    engine = Engine(model, drafter, AUX, max_length=16, batch=500)
    result = engine.generate([prompt] * count, max_new_tokens=3, draft_tokens=3, temperature=temperature, seed=11)
    if kind != "none":
        assert 0 < result.stats.accepted < result.stats.drafted
    observed = torch.zeros(vocab, vocab)
    for _, second, third in result.tokens:
        observed[second, third] += 1
    with torch.no_grad():
        texts = torch.tensor([[*prompt, a, b] for a in range(vocab) for b in range(vocab)])
        p = torch.softmax(model(texts).logits[:, -3:].double() / temperature, -1).view(vocab, vocab, 3, vocab)
    exact = torch.einsum("a,ab,abc->bc", p[0, 0, 0], p[:, 0, 1], p[:, :, 2])
    expected = exact * count
    assert surprise(observed, expected) < 4


def test_half_precision_runs() -> None:
    model, questions, _ = reference()
    half = target().to(torch.bfloat16)
    result = Engine(half, draft(model), AUX, max_length=60, batch=8).generate(questions, max_new_tokens=10, draft_tokens=3)
    assert [len(t) for t in result.tokens] == [10] * 8


def test_refuses_what_does_not_fit() -> None:
    model, questions, _ = reference()
    engine = Engine(model, own_draft(), AUX, max_length=32, batch=2)
    for bad in (
        {"prompts": [[]]},
        {"prompts": [questions[7]], "max_new_tokens": 3},
        {"draft_tokens": 17},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
    ):
        with pytest.raises(ValueError, match=r"prompt|must be"):
            engine.generate(**{"prompts": questions[:1], "max_new_tokens": 1, "draft_tokens": 1, **bad})
    with pytest.raises(ValueError, match="hidden states"):
        Engine(model, own_draft(), (0, 1), max_length=32, batch=2)
    assert engine.generate([], max_new_tokens=1, draft_tokens=1).tokens == []
    assert len(engine.generate([questions[7]], max_new_tokens=2, draft_tokens=16).tokens[0]) == 2


def test_counters_are_those_of_vllm() -> None:
    stats = DecodeStats()
    assert (stats.acceptance_length, stats.acceptance_by_position) == (1.0, [])
    stats.observe([3, 0, 1], 3)
    stats.observe([2], 3)
    assert (stats.rounds, stats.drafted, stats.accepted, stats.accepted_by_position) == (4, 12, 6, [3, 2, 1])
    assert stats.acceptance_length == 1 + 6 / 4
    assert stats.acceptance_by_position == [0.75, 0.5, 0.25]
    stats.observe([0, 0], 0)
    assert stats.rounds == 4
