"""What is measured on a GPU, section by section. Each yields rows as they are done, so that a section cut short has some."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import operations, rivals
from benchmarks.gpu.lab import Lab
from eagle.bench.draft_forms import Form, random_network
from eagle.bench.kernel_tuning import problems
from eagle.bench.launch_report import REPEATS, measure_form
from eagle.bench.profiling import wall_seconds
from kernels import autotune, dispatch, spaces
from kernels.spaces import SPACES, Problem
from kernels.tuned import Tuned, launches_of

Row = dict[str, Any]
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Section:
    """A part of the measurement: `share` of the whole time it may take."""

    name: str
    share: float
    run: Callable[[Lab], Iterator[Row]]


def copy_bandwidth(lab: Lab) -> Iterator[Row]:
    """What a copy of 1 GiB reaches, reads and writes counted: the bandwidth that operations are held against."""
    size = 1 << 16 if lab.dry else COPY_BYTES
    source = torch.empty(size // 4, dtype=torch.float32, device=lab.device).normal_()
    place = torch.empty_like(source)
    seconds = wall_seconds(lambda: place.copy_(source), lab.device, 5 if lab.dry else 25)
    lab.copy_gb_s = 2 * size / seconds / 1e9
    yield {"bytes": 2 * size, "ms": seconds * 1e3, "gb_s": lab.copy_gb_s}


def correctness(lab: Lab) -> Iterator[Row]:
    """Every operation against its oracle: {op, dtype, rows, error, holds}; `error` is in units of what rounding allows."""
    for dtype in ("float32",) if lab.dry else ("bfloat16", "float32"):
        for rows in lab.batches if lab.dry else (1, 5, 32):
            for check in operations.checks(lab.spec, dtype, rows, lab.device):
                with dispatch.using(backend="triton"):
                    got = check.call()
                with dispatch.using(backend="reference"):
                    want = check.call()
                error = operations.worst(got, want, dtype, check.scale)
                yield {"op": check.op, "dtype": dtype, "rows": rows, "error": error, "holds": error <= 1.0}


def launches(lab: Lab) -> Iterator[Row]:
    """A draft step in each form: kernels, launches of the host, time by the clock, of it kernels, and the overhead between."""
    network = random_network(lab.spec, lab.dtype, lab.device)
    forms: list[Form] = ["eager torch", "engine without kernels", "fused", "fused + graph"]
    for batch in lab.batches:
        for form in forms if lab.dry else [*forms, "torch.compile"]:
            row = measure_form(
                form, network, batch, lab.draft_tokens, lab.device, kernels=lab.backend, capture=lab.capture,
                repeats=1 if lab.dry else REPEATS,
            )  # fmt: skip
            timed = row.ms is not None and row.kernel_ms is not None
            overhead = max(row.ms - row.kernel_ms, 0.0) if timed else None  # type: ignore[operator]
            yield {"batch": batch, "draft_layers": lab.spec.num_layers, **asdict(row), "overhead_ms": overhead}


def tuning(lab: Lab) -> Iterator[Row]:
    """Tuned against untuned, every operation at its shapes; the rest of the measurement runs with what was chosen."""
    read, limits = lab.compiler()
    todo, rows = _problems(lab), list[Row]()
    for index, problem in enumerate(todo):
        share = (lab.deadline - lab.clock()) / (len(todo) - index)
        row = autotune.tune(
            problem, lab.stamp, torch.device(lab.device), read, limits,
            timer=lab.timer, deadline=lab.clock() + share, clock=lab.clock,
        )  # fmt: skip
        if row is None:
            yield {"op": problem.op, "problem": str(problem), "launch": None}
            continue
        rows.append(row)
        lab.launches = launches_of(rows, lab.stamp)
        yield {**row, "problem": str(problem), "gain": row["default_ms"] / row["median_ms"] if row["default_ms"] else None}


def _problems(lab: Lab) -> list[Problem]:
    found = problems(lab.spec, lab.dtype, lab.batches, lab.draft_tokens)
    if not lab.dry:
        return found
    return [one for one in found if one.rows == 1 and one.op != "cached_attention"]  # whose cache is slow in the interpreter


def bandwidth(lab: Lab) -> Iterator[Row]:
    """Each operation with its tuned launch: GB/s of what it must move, over the copy's, and the rivals' times."""
    backend = "eager" if lab.dry else "inductor"
    for problem in _problems(lab):
        call = SPACES[problem.op].prepare(problem, torch.device(lab.device))
        tuned = lab.launches.find(problem.op, problem.shape, getattr(torch, problem.dtype), problem.rows) if lab.launches else None
        with torch.no_grad():
            ms = lab.timer(partial(call, tuned))
            others = {
                "compile_ms": rivals.compiled(problem, lab.device, backend),
                "liger_ms": None if lab.dry else rivals.liger(problem, lab.device),
            }
            times = {name: None if other is None or lab.late else lab.timer(other) for name, other in others.items()}
        gb_s = rivals.moved_bytes(problem, spaces.CONTEXT) / ms / 1e6
        share = gb_s / lab.copy_gb_s if lab.copy_gb_s else None
        about = {"op": problem.op, "problem": str(problem), "rows": problem.rows}
        yield {**about, "ms": ms, "gb_s": gb_s, "of_copy": share, **times}


def rounds(lab: Lab) -> Iterator[Row]:
    """Whole rounds in the engine: see `benchmarks.gpu.rounds`."""
    from benchmarks.gpu.rounds import measure_rounds

    with dispatch.using(backend=lab.backend, tuned=Tuned(lab.launches) if lab.launches is not None else None):
        yield from measure_rounds(lab)


def free(lab: Lab) -> None:
    """Give the device's memory back between sections."""
    gc.collect()
    if lab.device == "cuda":
        torch.cuda.empty_cache()


SECTIONS = (
    Section("copy", 0.03, copy_bandwidth),
    Section("correctness", 0.17, correctness),
    Section("launches", 0.20, launches),
    Section("tuning", 0.25, tuning),
    Section("bandwidth", 0.15, bandwidth),
    Section("rounds", 0.20, rounds),
)
