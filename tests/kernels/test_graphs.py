"""The draft loop as a graph, with a stand-in for CUDA graphs: shapes, buckets, reuse, rows that are not there, failures."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.decode.drafting import EagleDrafter
from kernels import dispatch, draft_step, graphs
from kernels.draft_step import DraftCache
from kernels.graphs import GraphedDraft, bucket, cuda_capture
from tests.decode.models import draft, target

ROWS, LENGTH = 6, 40


class Recorder:
    """Stands in for CUDA graphs: a replay runs the recorded function again, on what its buffers then hold."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.replays = 0

    def __call__(self, call: Any) -> tuple[Tensor, Any]:
        out = call()
        self.shapes.append(tuple(out.shape))

        def replay() -> None:
            self.replays += 1
            out.copy_(call())

        return out, replay


@pytest.fixture
def drafter() -> EagleDrafter:
    pytest.importorskip("triton")
    model = target()
    with dispatch.using(backend="triton"):  # weights as the fused step wants them; what runs below is the oracle
        made = EagleDrafter(draft(model), model.get_input_embeddings().weight, batch=ROWS, max_length=LENGTH, direct=False)
    torch.manual_seed(2)
    with torch.inference_mode():
        rows = list(range(ROWS))
        made.extend(rows, torch.randint(0, 64, (ROWS, 9)), torch.randn(ROWS, 9, 96), [0] * ROWS, [5, 9, 1, 7, 2, 9])
    return made


def inputs(drafter: EagleDrafter, rows: list[int], length: int) -> tuple[DraftCache, Tensor, Tensor, Tensor, int]:
    cache, positions = drafter._places(rows, length)
    return cache, drafter._normed[rows], drafter._feedback[rows], positions, length


def test_buckets_are_powers_of_two_up_to_the_batch():
    assert [bucket(rows, 6) for rows in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert [bucket(rows, 8) for rows in (1, 5, 8)] == [1, 8, 8]
    for rows in (0, 7):
        with pytest.raises(ValueError, match="1 to 6 are possible"):
            bucket(rows, 6)


def test_a_replay_drafts_what_the_loop_does_and_touches_no_other_row(drafter):
    capture = Recorder()
    with torch.inference_mode():
        graphed = GraphedDraft(drafter._weights, ROWS, capture)
        for rows, length in (([0, 1, 2], 3), ([5], 2), ([4, 2, 0], 3), ([0, 1, 2, 3, 4], 3), ([3, 1, 5], 3)):
            memory = [part.clone() for part in drafter.store.memory]
            want = draft_step.draft(drafter._weights, *inputs(drafter, rows, length))[0]
            written = [part.clone() for part in drafter.store.memory]
            for part, before in zip(drafter.store.memory, memory, strict=True):
                part.copy_(before)
            got = graphed.draft(*inputs(drafter, rows, length))
            assert torch.equal(got, want)
            for part, after in zip(drafter.store.memory, written, strict=True):
                torch.testing.assert_close(part, after)  # not to the bit: products of other numbers of rows round otherwise
                assert torch.equal(part == 0, after == 0)  # rows that fill the bucket up wrote nothing
        assert capture.shapes == [(4, 3), (1, 2), (6, 3)]  # two of the five found their graph
        assert capture.replays == 5
        assert graphed.captured == [(1, 2), (4, 3), (6, 3)]




def test_a_result_is_not_overwritten_by_the_next_replay(drafter):
    with torch.inference_mode():
        graphed = GraphedDraft(drafter._weights, ROWS, Recorder())
        first = graphed.draft(*inputs(drafter, [0, 1], 2))
        kept = first.clone()
        second = graphed.draft(*inputs(drafter, [2, 3], 2))
        assert torch.equal(first, kept)
        assert not torch.equal(first, second)


def test_capturing_writes_into_no_cache(drafter):
    with torch.inference_mode():
        memory = [part.clone() for part in drafter.store.memory]
        graphed = GraphedDraft(drafter._weights, ROWS, Recorder())
        graphed._graph(4, 3, inputs(drafter, [0], 3)[0], drafter._normed)
        for part, before in zip(drafter.store.memory, memory, strict=True):
            assert torch.equal(part, before)


def test_a_failure_is_said_once_and_the_loop_still_drafts(drafter, caplog):
    tries = []

    def broken(call):
        tries.append(call)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        graphed = GraphedDraft(drafter._weights, ROWS, broken)
        for length in (3, 2):
            got = graphed.draft(*inputs(drafter, [1, 4], length))
            want = draft_step.draft(drafter._weights, *inputs(drafter, [1, 4], length))[0]
            assert torch.equal(got, want)
    assert len(tries) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: the draft loop cannot be captured (operation not permitted when stream is capturing); "
        "its kernels are launched one by one"
    ]


def test_graphs_made_before_a_failure_stay(drafter, caplog):
    record = Recorder()

    def fragile(call):
        if record.shapes:
            raise RuntimeError("out of memory")
        return record(call)

    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        graphed = GraphedDraft(drafter._weights, ROWS, fragile)
        graphed.draft(*inputs(drafter, [1], 2))
        graphed.draft(*inputs(drafter, [1], 3))
        graphed.draft(*inputs(drafter, [2], 2))
    assert record.replays == 2
    assert graphed.captured == [(1, 2)]


def test_without_cuda_nothing_is_captured(drafter):
    assert cuda_capture(torch.device("cpu")) is None
    assert drafter._capture is None
    with torch.inference_mode():
        graphed = GraphedDraft(drafter._weights, ROWS, None)
        want = draft_step.draft(drafter._weights, *inputs(drafter, [0, 2], 3))[0]
        assert torch.equal(graphed.draft(*inputs(drafter, [0, 2], 3)), want)
    assert graphed.captured == []


class FakeCuda(SimpleNamespace):
    """As much of torch.cuda as a capture uses, with a log of what happened in which order."""

    def __init__(self) -> None:
        super().__init__(log=[], inside=None)

    def Stream(self, device):  # noqa: N802 -- torch's name
        return SimpleNamespace(wait_stream=lambda other: self.log.append("side waits"))

    def current_stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.log.append("main waits"))

    @contextlib.contextmanager
    def stream(self, stream):
        self.inside = "warm"
        yield
        self.inside = None

    def graph_pool_handle(self):
        self.log.append("pool")
        return "the pool"

    def CUDAGraph(self):  # noqa: N802 -- torch's name
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextlib.contextmanager
    def graph(self, graph, pool):
        self.log.append(f"capture in {pool}")
        self.inside = "capture"
        yield
        self.inside = None


def test_a_capture_warms_up_on_a_stream_of_its_own_and_shares_one_pool(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(graphs.torch, "cuda", fake)
    capture = cuda_capture(torch.device("cuda"))
    assert capture is not None

    def call():
        fake.log.append(f"call {fake.inside}")
        return torch.zeros(1)

    for _ in range(2):
        out, replay = capture(call)
        replay()
        assert out.shape == (1,)
    once = ["side waits", "call warm", "call warm", "main waits", "capture in the pool", "call capture", "replay"]
    assert fake.log == [*once[:4], "pool", *once[4:], *once]
