"""Chain rejection sampling as an operation: the eager form, the dispatch, and the Triton kernel where there is no GPU.

What is right is decided by `rejections.check`, from the definitions in eagle/decode/verify.py that the exact distributions
of tests/decode/test_verify.py rest on. No GPU runs the kernel here: its values come from Triton's interpreter.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.decode.verify import verify_sampled
from kernels import dispatch, eager
from tests.kernels.rejections import check, make

ROOT = Path(__file__).resolve().parents[2]


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(0, 6), length=st.integers(0, 4), vocab=st.integers(6, 40), draft_vocab=st.sampled_from([None, 1, 6]),
    seed=st.integers(0, 2**16), bonus=st.booleans(), drawn=st.booleans(), zeros=st.sampled_from([0.0, 0.7]),
    dtype=st.sampled_from([torch.float32, torch.float64]), edges=st.booleans(),
)  # fmt: skip
def test_the_eager_form(count, length, vocab, draft_vocab, seed, bonus, drawn, zeros, dtype, edges):
    case = make(
        count, length, vocab, draft_vocab, seed=seed, bonus=bonus, drawn=drawn, zeros=zeros, dtype=dtype, edges=edges
    )
    before = [None if t is None else t.clone() for t in case.arguments()]
    assert check(case, *eager.rejection(*case.arguments())) == 0
    verdict = verify_sampled(*case.arguments())
    assert check(case, verdict.accepted, verdict.following) == 0
    for t, was in zip(case.arguments(), before, strict=True):
        assert t is None or torch.equal(t, was)


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("draft_vocab", [None, 6])
def test_the_eager_form_wherever_a_row_stops(draft_vocab, drawn):
    case = make(400, 2, 8, draft_vocab, drawn=drawn)
    accepted, following = eager.rejection(*case.arguments())
    assert accepted.bincount().min() > 20
    assert check(case, accepted, following) == 0


def test_a_wrong_token_would_be_seen():
    case = make(6, 2, 30, None, seed=1)
    accepted, following = eager.rejection(*case.arguments())
    with pytest.raises(AssertionError):
        check(case, accepted, (following + 1) % 30)
    with pytest.raises(AssertionError):
        check(case, (accepted + 1) % 3, following)


class OnCuda:
    """As much of a CUDA tensor as the dispatch looks at before it hands it on."""

    is_cuda, shape, dtype = True, (1, 2, 3), torch.float32


@pytest.fixture
def kernel(monkeypatch):
    made = SimpleNamespace(reason=None, supports=lambda *a: made.reason, rejection=lambda *a, launch: ("kernel", len(a)))
    monkeypatch.setattr(dispatch, "_kernel", lambda name: {"rejection": made}[name])
    monkeypatch.setattr(dispatch, "eager", SimpleNamespace(rejection=lambda *a: "eager"))
    return made


def test_dispatch(kernel, caplog):
    def call(**options):
        return dispatch.rejection(torch.zeros(1, 1), None, None, OnCuda(), None, None, None, **options)

    assert call() == ("kernel", 7)
    assert call(backend="reference") == "eager"
    with dispatch.using(backend="reference"):
        assert call() == "eager"
    assert dispatch.rejection(None, None, None, torch.zeros(1), None, None, None) == "eager"
    kernel.reason = "p is float16 (test)"
    with caplog.at_level(logging.WARNING):
        assert [call(), call()] == ["eager"] * 2
    assert [r.getMessage() for r in caplog.records] == ["kernels: rejection: p is float16 (test); the eager form runs"]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in the repository root, one thread, without the kernels' own variables unless given."""
    base = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "EAGLE_KERNELS")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**base, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_interpreted_kernel_against_the_definition():
    pytest.importorskip("triton")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted_rejection.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_the_kernel_compiles_for_hopper_without_spills():
    pytest.importorskip("triton")
    code = (
        "import json, os, tempfile; os.environ['TRITON_CACHE_DIR'] = tempfile.mkdtemp()\n"
        "from dataclasses import asdict\nfrom kernels.aot import compile_specimen\nfrom kernels.rejection import specimens\n"
        "print(json.dumps([asdict(compile_specimen('rejection', s, 90)) for s in specimens()]))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["hidden"] for row in rows] == [49152, 128256, 151936]
    for row in rows:
        assert row["error"] is None, row
        assert row["spills"] == 0, row
        assert 16 <= row["registers"] <= 128, row
        assert 0 <= row["shared_bytes"] <= 48 * 1024, row
