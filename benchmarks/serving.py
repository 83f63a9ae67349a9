"""Figures of serving. F5.6: what the controller adds to a step of vLLM's scheduler.

`python -m benchmarks.serving` prints the table. Timed is all that the scheduler class adds: the look-up of the length, the
learning from an output, and the metrics, written to Prometheus' multiprocess files at the rate at which a server writes
them. Processor time of the thread, so that other processes on the machine do not count.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.figures import Figure, Measured

ROOT = Path(__file__).resolve().parent.parent
BATCHES = (1, 8, 32, 128)
STEPS, BLOCKS = 2000, 5
STEP_SECONDS = 0.01  # a short step: metrics are written every 0.5 s, so every 50th step
LIMIT_US = 50.0


def overhead(batch: int, longest: int, seed: int) -> list[float]:
    """Return microseconds of processor time per step, for each block of steps, at `batch` requests of geometric acceptance."""
    from eagle.serve.plugin.metrics import PidMetrics
    from eagle.serve.plugin.settings import PidSettings
    from eagle.serve.plugin.stepper import StepController

    random = np.random.default_rng(seed)
    settings = PidSettings()
    controller, metrics = StepController(settings, longest), PidMetrics("benchmark", settings.flush_seconds, None)
    names = [f"chatcmpl-{i}" for i in range(batch)]
    running = [SimpleNamespace(num_prompt_tokens=9, num_computed_tokens=9) for _ in names]
    index, planned, now, blocks = {name: i for i, name in enumerate(names)}, 0, 0.0, []
    for _ in range(BLOCKS):
        spent = 0.0
        for _ in range(STEPS):
            drafts = {name: [0] * planned for name in names} if planned else {}
            counts = np.minimum(random.geometric(0.45, batch) - 1, planned)
            output = SimpleNamespace(sampled_token_ids=[[0] * int(1 + count) for count in counts], req_id_to_index=index)
            now += STEP_SECONDS * (1.0 + 0.1 * planned)
            began = time.thread_time()
            following = controller.next_length(batch, sum(one.num_computed_tokens < one.num_prompt_tokens for one in running))
            spent += time.thread_time() - began
            scheduled = SimpleNamespace(
                num_scheduled_tokens=dict.fromkeys(names, 1 + planned), total_num_scheduled_tokens=batch * (1 + planned),
                scheduled_spec_decode_tokens=drafts, scheduled_new_reqs=[], num_invalid_spec_tokens=None,
                num_spec_tokens_to_schedule=following,
            )  # fmt: skip
            began = time.thread_time()
            controller.learn(scheduled, output, now)
            metrics.spent(0.0)
            if metrics.due(now):
                metrics.write(controller, now)
            spent += time.thread_time() - began
            planned = following
        blocks.append(round(1e6 * spent / STEPS, 2))
    return blocks


def measure(batches: Sequence[int] = BATCHES, longest: int = 5) -> list[dict[str, Any]]:
    """Measure in a process of its own, whose metrics are kept in multiprocess files as in a server. Returns rows by batch."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.serving", "--rows", json.dumps(list(batches)), str(longest)],
            cwd=ROOT, env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder}, capture_output=True, text=True, check=True,
        )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def rows(batches: Sequence[int], longest: int) -> list[dict[str, Any]]:
    """Return {batch, max_draft_tokens, us_per_step: median, min, max} for each batch."""
    found = []
    for batch in batches:
        blocks = overhead(batch, longest, seed=batch)
        spread = {"median": statistics.median(blocks), "min": min(blocks), "max": max(blocks), "runs": blocks}
        found.append({"batch": batch, "max_draft_tokens": longest, "steps": STEPS, "us_per_step": spread})
    return found


def scheduler_overhead() -> Measured:
    """The median at the batch where it is largest, up to the concurrency of the issue's figures."""
    found = measure([batch for batch in BATCHES if batch <= 32])
    about = "processor time with warm caches; where a model's steps empty them, a loaded server showed more (docs/serving.md)"
    return Measured(round(max(row["us_per_step"]["median"] for row in found), 1), found, about)


FIGURES = (
    Figure("F5.6", "PID scheduler overhead per step, the worst of 1, 8, 32 requests", "us", "<=", LIMIT_US, scheduler_overhead),
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rows"]:
        print(json.dumps(rows(json.loads(sys.argv[2]), int(sys.argv[3]))))
    else:
        for row in measure():
            print(f"batch {row['batch']:4d}: {row['us_per_step']['median']:6.1f} us a step (max {row['us_per_step']['max']:.1f})")
