"""The bench step: the tuned engine with the draft against the same engine without it, on held-out prompts.

Output: bench.json, bench.csv, table.txt and two plots. bench.json:
- `rows`: one per (batch, temperature, draft_tokens; 0 = no speculation), see `measure.Timed.row`. Spreads are
  {median, min, max, runs}; `speedup` and `ttft_ratio` are ratios within a turn. Timed runs ignore stop tokens, so their
  acceptance length also covers what the target says beyond its answer's end.
- `acceptance`: acceptance length (bonus token included) and by position over all prompts, to the answers' ends.
- `equality`: share of greedy float32 tokens equal to the target's own, with every first difference.
- `cost_ratio`: draft step / target step without speculation, at the smallest batch. `memory`: bytes and overhead.
- `recommended`: the draft length to serve with at each batch size, 0 = none, from the rows.
- device, threads, dtype, draft_step, prompts, prompt_ids, kinds, max_new_tokens, turns, seed, busy_percent, versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from eagle import manifest
from eagle.bench import measure, plots, table
from eagle.bench.workload import Arm, Workload, load_workload, speed_arms, window_size
from eagle.config import Config
from eagle.decode.engine import Engine
from eagle.draft.io import load_draft
from eagle.errors import StepFailed
from eagle.progress import Track, say
from eagle.steps import StepContext
from eagle.target.load import ensure_target, load_target, pick_device, setup_torch, target_dims

BUSY_PERCENT = 25.0


def run(context: StepContext) -> dict[str, Any]:
    """The step. Returns acceptance_length, speedup_b<batch>, equal_tokens, memory_overhead, cost_ratio and more."""
    config, bench = context.config, context.config.bench
    tuned = _tuned(context.inputs["tune"])
    device = pick_device(config.runtime.device)
    setup_torch(tuned["threads"] if device == "cpu" else config.runtime.threads, config.runtime.seed)
    # A dtype that was asked for is obeyed; otherwise the one that was measured to be faster here.
    dtype = bench.dtype if "dtype" in bench.model_fields_set else tuned["dtype"]
    busy = psutil.cpu_percent(interval=0.3)
    if busy > BUSY_PERCENT:
        say(f"bench: other processes use {busy:.0f} % of the cores: the timings are not reliable")
    target, draft = ensure_target(config.target, context.root, context.cache), context.inputs["policy"] / "draft"
    work = load_workload(context.inputs["dataset"], bench.prompts)
    stop = frozenset(target_dims(target).eos_token_ids)
    compiled = tuned["draft_step"] == "compiled"
    engine = _engine(config, target, draft, dtype, device, work.longest, max(bench.batch_sizes), compiled)
    result: dict[str, Any] = {
        "device": tuned.get("cpu_model", "cpu") if device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "draft_step": tuned["draft_step"],
        "prompts": len(work.prompts),
        "prompt_ids": work.ids,
        "kinds": {kind: work.kinds.count(kind) for kind in sorted(set(work.kinds))},
        "max_new_tokens": bench.max_new_tokens,
        "turns": bench.rounds,
        "seed": config.runtime.seed,
        "busy_percent": busy,
        "versions": manifest.versions(),
        "memory": measure.memory(engine),
        **_timed(config, engine, work),
        "acceptance": _acceptance(config, engine, work, stop),
    }
    del engine  # its memory is needed for the float32 target
    batch = min(bench.equality_prompts, len(work.prompts))
    exact = _engine(config, target, draft, "float32", device, work.longest, batch, compiled=False)
    say("bench: greedy equality in float32")
    result["equality"] = measure.equality(
        exact, work.prompts[:batch], max_new_tokens=bench.max_new_tokens, length=max(bench.draft_tokens), stop=stop
    )
    result["recommended"] = measure.recommend(result["rows"], min(bench.temperatures))
    _write(context.out, result)
    return _metrics(result)


def _tuned(folder: Path) -> dict[str, Any]:
    tuned: dict[str, Any] = manifest.read_json(folder / "tuned.json")
    for key in ("threads", "dtype", "draft_step"):
        if key not in tuned:
            raise StepFailed(f"{folder / 'tuned.json'}: no key '{key}'; run: eagle step tune --dir {folder.parent} --force")
    return tuned


def _engine(config: Config, target: Path, draft: Path, dtype: str, device: str, longest: int, batch: int, compiled: bool) -> Engine:
    model = load_target(target, dtype, device, trust_remote_code=config.target.trust_remote_code)
    network = load_draft(draft, target, device=device, dtype=dtype).eval()
    room = longest + config.bench.max_new_tokens
    return Engine(model, network, network.spec.aux_layers, max_length=room, batch=batch, compiled=compiled)


def _timed(config: Config, engine: Engine, work: Workload) -> dict[str, Any]:
    """Time all groups of arms; returns the rows and the cost ratio."""
    bench = config.bench
    batches, lengths = sorted(set(bench.batch_sizes)), sorted(set(bench.draft_tokens))
    temperatures = sorted(set(bench.temperatures))
    groups = speed_arms(batches, lengths, temperatures)
    rows: list[dict[str, Any]] = []
    cost: dict[str, Any] = {}
    with Track("bench", bench.rounds * sum(len(group) for group in groups), "runs") as track:
        for group in groups:
            size = window_size(len(work.prompts), group[0].batch, bench.rounds)
            if group[0].temperature != temperatures[0]:
                size = max(group[0].batch, size // 2)  # a second look, at half the cost
            timed = measure.race(
                engine, work, group, max_new_tokens=bench.max_new_tokens, size=size, rounds=bench.rounds, seed=config.runtime.seed,
                done=track.advance,
            )  # fmt: skip
            rows += [one.row(timed[0]) for one in timed]
            cost = cost or measure.cost_ratio(timed[0], timed[-1])
    return {"rows": rows, "cost_ratio": cost}


def _acceptance(config: Config, engine: Engine, work: Workload, stop: frozenset[int]) -> list[dict[str, Any]]:
    bench, found = config.bench, []
    for temperature in sorted(set(bench.temperatures)):
        for length in sorted(set(bench.draft_tokens)):
            say(f"bench: acceptance at T={temperature:g}, K={length}")
            arm = Arm(engine.batch, temperature, length)
            found.append(
                measure.acceptance(engine, work, arm, max_new_tokens=bench.max_new_tokens, seed=config.runtime.seed, stop=stop)
            )
    return found


def _write(folder: Path, result: dict[str, Any]) -> None:
    manifest.write_json(folder / "bench.json", result)
    text = table.render(result)
    manifest.write_text(folder / "table.txt", text)
    manifest.write_text(folder / "bench.csv", table.to_csv(result))
    plots.draw_all(result, folder)
    say("\n" + text)


def _metrics(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the longest draft at the first temperature, and the best speed-up of each batch size."""
    first = result["rows"][0]["temperature"]
    found: dict[str, Any] = {
        "equal_tokens": result["equality"]["equal_tokens"],
        "memory_overhead": result["memory"]["overhead"],
    }
    if result["cost_ratio"]["median"] is not None:
        found["cost_ratio"] = result["cost_ratio"]["median"]
    for entry in result["acceptance"]:
        suffix = "" if entry["temperature"] == first else f"_t{entry['temperature']:g}"
        found[f"acceptance_length{suffix}"] = entry["acceptance_length"]
    drafted = [row for row in result["rows"] if row["draft_tokens"] and row["temperature"] == first]
    for batch in sorted({row["batch"] for row in drafted}):
        best = max((row for row in drafted if row["batch"] == batch), key=lambda row: row["speedup"]["median"])
        found[f"speedup_b{batch}"] = best["speedup"]["median"]
        found[f"ttft_ratio_b{batch}"] = best["ttft_ratio"]["median"]
    for entry in result["recommended"]:
        found[f"recommended_k_b{entry['batch']}"] = entry["draft_tokens"]
    return found
