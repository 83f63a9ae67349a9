"""Where the time of a draft step goes: `python -m benchmarks.draft_profile` (FIGURES_RUN, FIGURES_PROFILE as for figures).

Prints the wall time of a step (draft loop at batch 1, K = 4, three passes and four heads) and torch's own profile of it.
docs/decoding.md shows its output.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.decoding_run import find_run
from eagle.bench.session import timed_dtype
from eagle.decode.drafting import EagleDrafter
from eagle.draft.io import load_draft
from eagle.target.layout import lay_out
from eagle.target.load import load_target, pick_device, setup_torch

LENGTH = 4
CONTEXT = 64
REPEATS = 50


def main() -> None:
    """Measure and print."""
    run = find_run()
    device, tuned = pick_device(run.config.runtime.device), run.tuned
    setup_torch(tuned["threads"], run.seed)
    dtype = timed_dtype(run.config, tuned)
    target = lay_out(load_target(run.target, dtype, device))
    network = load_draft(run.sources.policy / "draft", run.target, device=device, dtype=dtype).eval()
    drafter = EagleDrafter.beside(target, network, batch=1, max_length=2 * CONTEXT)
    width = len(drafter.aux_layers) * network.spec.target_hidden_size
    tokens = torch.randint(network.spec.vocab_size, (1, CONTEXT), device=device)
    with torch.inference_mode():
        aux = torch.randn(1, CONTEXT, width, dtype=target.dtype, device=device)
        drafter.extend([0], tokens, aux, [0], [CONTEXT])
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            drafter.draft([0], LENGTH, None)
            seconds.append(time.perf_counter() - began)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(REPEATS):
                drafter.draft([0], LENGTH, None)
    table = found.key_averages()
    total = sum(event.self_cpu_time_total for event in table)
    calls = sum(event.count for event in table if event.key.startswith(("aten::", "mkldnn::")))
    middle = 1e3 * statistics.median(seconds)
    sys.stdout.write(f"{dtype}, {tuned['threads']} threads, draft of profile {run.profile}\n")
    each = calls / REPEATS / LENGTH
    sys.stdout.write(f"{LENGTH} draft tokens: {middle:.2f} ms, median of {REPEATS}; {each:.0f} operator calls a token\n")
    for event in sorted(table, key=lambda event: -event.self_cpu_time_total)[:8]:
        share, count = 100 * event.self_cpu_time_total / total, event.count / REPEATS / LENGTH
        sys.stdout.write(f"{share:5.1f} %  {count:6.1f} calls a token  {event.key}\n")


if __name__ == "__main__":
    main()
