"""Choose the launch of each Triton kernel by timing it, on the CUDA device at hand.

`triton.autotune` is not used: it measures at the first call, inside whatever runs then (a captured graph, a timed benchmark),
keeps its choice for one process only, and fails in the interpreter. Here the choice is made once, written down as rows of
plain JSON, and given back to the dispatch with `dispatch.using(launches=launches_of(rows))`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import triton

from kernels import add_rms_norm
from kernels.add_rms_norm import Launch

Timer = Callable[[Callable[[], Any]], float]


def cuda_timer(call: Callable[[], Any]) -> float:
    """Return the median milliseconds of a call on the current CUDA device, caches of the device flushed between calls."""
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median"))


def tune_add_rms_norm(
    hidden: int, dtype: torch.dtype, rows: Iterable[int], *, device: str = "cuda", timer: Timer = cuda_timer
) -> dict[str, Any]:
    """Time every candidate launch of the forward at each number of `rows` and choose one for all.

    Returns a row {op, hidden, dtype, device, triton, rows, num_warps, median_ms, default_ms, timed_rows}: the launch with the
    smallest geometric mean over `rows` of its time; median_ms and default_ms are that mean for it and for the default launch.
    """
    timed = sorted(set(rows))
    weight = torch.ones(hidden, dtype=dtype, device=device)
    means: dict[Launch, float] = {}
    tensors = [tuple(torch.randn(count, hidden, device=device).to(dtype) for _ in range(2)) for count in timed]
    with torch.no_grad():
        for launch in add_rms_norm.candidates(hidden):
            times = []
            for x, residual in tensors:
                times.append(timer(lambda: add_rms_norm.add_rms_norm(x, residual, weight, 1e-5, launch=launch)))  # noqa: B023
            means[launch] = statistics.geometric_mean(times)
    best = min(means, key=means.__getitem__)
    return {
        "op": add_rms_norm.NAME,
        "hidden": hidden,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
        "triton": triton.__version__,
        "rows": best.rows,
        "num_warps": best.num_warps,
        "median_ms": means[best],
        "default_ms": means[add_rms_norm.default_launch(hidden)],
        "timed_rows": timed,
    }


def device_name(device: str) -> str:
    """Return the name that tuned rows are keyed by."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def launches_of(rows: Iterable[Mapping[str, Any]], *, device: str = "cuda") -> dict[tuple[str, int, str], Launch]:
    """Return the launches for `dispatch.using` of those rows that were tuned on this device with this triton."""
    name = device_name(device)
    return {
        (row["op"], row["hidden"], row["dtype"]): Launch(row["rows"], row["num_warps"])
        for row in rows
        if row["device"] == name and row["triton"] == triton.__version__
    }
