"""The tune step: its choice rules on invented times, and the step itself on a tiny random target."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle import manifest
from eagle.bench import tune
from eagle.bench.tune import Candidate, Samples, choose, race, thread_counts
from eagle.config import Config
from eagle.draft.io import save_draft, target_embedding
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from eagle.errors import StepFailed
from eagle.steps import StepContext
from eagle.target.load import target_dims
from eagle.target.taps import resolve_aux_layers
from tests.toys import tiny_target

FAST, SLOW, TIED = Candidate(2, False, "bfloat16"), Candidate(2, False, "float32"), Candidate(1, False, "bfloat16")
TRUE_MS = {FAST: 10.0, SLOW: 20.0, TIED: 10.1}


def taker(log: list, true_ms: dict[Candidate, float] = TRUE_MS):
    def measure(candidate: Candidate, batch: int) -> dict[str, float]:
        log.append((candidate, batch))
        return {"round": true_ms[candidate] * batch / 1e3, "verify": 1e-3}

    return measure


def test_candidates_take_turns_and_slow_ones_drop_out():
    log: list = []
    samples, measured = race(list(TRUE_MS), [1, 8], taker(log), repeats=6, deadline=math.inf)
    assert measured == list(TRUE_MS)
    passes = [candidate for candidate, batch in log if batch == 1]
    assert passes[:9] == [FAST, SLOW, TIED, SLOW, TIED, FAST, TIED, FAST, SLOW]  # each pass starts with another
    assert passes[9:] == [TIED, FAST, FAST, TIED, TIED, FAST]  # SLOW took twice as long
    assert samples.median(SLOW, 8, "round") == pytest.approx(0.16)


def test_the_time_budget_ends_the_race():
    """The clock is asked before each candidate; what was not measured at every batch size is no choice."""
    log: list = []
    ticks = iter([1.0, 2.0, 3.0, 99.0])
    _, measured = race([FAST, SLOW], [1], taker(log), repeats=50, deadline=3.5, clock=lambda: next(ticks))
    assert len(log) == 4
    assert measured == [FAST, SLOW]
    log.clear()
    _, measured = race([FAST, SLOW], [1, 8], taker(log), repeats=50, deadline=-1.0, clock=lambda: 0.0)
    assert log == [(FAST, 1), (FAST, 8)]
    assert measured == [FAST]


def test_equal_candidates_the_plainest_is_taken():
    log: list = []
    samples, _ = race(list(TRUE_MS), [1, 8], taker(log), repeats=3, deadline=math.inf)
    assert choose(samples, TRUE_MS, [1, 8]) == TIED  # one thread, within 2 % of two
    assert choose(samples, [FAST, SLOW], [1, 8]) == FAST
    assert min(Candidate(1, True, "bfloat16"), Candidate(1, False, "float32")).compiled is False


def test_a_round_counts_at_every_batch_size():
    """Twice as fast at batch 1 does not pay for four times as slow at batch 8."""
    one, eight = Candidate(1, False, "float32"), Candidate(2, False, "float32")
    samples = Samples()
    for candidate, times in ((one, (1.0, 8.0)), (eight, (2.0, 2.0))):
        for batch, seconds in zip((1, 8), times, strict=True):
            samples.add(candidate, batch, {"round": seconds})
    assert choose(samples, [one, eight], [1, 8]) == eight
    assert choose(samples, [one, eight], [1]) == one


def test_rows_are_medians_with_their_spread():
    samples = Samples()
    for seconds in (0.010, 0.020, 0.030, 0.040, 1.0):
        samples.add(FAST, 1, {"round": seconds})
    samples.add(SLOW, 1, {"round": 0.5})
    assert samples.rows() == [
        {"what": "round", "batch": 1, "threads": 2, "dtype": "bfloat16", "draft_step": "eager", "median_ms": 30.0,
         "spread": pytest.approx(2 / 3, abs=1e-3), "samples": 5},
        {"what": "round", "batch": 1, "threads": 2, "dtype": "float32", "draft_step": "eager", "median_ms": 500.0,
         "spread": 0.0, "samples": 1},
    ]  # fmt: skip


@given(st.integers(1, 300))
def test_thread_counts(cores):
    found = thread_counts(cores)
    assert found[0] == 1
    assert found[-1] == cores
    assert all(low < high <= 2 * low for low, high in zip(found, found[1:], strict=False))


def test_a_target_too_large_for_two_copies_keeps_its_dtype(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    config = Config.model_validate({"target": {"dtype": "float32"}})
    assert tune.dtypes(config, tmp_path, "cpu") == ["bfloat16", "float32"]
    assert tune.dtypes(config, tmp_path, "cuda") == ["float32"]
    memory = type("Memory", (), {"available": 5000})
    monkeypatch.setattr(tune.psutil, "virtual_memory", lambda: memory)
    assert tune.dtypes(config, tmp_path, "cpu") == ["float32"]


def test_a_compiled_step_that_does_not_compile_is_left_out_and_written_down():
    compiled = Candidate(1, True, "bfloat16")

    class Broken:
        def round(self, candidate, batch):
            if candidate.compiled:
                raise RuntimeError("InvalidCxxCompiler: no C++ compiler\nmore")

    usable, skipped = tune.warm_up(Broken(), [FAST, compiled], [1], math.inf)
    assert usable == [FAST]
    assert skipped == [{"candidate": "bfloat16, 1 thread, compiled", "reason": "InvalidCxxCompiler: no C++ compiler"}]


def test_no_warm_up_after_the_deadline():
    class Bench:
        def round(self, candidate, batch):
            return None

    usable, skipped = tune.warm_up(Bench(), [FAST, SLOW], [1], -math.inf)
    assert usable == [FAST]
    assert skipped == [{"candidate": "float32, 2 threads, eager", "reason": "the time budget (tune.max_minutes) was used up"}]


def test_an_eager_step_that_fails_is_an_error():
    class Broken:
        def round(self, candidate, batch):
            raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        tune.warm_up(Broken(), [FAST], [1], math.inf)


def test_a_compile_check_that_dies_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StepFailed, match="ended with code 1"):
        tune.compile_kernels([90], tmp_path)


@pytest.fixture
def context(tmp_path) -> StepContext:
    """A step context on a tiny random target and an untrained draft."""
    torch.manual_seed(0)
    target = tiny_target(tmp_path / "target")
    config = Config.model_validate(
        {
            "target": {"model": str(target)},
            "draft": {"layers": 2, "heads": 2, "kv_heads": 2, "vocab_size": 64},
            "tune": {"repeats": 3, "batch_sizes": [1, 3], "draft_tokens": 2},
            "runtime": {"threads": 1, "device": "cpu"},
        }
    )
    dims = target_dims(target)
    spec = DraftSpec.from_config(config.draft, dims, resolve_aux_layers(None, dims.num_layers))
    draft = DraftModel(spec, target_embedding(target, spec), torch.arange(64).numpy())
    save_draft(tmp_path / "policy" / "draft", draft)
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
    return StepContext(config, tmp_path, {"policy": tmp_path / "policy"}, tmp_path / "out", tmp_path / "work")


def test_the_step(context, capsys):
    metrics = tune.run(context)
    tuned = json.loads((context.out / "tuned.json").read_text())
    assert metrics["threads"] == tuned["threads"] == 1
    assert metrics["dtype"] == tuned["dtype"]
    assert tuned["dtype"] in ("float32", "bfloat16")
    assert metrics["draft_step"] == tuned["draft_step"] == "eager"
    assert tuned["device"] == "cpu"
    assert tuned["cpu_model"]
    assert tuned["versions"] == manifest.versions()
    assert metrics["kernels_failed"] == 0
    assert metrics["kernels_compiled"] == len(tuned["kernels"]) > 0
    launches = {row["form"]: row["launches"] for row in tuned["step_launches"]}
    assert launches["fused"] == 9 * 2 + 3 + 2  # a long cache splits the attention of both layers
    assert launches["fused"] < launches["engine without kernels"] < launches["eager"]
    said = capsys.readouterr().err
    assert all(f"{form} {number}" in said for form, number in launches.items())
    measured = {(row["what"], row["dtype"], row["batch"]) for row in tuned["rows"]}
    for dtype in ("float32", "bfloat16"):
        assert {(what, dtype, batch) for what in ("round", "verify", "draft_step") for batch in (1, 3)} <= measured
    assert {("target_step", tuned["dtype"], batch) for batch in (1, 3)} <= measured
    for row in tuned["rows"]:
        assert row["median_ms"] > 0
        assert row["samples"] == 3
        parts = {r["what"]: r["median_ms"] for r in tuned["rows"] if (r["dtype"], r["batch"]) == (row["dtype"], row["batch"])}
        assert parts["round"] == pytest.approx(parts["verify"] + 2 * parts["draft_step"], rel=0.5)
    assert metrics["round_ms_b1"] > 0


def test_no_kernels_where_none_are_asked_for(context):
    smaller = context.config.tune.model_copy(update={"aot_targets": [], "batch_sizes": [1]})
    config = context.config.model_copy(update={"tune": smaller})
    metrics = tune.run(StepContext(config, context.root, context.inputs, context.out, context.work))
    tuned = json.loads((context.out / "tuned.json").read_text())
    assert tuned["kernels"] == []
    assert tuned["kernels_skipped"] == "not asked for"
    assert metrics["kernels_compiled"] == 0
