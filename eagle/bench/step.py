"""The bench step: the tuned engine with the draft against the same engine without it, on held-out prompts.

Output: bench.json (see `eagle.bench.session`), bench.csv, table.txt and plots.
"""

from __future__ import annotations

from typing import Any

from eagle.bench.methods import Sources
from eagle.bench.session import Session, read_tuned, run_session, write_outputs
from eagle.bench.workload import load_workload
from eagle.errors import ConfigError
from eagle.steps import StepContext
from eagle.target.load import ensure_target, pick_device
from kernels.dispatch import using
from kernels.tuned import TABLE, read_table


def run(context: StepContext) -> dict[str, Any]:
    """The step. Returns acceptance_length, speedup_b<batch>, equal_tokens, memory_overhead, cost_ratio and more.

    Raises ConfigError when `bench.methods` asks for a method whose draft this step is not given.
    """
    config = context.config
    tuned, sources = read_tuned(context.inputs["tune"]), Sources(None, context.inputs["policy"])
    for method in config.bench.methods:
        if not sources.available(method):
            raise ConfigError(f"bench.methods: the step 'bench' has no draft for '{method}'; compare it with: eagle bench")
    if "eagle31" not in config.bench.methods:
        raise ConfigError("bench.methods: the step 'bench' measures the run's own draft: 'eagle31' must be among them")
    work = load_workload(context.inputs["dataset"], config.bench.prompts)
    target = ensure_target(config.target, context.root, context.cache)
    with using(tuned=read_table(context.inputs["tune"] / TABLE, pick_device(config.runtime.device))):
        result, traces = run_session(Session(config, target, sources, tuned, work))
    write_outputs(context.out, result, traces)
    return _metrics(result)


def _metrics(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the longest draft at the first temperature, and the best speed-up of each batch size."""
    rows = [row for row in result["rows"] if row["method"] == "eagle31"]
    first = rows[0]["temperature"]
    found: dict[str, Any] = {
        "equal_tokens": result["equality"]["equal_tokens"],
        "memory_overhead": result["memory_by_method"]["eagle31"],
    }
    if result["cost_ratio"]["median"] is not None:
        found["cost_ratio"] = result["cost_ratio"]["median"]
    for entry in result["acceptance"]:
        if entry["method"] == "eagle31":
            suffix = "" if entry["temperature"] == first else f"_t{entry['temperature']:g}"
            found[f"acceptance_length{suffix}"] = entry["acceptance_length"]
    drafted = [row for row in rows if row["temperature"] == first]
    for batch in sorted({row["batch"] for row in drafted}):
        best = max((row for row in drafted if row["batch"] == batch), key=lambda row: row["speedup"]["median"])
        found[f"speedup_b{batch}"] = best["speedup"]["median"]
        found[f"ttft_ratio_b{batch}"] = best["ttft_ratio"]["median"]
    for entry in result["recommended"]:
        found[f"recommended_k_b{entry['batch']}"] = entry["draft_tokens"]
    return found
