"""Which draft length is served, who sets it, and vLLM's table of lengths by batch size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.bundle.record import BundleRecord, Recommended
from eagle.config import Config
from eagle.serve.plan import plan_speculation, schedule

BUNDLE = Path("/b")
MEASURED = BundleRecord(recommended=(Recommended(batch=8, draft_tokens=1), Recommended(batch=1, draft_tokens=3)))
OFF = BundleRecord(recommended=(Recommended(batch=1, draft_tokens=0), Recommended(batch=8, draft_tokens=0)))
KEY = "num_speculative_tokens_per_batch_size"


def test_the_controller_is_the_default_and_vllm_is_told_that_lengths_change() -> None:
    found = plan_speculation(BUNDLE, MEASURED, Config(), "0.32.0", cpu=True)
    assert found.control == "pid"
    assert found.config == {"method": "eagle3", "model": "/b", "num_speculative_tokens": 5, KEY: [[1, 1, 3], [2, 8, 1]]}
    assert (found.scheduler or "").endswith(".PidScheduler")
    assert (plan_speculation(BUNDLE, MEASURED, Config(), "0.32.1", cpu=False).scheduler or "").endswith(".AsyncPidScheduler")
    assert found.settings is not None
    assert found.settings.control["kp"] == Config().control.kp
    fresh = plan_speculation(BUNDLE, BundleRecord(), Config(vllm={"max_num_seqs": 32}), "0.32.0", cpu=True)
    assert fresh.config is not None
    assert fresh.config[KEY] == [[1, 32, 3]]


def test_an_unknown_version_gets_the_schedule_or_a_fixed_length_with_a_warning() -> None:
    found = plan_speculation(BUNDLE, MEASURED, Config(), "0.40.0", cpu=True)
    assert (found.control, found.scheduler) == ("schedule", None)
    assert found.config == {"method": "eagle3", "model": "/b", "num_speculative_tokens": 3, KEY: [[1, 1, 3], [2, 8, 1]]}
    assert "not tested on vLLM 0.40.0" in found.notes[0]
    fixed = plan_speculation(BUNDLE, BundleRecord(), Config(), "0.40.0", cpu=True)
    assert (fixed.control, fixed.config) == ("fixed", {"method": "eagle3", "model": "/b", "num_speculative_tokens": 3})


def test_what_was_measured_as_slower_everywhere_is_not_served() -> None:
    found = plan_speculation(BUNDLE, OFF, Config(), "0.32.0", cpu=True)
    assert (found.control, found.config, len(found.notes)) == ("off", None, 1)


@pytest.mark.parametrize("record", [MEASURED, OFF, BundleRecord()])
def test_a_length_that_is_asked_for_is_served(record: BundleRecord) -> None:
    found = plan_speculation(BUNDLE, record, Config(), "0.32.0", cpu=True, draft_tokens=4)
    assert found.config == {"method": "eagle3", "model": "/b", "num_speculative_tokens": 4}
    assert plan_speculation(BUNDLE, record, Config(), "0.32.0", cpu=True, draft_tokens=0).config is None


@pytest.mark.parametrize("control", ["pid", "schedule", "fixed"])
def test_drafts_may_be_sampled_whoever_sets_their_length(control: str) -> None:
    config = Config(serve={"control": control, "draft_sampling": "probabilistic"})
    found = plan_speculation(BUNDLE, MEASURED, config, "0.32.0", cpu=True)
    assert found.config is not None
    assert (found.control, found.config["draft_sample_method"]) == (control, "probabilistic")
    asked = plan_speculation(BUNDLE, MEASURED, config, "0.32.0", cpu=True, draft_tokens=2)
    assert asked.config == {"method": "eagle3", "model": "/b", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}


def test_fixed_takes_the_measured_length_of_the_smallest_batch_that_gains() -> None:
    config = Config(serve={"control": "fixed"})
    assert plan_speculation(BUNDLE, MEASURED, config, "0.32.0", cpu=True).config == {
        "method": "eagle3", "model": "/b", "num_speculative_tokens": 3,
    }  # fmt: skip


@given(st.dictionaries(st.integers(1, 512), st.integers(0, 8), min_size=1, max_size=6))
def test_the_schedule_keeps_vllms_rules_and_gives_each_measured_batch_its_length(measured: dict[int, int]) -> None:
    ranges = schedule([Recommended(batch=batch, draft_tokens=length) for batch, length in measured.items()])
    assert ranges[0][0] == 1
    for before, after in zip(ranges, ranges[1:], strict=False):
        assert after[0] == before[1] + 1
    assert all(first <= last for first, last, _ in ranges)
    for batch, length in measured.items():
        assert [k for first, last, k in ranges if first <= batch <= last] == [length]
