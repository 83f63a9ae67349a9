"""The engine's output is the target's own: token for token at temperature 0, in distribution above it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.decode.batching import ancestors
from eagle.decode.control import FixedLength, Plan
from eagle.decode.dynamic_tree import EagleTreeDrafter, TreeShape
from eagle.decode.engine import DecodeResult, Engine
from eagle.decode.intake import QUIET, Traffic
from eagle.decode.proposal import Drafter, Draws, Proposal
from eagle.decode.requests import Request
from eagle.decode.sampling import SamplingParams
from eagle.decode.stats import DecodeStats
from eagle.errors import ConfigError
from tests.decode.models import OracleDrafter, cut, draft, greedy, prompts, surprise, target

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
    result = Engine(model, own_draft(), max_length=60, batch=batch).generate(
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
        ("qwen3", {}),
        ("gemma", {}),
        ("gemma3", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ],
    ids=["mistral-sliding", "qwen2", "qwen2-mixed", "qwen3", "gemma", "gemma3-mixed"],
)
def test_other_targets(kind: str, extra: dict) -> None:
    model = target(kind, **extra)
    questions = prompts(RAGGED)
    wanted = [greedy(model, q, 12) for q in questions]
    embed = model.get_input_embeddings().weight
    tree = EagleTreeDrafter(draft(model), embed, batch=8, max_length=50, shape=TreeShape(3, 9, 4))
    assert Engine(model, tree, max_length=50, batch=8).generate(questions, max_new_tokens=12, draft_tokens=4).tokens == wanted
    for batch, length in ((1, 0), (8, 0), (1, 3), (8, 3)):
        engine = Engine(model, draft(model), max_length=50, batch=batch)
        assert engine.generate(questions, max_new_tokens=12, draft_tokens=length).tokens == wanted


def oracle_run(
    period: int, length: int, batch: int, count: int = COUNT, stop: frozenset[int] = frozenset(), chunk: int = 0
) -> DecodeResult:
    model, questions, answers = reference()
    engine = Engine(model, OracleDrafter(questions, answers, period), max_length=60, batch=batch)
    return engine.generate(questions, max_new_tokens=count, draft_tokens=length, stop=stop, chunk=chunk)


@pytest.mark.parametrize("batch", [1, 8])
def test_all_accepted(batch: int) -> None:
    result = oracle_run(0, 3, batch)
    rounds = -(-(COUNT - 1) // 4)
    assert result.tokens == [a[:COUNT] for a in reference()[2]]
    assert (result.stats.rounds, result.stats.accepted) == (8 * rounds, 8 * rounds * 3)
    assert result.stats.accepted_by_position == [8 * rounds] * 3
    assert result.stats.acceptance_length == 4.0
    assert result.stats.target_steps == rounds * (8 // batch)
    assert result.stats.draft_steps == 3 * rounds * (8 // batch)


@pytest.mark.parametrize("batch", [1, 8])
def test_all_rejected(batch: int) -> None:
    result = oracle_run(1, 3, batch)
    assert result.tokens == [a[:COUNT] for a in reference()[2]]
    # A request that lacks one token only is not drafted for.
    assert (result.stats.accepted, result.stats.rounds, result.stats.acceptance_length) == (0, 8 * (COUNT - 2), 1.0)
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
    free = Engine(model, None, max_length=60, batch=8).generate(
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
    engine = Engine(model, OracleDrafter(questions, answers, period), max_length=60, batch=batch)
    result = engine.generate([questions[i] for i in picks], max_new_tokens=count, draft_tokens=length, stop=stops)
    assert result.tokens == [cut(answers[i], count, frozenset(stops)) for i in picks]
    assert len(result.stats.token_seconds) == sum(len(t) - 1 for t in result.tokens)
    assert result.stats.tokens == sum(len(t) for t in result.tokens)


class Erratic:
    """A policy that never asks for the same twice in a row."""

    def __init__(self, seed: int, longest: int, widest: int) -> None:
        self.random, self.longest, self.widest = random.Random(seed), longest, widest
        self.seen: list[tuple[int, Plan, list[int]]] = []

    def plan(self, batch: int) -> Plan:
        return Plan(self.random.randint(0, self.longest), self.random.randint(0, self.widest), self.random.choice([0, 0, 1, 3]))

    def observe(self, batch: int, plan: Plan, accepted: Sequence[int], traffic: Traffic = QUIET) -> None:
        self.seen.append((batch, plan, list(accepted)))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 8),
    longest=st.integers(0, 9),
    widest=st.integers(0, 5),
    period=st.integers(0, 6),
    kind=st.sampled_from(["chain", "carry", "tree"]),
)
def test_arrivals_lengths_stops_and_plans_change_nothing(
    seed: int, batch: int, longest: int, widest: int, period: int, kind: str
) -> None:
    """Requests that come at random times, with limits and stops of their own, under a policy that changes its mind."""
    model, questions, answers = reference()
    rng = random.Random(seed)
    drafter = OracleDrafter(questions, answers, period, tree=kind == "tree")
    engine = Engine(model, drafter, max_length=60, batch=batch)
    wanted, got = [], []
    policy = Erratic(seed, longest, widest)
    with engine.decoding(policy, carry=kind == "carry") as run:
        coming = [i for i in range(8) if rng.random() < 0.8]
        rng.shuffle(coming)
        while coming or run.busy:
            while coming and rng.random() < 0.4:
                i = coming.pop()
                count, stop = rng.randint(0, COUNT), frozenset(rng.choices(range(64), k=rng.randint(0, 3)))
                got.append(run.submit(Request(questions[i], count, stop=stop, key=i)))
                wanted.append(cut(answers[i], count, stop))
            run.step()
    assert [answer.tokens for answer in got] == wanted
    assert all(answer.finish for answer in got)
    assert sum(len(answer.accepted) for answer in got) == run.stats.rounds == sum(len(a) for _, _, a in policy.seen)
    assert run.stats.tokens == sum(map(len, wanted))


SAMPLED = (SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(1.2, 9, seed=2**40), SamplingParams(0.7, 0, 0.8, 5))


@functools.cache
def sampled_answers(variant: int) -> list[list[int]]:
    """The text of every question, whose index is its key, under SAMPLED[variant], without speculation and alone in the batch."""
    model, questions, _ = reference()
    with Engine(model, None, max_length=60, batch=1).decoding() as run:
        found = [run.submit(Request(question, COUNT, SAMPLED[variant], key=i)) for i, question in enumerate(questions)]
        while run.busy:
            run.step()
    return [answer.tokens for answer in found]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    variants=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    batch=st.integers(1, 8),
    period=st.integers(0, 6),
    kind=st.sampled_from(["chain", "carry", "tree"]),
)
def test_sampled_requests_under_any_schedule(seed: int, variants: list[int], batch: int, period: int, kind: str) -> None:
    """Seeds, temperatures, top-k and top-p of their own, random arrivals, stops and plans: the text without speculation."""
    model, questions, _ = reference()
    answers = [sampled_answers(variant)[i] for i, variant in enumerate(variants)]
    rng = random.Random(seed)
    engine = Engine(model, OracleDrafter(questions, answers, period, tree=kind == "tree"), max_length=60, batch=batch)
    coming, wanted, got = list(range(8)), [], []
    rng.shuffle(coming)
    with engine.decoding(Erratic(seed, 9, 5), carry=kind == "carry") as run:
        while coming or run.busy:
            while coming and rng.random() < 0.4:
                i = coming.pop()
                count, stop = rng.randint(0, COUNT), frozenset(rng.choices(range(64), k=rng.randint(0, 3)))
                got.append(run.submit(Request(questions[i], count, SAMPLED[variants[i]], stop, i)))
                wanted.append(cut(answers[i], count, stop))
            run.step()
    assert [answer.tokens for answer in got] == wanted


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(2, 8),
    length=st.integers(1, 7),
    chunk=st.integers(0, 3),
    mode=st.sampled_from(["rejection", "carry", "block"]),
)
def test_drawn_drafts_do_not_depend_on_who_comes_when(seed: int, batch: int, length: int, chunk: int, mode: str) -> None:
    """With a fixed K, the text of a sampled request is the one that it gets alone, whoever shares the batch."""
    model, questions, _ = reference()
    rng = random.Random(seed)
    picks = [(i, rng.randint(1, 14), rng.choice(SAMPLED)) for i in rng.sample(range(8), 4)]
    requests = [Request(questions[i], count, params, frozenset(rng.choices(range(64), k=2)), i) for i, count, params in picks]

    def run(size: int, chance: float) -> list[list[int]]:
        coming, got = list(requests), []
        engine = Engine(model, own_draft(), max_length=60, batch=size)
        verification = "block" if mode == "block" else "rejection"
        with engine.decoding(length, chunk=chunk, carry=mode == "carry", verification=verification) as decoding:
            while coming or decoding.busy:
                while coming and rng.random() < chance:
                    got.append(decoding.submit(coming.pop(0)))
                decoding.step()
        return [answer.tokens for answer in got]

    assert run(batch, 0.4) == run(1, 1.0 - 1e-9)


@pytest.mark.parametrize("length", [0, 3])
def test_beyond_the_positions_of_target_and_draft(length: int) -> None:
    """Prompts and answers longer than either was made for: still the target's own text."""
    model = target()
    model.config.max_position_embeddings = 8
    questions = prompts(RAGGED)
    small = draft(model, max_position_embeddings=8)
    result = Engine(model, small, max_length=60, batch=3).generate(questions, max_new_tokens=COUNT, draft_tokens=length)
    assert result.tokens == [greedy(model, question, COUNT) for question in questions]


def test_finished_prompts_are_told_as_they_end() -> None:
    model, questions, _ = reference()
    told: list[int] = []
    limits = [0, 1, 5, 5, 9, 2, 1, 7]
    engine = Engine(model, own_draft(), max_length=60, batch=3)
    engine.generate(questions, max_new_tokens=limits, draft_tokens=2, done=told.append)
    assert sum(told) == len(questions)
    assert len(told) > 3
    assert min(told) > 0


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize(("length", "chunk", "carry"), [(5, 2, False), (5, 2, True), (4, 1, True), (3, 5, False), (16, 3, True)])
def test_chunks(batch: int, length: int, chunk: int, carry: bool) -> None:
    model, questions, answers = reference()
    for drafter in (own_draft(), OracleDrafter(questions, answers, 4)):
        engine = Engine(model, drafter, max_length=60, batch=batch)
        result = engine.generate(questions, max_new_tokens=COUNT, draft_tokens=length, chunk=chunk, carry=carry)
        assert result.tokens == [a[:COUNT] for a in answers]
    assert result.stats.peak_logits_bytes <= batch * min(chunk, length + 1) * 64 * 4


def test_a_chunk_that_fails_ends_its_draft() -> None:
    """All drafts wrong: of K = 6 in chunks of 2 only the first chunk is ever fed, in as many passes as without a draft."""
    stats = oracle_run(1, 6, 1, chunk=2).stats
    assert (stats.accepted, stats.target_passes, stats.peak_logits_bytes) == (0, 8 * (COUNT - 1), 2 * 64 * 4)
    right = oracle_run(0, 6, 1, chunk=2).stats
    assert right.target_passes == 8 * (3 * 4 + 1)  # 7 tokens a round in passes of 2, 2, 2 and 1; the last one ends early
    assert right.acceptance_length == 1 + (3 * 6 + 2) / 4


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("period", [0, 1, 3])
def test_trees(batch: int, period: int) -> None:
    model, questions, answers = reference()
    engine = Engine(model, OracleDrafter(questions, answers, period, tree=True), max_length=60, batch=batch)
    result = engine.generate(questions, max_new_tokens=COUNT, draft_tokens=4)
    assert result.tokens == [a[:COUNT] for a in answers]
    assert (result.stats.accepted > 0) == (period != 1)


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}], ids=str)
def test_deterministic_drafts_change_no_sample(settings: dict) -> None:
    """A chain or tree that was not drawn is judged with the target's own draws: the sampled text is the same."""
    model, questions, _ = reference()
    options = {"max_new_tokens": COUNT, "temperature": 0.8, "seed": 3, **settings}
    plain = Engine(model, None, max_length=60, batch=3).generate(questions, draft_tokens=0, **options).tokens
    for tree in (False, True):
        engine = Engine(model, OracleDrafter(questions, plain, 3, tree=tree), max_length=60, batch=5)
        result = engine.generate(questions, draft_tokens=4, **options)
        assert result.tokens == plain
        assert result.stats.accepted > 0


def test_requests_have_settings_of_their_own() -> None:
    """Greedy and sampled requests share a batch; each gets what it gets alone."""
    model, questions, answers = reference()
    params = [SamplingParams(), SamplingParams(0.7, 5, 0.9, 2), SamplingParams(1.0, seed=4), SamplingParams()]
    requests = [Request(questions[i], 12, p, key=i) for i, p in enumerate(params)]

    def run(chosen: list[Request], batch: int, length: int, chunk: int) -> list[list[int]]:
        with Engine(model, own_draft(), max_length=60, batch=batch).decoding(length, chunk=chunk, carry=True) as decoding:
            found = [decoding.submit(request) for request in chosen]
            while decoding.busy:
                decoding.step()
        return [answer.tokens for answer in found]

    together = run(requests, 4, 3, 0)
    assert together[0] == answers[0][:12]
    assert together[3] == answers[3][:12]
    assert together == run(requests, 2, 3, 0) == [run([r], 1, 3, 0)[0] for r in requests]
    assert run(requests, 4, 3, 2) == [run([r], 1, 3, 2)[0] for r in requests]


def test_a_sampled_request_joins_greedy_ones_in_the_middle_of_a_draft() -> None:
    model, questions, answers = reference()
    with Engine(model, own_draft(), max_length=60, batch=2).decoding(6, chunk=2, carry=True) as run:
        first = run.submit(Request(questions[0], COUNT))
        run.step()
        second = run.submit(Request(questions[1], 12, SamplingParams(1.0, seed=4), key=1))
        while run.busy:
            run.step()
    assert first.tokens == answers[0][:COUNT]
    with Engine(model, own_draft(), max_length=60, batch=1).decoding(6, chunk=2, carry=True) as run:
        alone = run.submit(Request(questions[1], 12, SamplingParams(1.0, seed=4), key=1))
        while run.busy:
            run.step()
    assert second.tokens == alone.tokens


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_two_rounds_keep_the_distribution(verification: str) -> None:
    """The third to fifth token of 12000 answers under K = 3: the second round reuses no number that decided the first.

    With reused numbers block verification is 15 standard deviations off here.
    """
    vocab, count, temperature = 4, 12000, 1.5
    model = target(vocab=vocab, scale=1.0)
    prompt = prompts([6], vocab)[0]
    engine = Engine(model, draft(model, vocab=vocab), max_length=16, batch=2000)
    result = engine.generate(
        [prompt] * count, max_new_tokens=5, draft_tokens=3, temperature=temperature, seed=7, verification=verification
    )
    assert result.stats.rounds > count
    observed = torch.zeros(vocab, vocab, vocab)
    for _, _, third, fourth, fifth in result.tokens:
        observed[third, fourth, fifth] += 1
    with torch.no_grad():
        weights = torch.ones(1, dtype=torch.float64)
        texts = torch.tensor([prompt])
        for _ in range(5):
            p = torch.softmax(model(texts).logits[:, -1].double() / temperature, -1)
            weights = (weights[:, None] * p).flatten()
            texts = torch.cat([texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(texts))[:, None]], 1)
    expected = weights.view(vocab, vocab, vocab, vocab, vocab).sum((0, 1)) * count
    assert surprise(observed, expected) < 4


def test_ancestors() -> None:
    parents = torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 1, 2, 3]])
    found = ancestors(parents)
    for row, line in enumerate(parents.tolist()):
        for node in range(6):
            chain = {node}
            while node:
                node = line[node - 1] + 1
                chain.add(node)
            assert set(found[row, max(chain)].nonzero()[:, 0].tolist()) == chain


@pytest.mark.parametrize("length", [0, 3])
def test_sampling_does_not_depend_on_the_batch(length: int) -> None:
    model, questions, _ = reference()
    runs = [
        Engine(model, own_draft(), max_length=60, batch=batch)
        .generate(questions, max_new_tokens=12, draft_tokens=length, temperature=1.0, seed=4)
        .tokens
        for batch in (1, 3, 8)
    ]
    assert runs[0] == runs[1] == runs[2]
    other = Engine(model, own_draft(), max_length=60, batch=8).generate(
        questions, max_new_tokens=12, draft_tokens=length, temperature=1.0, seed=5
    )
    assert other.tokens != runs[0]


@pytest.mark.parametrize("kind", ["none", "eagle", "deterministic"])
def test_sampled_output_chi_square(kind: str) -> None:
    """The second and third token of 4000 answers to one prompt, against the target's exact distribution."""
    vocab, count, temperature = 24, 4000, 0.8
    model = target(vocab=vocab, scale=1.0)
    prompt = prompts([6], vocab)[0]

    class Fixed(Drafter):
        deterministic = True
        weight_bytes = state_bytes = 0

        def extend(self, *told: object) -> None: ...

        def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
            assert draws is None
            return Proposal(torch.full((len(rows), length), 3) + torch.arange(length))

        def move(self, source: int, destination: int) -> None: ...

    drafter = {"none": None, "eagle": draft(model, vocab=15), "deterministic": Fixed()}[kind]
    engine = Engine(model, drafter, max_length=16, batch=500)
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
    result = Engine(half, draft(model), max_length=60, batch=8).generate(questions, max_new_tokens=10, draft_tokens=3)
    assert [len(t) for t in result.tokens] == [10] * 8


def test_refuses_what_does_not_fit() -> None:
    model, questions, _ = reference()
    engine = Engine(model, own_draft(), max_length=32, batch=2)
    for bad in (
        {"prompts": [[]]},
        {"prompts": [questions[7]], "max_new_tokens": 3},
        {"draft_tokens": 17},
        {"max_new_tokens": -1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"seed": 2**64},
        {"batch": 3},
        {"chunk": -1},
        {"draft_tokens": FixedLength(1), "chunk": 1},
        {"draft_tokens": FixedLength(17)},
        {"carry": True, "verification": "block"},
    ):
        with pytest.raises(ValueError, match=r"prompt|must be|possible|goes with|carried"):
            engine.generate(**{"prompts": questions[:1], "max_new_tokens": 2, "draft_tokens": 1, **bad})
    assert engine.generate([], max_new_tokens=1, draft_tokens=1).tokens == []
    assert len(engine.generate([questions[7]], max_new_tokens=2, draft_tokens=16).tokens[0]) == 2


def test_refuses_angles_that_depend_on_the_longest_row() -> None:
    model = target()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model.config.max_position_embeddings = 32
    Engine(model, None, max_length=32, batch=1)
    with pytest.raises(ConfigError, match="rope type 'dynamic' beyond 32 positions"):
        Engine(model, None, max_length=33, batch=1)


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


def test_prompts_may_have_limits_of_their_own_and_the_draft_reports_what_prompts_cost() -> None:
    model, questions, answers = reference()

    class Watching(FixedLength):
        def __init__(self) -> None:
            super().__init__(2)
            self.traffic: list[Traffic] = []

        def observe(self, batch: int, plan: Plan, accepted: Sequence[int], traffic: Traffic = QUIET) -> None:
            self.traffic.append(traffic)

    limits = [1 + 2 * at for at in range(len(questions))]
    watching = Watching()
    engine = Engine(model, draft(model), max_length=60, batch=2)
    result = engine.generate(questions, max_new_tokens=limits, draft_tokens=watching, batch=2)
    assert result.tokens == [answer[:limit] for answer, limit in zip(answers, limits, strict=True)]
    drafted_for = sum(limit > 2 for limit in limits)  # one more token to come is no reason to draft
    assert sum(now.taken_in for now in watching.traffic) == drafted_for
    assert all((now.seconds > 0.0) == (now.taken_in > 0) for now in watching.traffic)
    assert 0 < sum(now.ended for now in watching.traffic) < len(questions)  # the last end after the last round
