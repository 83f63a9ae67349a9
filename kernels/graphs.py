"""The whole loop of K draft steps as one CUDA graph: one launch of the host where there were K times 9 L + 3.

One graph for each (number of rows, K), captured at first use. Rows are rounded up to a bucket (a power of two); a row that is
not there stands at a position far below 0, where it stays for all K steps: it reads and writes no cache. Inputs are copied into
buffers that the graph reads, tokens are copied out of it, and positions live on the device, so nothing in a graph depends on
what the host knows beside its shape. Graphs share one pool of memory: only one of them runs at a time.

Nothing here needs a GPU but `cuda_capture`. Where capturing fails, one line in the log says so and the loop is launched
kernel by kernel from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import draft_step
from kernels.draft_step import DraftCache, DraftWeights

NOWHERE = -(1 << 30)  # with any number of draft steps added still below 0
WARM_UPS = 2
Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]
log = logging.getLogger(__name__)


def bucket(rows: int, most: int) -> int:
    """Return the number of rows that a graph for `rows` has: the next power of two, at most `most`. ValueError beyond `most`."""
    if not 0 < rows <= most:
        raise ValueError(f"{rows} rows; 1 to {most} are possible")
    return min(1 << (rows - 1).bit_length(), most)


def cuda_capture(device: torch.device) -> Capture | None:
    """Return what captures a function as a CUDA graph on `device`, None where there are none."""
    if device.type != "cuda":
        return None
    pool: list[Any] = []

    def capture(call: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Run `call` on its own stream until all is compiled and allocated, then record it; returns its output and the replay."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        if not pool:
            pool.append(torch.cuda.graph_pool_handle())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool[0]):
            out = call()
        return out, graph.replay

    return capture


@dataclass(frozen=True)
class _Graph:
    """A captured loop with the buffers that it reads and its output [rows, K]."""

    normed: Tensor
    feedback: Tensor
    positions: Tensor
    table: Tensor
    tokens: Tensor
    replay: Replay


class GraphedDraft:
    """`draft_step.draft`, greedy, of up to `most` rows of one draft, as CUDA graphs made by `capture` (None: never captured)."""

    def __init__(self, weights: DraftWeights, most: int, capture: Capture | None) -> None:
        self._weights, self._most, self._capture = weights, most, capture
        self._graphs: dict[tuple[int, int, int], _Graph] = {}

    @property
    def captured(self) -> list[tuple[int, int]]:
        """The (rows, K) of the graphs that there are, ascending."""
        return sorted((rows, length) for rows, length, _ in self._graphs)

    def draft(self, cache: DraftCache, normed: Tensor, feedback: Tensor, positions: Tensor, length: int) -> Tensor:
        """Return the target ids int64 [n, length] that `draft_step.draft` would, from the same arguments.

        `cache` must be the same memory at every call; its table may change. ValueError for more than `most` rows.
        """
        rows = bucket(len(normed), self._most)
        graph = self._graph(rows, length, cache, normed)
        if graph is None:
            return draft_step.draft(self._weights, cache, normed, feedback, positions, length)[0]
        count = len(normed)
        for place, value in ((graph.normed, normed), (graph.feedback, feedback), (graph.table, cache.table)):
            place[:count].copy_(value, non_blocking=True)
        graph.positions[:count].copy_(positions, non_blocking=True)
        graph.positions[count:].fill_(NOWHERE)
        graph.replay()
        return graph.tokens[:count].clone()

    def _graph(self, rows: int, length: int, cache: DraftCache, like: Tensor) -> _Graph | None:
        key = (rows, length, cache.keys.data_ptr())
        if key not in self._graphs and self._capture is not None:
            try:
                self._graphs[key] = self._captured(self._capture, rows, length, cache, like)
            except RuntimeError as error:
                self._capture = None
                lines = str(error).strip().splitlines() or [type(error).__name__]
                log.warning("kernels: the draft loop cannot be captured (%s); its kernels are launched one by one", lines[0][:300])
        return self._graphs.get(key)

    def _captured(self, capture: Capture, rows: int, length: int, cache: DraftCache, like: Tensor) -> _Graph:
        device = like.device
        normed, feedback = (torch.zeros(rows, like.shape[1], dtype=like.dtype, device=device) for _ in range(2))
        positions = torch.full((rows,), NOWHERE, dtype=torch.int64, device=device)  # warming up writes into no row's cache
        table = torch.zeros(rows, cache.table.shape[1], dtype=torch.int32, device=device)
        held = replace(cache, table=table)
        tokens, again = capture(lambda: draft_step.draft(self._weights, held, normed, feedback, positions, length)[0])
        return _Graph(normed, feedback, positions, table, tokens, again)
