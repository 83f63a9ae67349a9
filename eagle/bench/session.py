"""One measurement session: methods against no speculation on one workload, and what comes of it as bench.json.

- `rows`: one per (batch, temperature, method, draft_tokens), see `measure.Timed.row`. Spreads are {median, min, max,
  runs}; `speedup` and `ttft_ratio` are ratios within a turn. Timed runs ignore stop tokens, so their acceptance length
  also covers what the target says beyond its answer's end. `predicted_speedup`: of Eagle 3.1 chains, from the tune step's
  seconds and `acceptance` (`predict`), null where there are none.
- `acceptance`: acceptance length (bonus token included) and by position over all prompts, to the answers' ends, of every
  method with a fixed draft length.
- `equality`: share of greedy float32 tokens equal to the target's own, with every first difference.
- `cost_ratio`: draft step / target step without speculation, at the smallest batch. `memory`: bytes and overhead of the
  first method; `memory_by_method`: the overheads of all. `costs`: the tables that adaptive methods decide by.
- `replay`: per batch size, what recorded acceptance says of every fixed K, the oracle and the controller (`replays.judge`);
  only with `eagle31-pid` among the methods. Its rounds are in trace-b<batch>.jsonl.
- `recommended`: the fixed draft length to serve with at each batch size, 0 = none, from the rows.
- device, threads, dtype, draft_step, prompts, prompt_ids, kinds, max_new_tokens, turns, seed, busy_percent, versions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from eagle import manifest
from eagle.bench import measure, plots, predict, replays, table
from eagle.bench.methods import Lab, Sources
from eagle.bench.workload import Arm, Workload, is_adaptive, speed_arms, window_size
from eagle.config import Config, DType, Method
from eagle.decode.control import ControlSettings
from eagle.decode.replay import Round
from eagle.errors import ConfigError, PreflightError, StepFailed
from eagle.progress import Track, say
from eagle.target.layout import lay_out
from eagle.target.load import load_target, pick_device, setup_torch, target_dims

Traces = dict[int, list[Round]]
FEWEST = 3  # new tokens of an answer in which anything is drafted: the first is the prompt's, one that lacks alone is not drafted


@dataclass(frozen=True)
class Session:
    """What is measured: a target folder, the drafts of a run, its tune step's findings, and prompts."""

    config: Config
    target: Path
    sources: Sources
    tuned: dict[str, Any]
    work: Workload

    @property
    def methods(self) -> list[Method]:
        """The methods, each once, without `none`, which is always measured."""
        return [method for method in dict.fromkeys(self.config.bench.methods) if method != "none"]


def read_tuned(folder: Path) -> dict[str, Any]:
    """Return tuned.json of a tune step's folder. Raises StepFailed for one that is missing, damaged or lacks a key."""
    path, again = folder / "tuned.json", f"run: eagle step tune --dir {folder.parent} --force"
    try:
        tuned = manifest.read_json(path)
    except (OSError, ValueError) as error:
        raise StepFailed(f"{path}: cannot be read ({error}); {again}") from None
    if not isinstance(tuned, dict):
        raise StepFailed(f"{path}: not an object; {again}")
    for key in ("threads", "dtype", "draft_step"):
        if key not in tuned:
            raise StepFailed(f"{path}: no key '{key}'; {again}")
    whole = isinstance(tuned["threads"], int) and not isinstance(tuned["threads"], bool) and tuned["threads"] > 0
    if not whole or tuned["dtype"] not in get_args(DType) or tuned["draft_step"] not in ("eager", "compiled"):
        raise StepFailed(f"{path}: threads, dtype or draft_step is not one that the step writes; {again}")
    return tuned


def timed_dtype(config: Config, tuned: dict[str, Any]) -> str:
    """The dtype of timed runs: one that was asked for is obeyed; otherwise the one measured to be faster here."""
    return config.bench.dtype if "dtype" in config.bench.model_fields_set else str(tuned["dtype"])


def run_session(session: Session) -> tuple[dict[str, Any], Traces]:
    """Measure; returns bench.json's content and the recorded traces.

    Raises ConfigError for answers so short that a method which chooses its draft length would never draft.
    """
    config, bench, tuned, work = session.config, session.config.bench, session.tuned, session.work
    adaptive = [method for method in session.methods if is_adaptive(method)]
    if adaptive and bench.max_new_tokens < FEWEST:
        raise ConfigError(
            f"bench.max_new_tokens: {bench.max_new_tokens} leaves no round with a draft for {adaptive[0]}; "
            f"raise it to {FEWEST} or more"
        )
    device = pick_device(config.runtime.device)
    setup_torch(tuned["threads"] if device == "cpu" else config.runtime.threads, config.runtime.seed)
    dtype = timed_dtype(config, tuned)
    busy = measure.busy_percent("bench")
    stop = frozenset(target_dims(session.target).eos_token_ids)
    compiled = tuned["draft_step"] == "compiled"
    say(f"bench: {len(work.prompts)} prompts; {_phases(session)}")
    lab = make_lab(session, dtype, device, max(bench.batch_sizes), compiled)
    traces: Traces = {}
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
        "memory": measure.memory(lab.engine(session.methods[0])) if session.methods else None,
        "memory_by_method": {m: measure.memory(lab.engine(m))["overhead"] for m in session.methods},
        **_timed(session, lab),
        "acceptance": _acceptance(session, lab, stop),
        "replay": _replay(session, lab, traces),
        "costs": {name: json.loads(costs.to_json()) for name, costs in lab.costs().items()},
    }
    predict.add_predictions(result["rows"], result["acceptance"], predict.tuned_costs(tuned, dtype))
    del lab  # its memory is needed for the float32 target
    result["equality"] = _equality(session, device, stop)
    result["recommended"] = measure.recommend(result["rows"], min(bench.temperatures))
    return result, traces


def _phases(session: Session) -> str:
    """Return what is measured, in the order of the phases, for the person who waits."""
    bench = session.config.bench
    batches = ", ".join(map(str, sorted(set(bench.batch_sizes))))
    names = ["speed", "acceptance", *(["replay"] if "eagle31-pid" in session.methods else []), "equality"]
    return f"methods none, {', '.join(session.methods)}; batches {batches}; phases: {', '.join(names)}"


def make_lab(session: Session, dtype: str, device: str, batch: int, compiled: bool) -> Lab:
    """Load the target and return the lab of the session's methods. Raises PreflightError when the KV memory cannot be had."""
    config = session.config
    model = lay_out(load_target(session.target, dtype, device, trust_remote_code=config.target.trust_remote_code))
    control = ControlSettings(**{**config.control.model_dump(), "max_tokens": config.bench.max_draft_tokens})
    room = session.work.longest + config.bench.max_new_tokens
    try:
        return Lab(model, session.target, session.sources, config.bench, control, room=room, batch=batch, compiled=compiled)
    except RuntimeError as error:  # of the CPU's allocator there is no class of its own
        if "allocate memory" not in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise PreflightError(
            f"bench.batch_sizes: no memory for {batch} requests of {room} tokens at once; lower the batch or bench.max_new_tokens"
        ) from None


def _timed(session: Session, lab: Lab) -> dict[str, Any]:
    """Time all groups of arms; returns the rows and the cost ratio."""
    bench, seed = session.config.bench, session.config.runtime.seed
    temperatures = sorted(set(bench.temperatures))
    groups = speed_arms(sorted(set(bench.batch_sizes)), temperatures, session.methods, lab.lengths)
    rows: list[dict[str, Any]] = []
    cost: dict[str, Any] = {"median": None}
    with Track("bench: speed", bench.rounds * sum(len(group) for group in groups), "runs") as track:
        for group in groups:
            size = window_size(len(session.work.prompts), group[0].batch, bench.rounds)
            if group[0].temperature != temperatures[0]:
                size = max(group[0].batch, size // 2)  # a second look, at half the cost
            timed = measure.race(
                lab, session.work, group, max_new_tokens=bench.max_new_tokens, size=size, rounds=bench.rounds, seed=seed,
                done=track.advance, began=track.begin,
            )  # fmt: skip
            rows += [one.row(timed[0]) for one in timed]
            chains = [one for one in timed if one.arm.method == "eagle31"]
            if chains and cost["median"] is None:
                cost = measure.cost_ratio(timed[0], chains[-1])
    return {"rows": rows, "cost_ratio": cost}


def _acceptance(session: Session, lab: Lab, stop: frozenset[int]) -> list[dict[str, Any]]:
    """Count acceptance over all prompts, for every method of a fixed draft length."""
    bench, found = session.config.bench, []
    arms = [
        Arm(lab.batch, temperature, length, method)
        for method in session.methods if not is_adaptive(method)
        for temperature in sorted(set(bench.temperatures))
        for length in lab.lengths(method)
    ]  # fmt: skip
    with Track("bench: acceptance", len(arms) * len(session.work.prompts), "answers") as track:
        for arm in arms:
            track.begin(f"{arm.place}: {arm.name}")
            counted = measure.acceptance(
                lab.engine(arm.method), session.work, arm, max_new_tokens=bench.max_new_tokens, seed=session.config.runtime.seed,
                stop=stop, done=track.advance,
            )  # fmt: skip
            found.append(counted)
    return found


def _replay(session: Session, lab: Lab, traces: Traces) -> list[dict[str, Any]]:
    """Record acceptance at the longest draft and judge the controller on it; `traces` gets the rounds by batch size."""
    bench, found = session.config.bench, []
    if "eagle31-pid" not in session.methods:
        return []
    longest, sizes = bench.max_draft_tokens, sorted(set(bench.batch_sizes))
    windows = {batch: session.work.window(0, max(batch, len(session.work.prompts))) for batch in sizes}
    with Track("bench: replay", sum(map(len, windows.values())), "answers") as track:
        for batch, prompts in windows.items():
            track.begin(f"batch {batch}: recording acceptance with K={longest}")
            engine = lab.engine("eagle31-pid")
            traces[batch] = replays.record(engine, prompts, batch, longest, bench.max_new_tokens, track.advance)
            arm = Arm(batch, min(bench.temperatures), longest, "eagle31-pid")
            found.append(replays.judge(traces[batch], lab.cost_table(arm), lab.control, longest, batch))
    return found


def _equality(session: Session, device: str, stop: frozenset[int]) -> dict[str, Any]:
    """Compare all methods' text in float32, at batch 1 and in one ragged batch."""
    say("bench: equality: loading the target in float32")
    bench = session.config.bench
    prompts = session.work.prompts[: bench.equality_prompts]
    lab = make_lab(session, "float32", device, len(prompts), compiled=False)
    arms = [Arm(b, 0.0, max(lab.lengths(m)), m) for m in session.methods or ["none"] for b in sorted({1, len(prompts)})]
    with Track("bench: equality", (1 + len(arms)) * len(prompts), "answers") as track:
        for arm in arms:
            if is_adaptive(arm.method):
                track.begin(f"batch {arm.batch}: {arm.name}, costs")
            lab.prepare(arm, session.work)
        return measure.equality(
            lab, arms, prompts, max_new_tokens=bench.max_new_tokens, stop=stop, done=track.advance, began=track.begin
        )


def write_outputs(folder: Path, result: dict[str, Any], traces: Traces) -> None:
    """Write bench.json, bench.csv, table.txt, the traces and the plots, and show the table."""
    replays.write_traces(folder, traces)
    manifest.write_json(folder / "bench.json", result)
    text = table.render(result)
    manifest.write_text(folder / "table.txt", text)
    manifest.write_text(folder / "bench.csv", table.to_csv(result))
    plots.draw_all(result, folder)
    say("\n" + text)
