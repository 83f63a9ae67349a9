"""`eagle bench`: all methods that a run has drafts for, on any suite, in one table.

Output, under RUN/bench-<suite>/: what the bench step writes (`eagle.bench.session`), and suite.json. The suite `load`
compares the controller with no speculation under Poisson arrivals: load.json and load.txt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from eagle import manifest
from eagle.bench.arrivals import Limits, LoadResult
from eagle.bench.load import run_load
from eagle.bench.methods import Sources
from eagle.bench.outputs import ABOUT, replacing, result_folder
from eagle.bench.session import Session, make_lab, read_tuned, run_session, timed_dtype, write_outputs
from eagle.bench.suites import SUITES, Suite, load_suite
from eagle.bench.text import plain
from eagle.bench.workload import Arm
from eagle.config import Config, Method
from eagle.errors import ConfigError, StepFailed
from eagle.progress import Track, say
from eagle.target.load import ensure_target, load_tokenizer, pick_device, setup_torch, target_dims
from eagle.target.resolve import target_fingerprint
from eagle.target.template import render_prompt
from kernels.dispatch import using
from kernels.tuned import TABLE, read_table

LOAD = "load"


def find_sources(base: Path) -> Sources:
    """Return the drafts under a run folder. Raises StepFailed when there is none to compare."""
    if manifest.read_manifest(base / "policy") is None:
        raise StepFailed(f"{base}: no finished draft there (step policy); run: make run, or eagle step policy --dir {base}")
    distill, rivals = (base / name if manifest.read_manifest(base / name) else None for name in ("distill", "rivals"))
    return Sources(distill, base / "policy", rivals)


def available_methods(sources: Sources, base: Path) -> list[Method]:
    """Return all methods that can be measured, and say which cannot and how to change that."""
    everything: Sequence[Method] = get_args(Method)
    found = [method for method in everything if sources.available(method)]
    if sources.rivals is None:
        say(f"bench: medusa and eagle2 are not trained for this run; to compare them: eagle step rivals --dir {base}")
    return found


def check_sources(sources: Sources, methods: Sequence[Method], config: Config, root: Path) -> None:
    """Refuse drafts that are not what their steps wrote (every byte is read), or were made for another target.

    Raises StepFailed and ConfigError. What a manifest does not tell is not asked.
    """
    needed = {"eagle31-distilled": sources.distill, "medusa": sources.rivals, "eagle2": sources.rivals}
    for folder in dict.fromkeys([sources.policy, *(needed.get(method) for method in methods)]):
        made = manifest.read_manifest(folder) if folder else None
        if folder is None or made is None:
            continue
        altered = manifest.altered_file(folder, made)
        if altered:
            again = f"eagle step {folder.name} --dir {folder.parent} --force"
            raise StepFailed(f"{folder / altered}: it is not what the step '{folder.name}' wrote; run: {again}")
        trained = made["parts"].get("extra", {}).get("target")
        now = target_fingerprint(config.target, root, root / config.paths.cache)
        if trained not in (None, now):
            raise ConfigError(
                f"target.model: '{config.target.model}' is not the target that {folder} was made for ({now}, then {trained}); "
                f"name that one, or make drafts for this one: make run"
            )


def compare(config: Config, root: Path, base: Path, suite: str, prompts: int | None, out: Path | None) -> Path:
    """Measure `config.bench.methods` on a suite with the drafts of the run folder `base`; returns the output folder.

    `suite`: see `eagle.bench.suites`, or 'load'. Raises StepFailed for a run that lacks what a method needs, ConfigError
    and DataError as `load_suite` and `check_sources` do, BusyError when another bench writes the same folder, and what `replacing`
    raises. The folder is complete when it exists; only an empty folder or former results are replaced.
    """
    sources = find_sources(base)
    for method in config.bench.methods:
        if not sources.available(method):
            needed = "distill" if method == "eagle31-distilled" else "rivals"
            raise StepFailed(f"bench: '{method}' needs the step '{needed}'; run: eagle step {needed} --dir {base}")
    tuned = read_tuned(base / "tune")
    final = result_folder(out or base / f"bench-{short_name(suite, root)}")
    target = ensure_target(config.target, root, root / config.paths.cache)
    tokenizer = load_tokenizer(target, trust_remote_code=config.target.trust_remote_code)
    work = load_suite(
        "default" if suite == LOAD else suite, root=root, render=partial(render_prompt, tokenizer),
        max_prompt_tokens=_longest_prompt(config, target), count=prompts, dataset=base / "dataset",
    )  # fmt: skip
    check_sources(sources, config.bench.methods, config, root)
    with replacing(final) as fresh:
        say(f"bench: suite '{suite}' -> {final}")
        with using(tuned=read_table(base / "tune" / TABLE, pick_device(config.runtime.device))):
            _measure(Session(config, target, sources, tuned, work), suite, fresh)
        manifest.write_json(fresh / ABOUT, about(work, suite))
    return final


def _longest_prompt(config: Config, target: Path) -> int:
    """Return how many tokens a prompt may have: it and its answer must fit the target's positions."""
    positions, answer = target_dims(target).max_position_embeddings, config.bench.max_new_tokens
    if positions <= answer:
        raise ConfigError(f"bench.max_new_tokens: {answer} tokens leave no room for a prompt: the target has {positions} positions")
    return min(config.dataset.max_prompt_tokens, positions - answer)


def _measure(session: Session, suite: str, folder: Path) -> None:
    if suite == LOAD:
        _load(session, folder)
        return
    result, traces = run_session(session)
    result["suite"] = suite
    write_outputs(folder, result, traces)


def short_name(suite: str, root: Path) -> str:
    """Return the suite's part of the folder name; files of one name in different folders differ."""
    if suite in (*SUITES, LOAD):
        return suite
    place = hashlib.sha256(str((root / suite).resolve()).encode()).hexdigest()[:6]
    return f"{Path(suite).stem[:40]}-{place}"


def about(work: Suite, suite: str) -> dict[str, Any]:
    """Return the content of suite.json: which prompts were measured."""
    return {"suite": suite, "prompts": len(work.prompts), "ids": work.ids, "kinds": work.kinds, "dropped": work.dropped}


def _load(session: Session, folder: Path) -> None:
    """Answer the suite's prompts under Poisson arrivals at the configured rates, arm by arm in turns."""
    config, bench, tuned = session.config, session.config.bench, session.tuned
    device = pick_device(config.runtime.device)
    setup_torch(tuned["threads"] if device == "cpu" else config.runtime.threads, config.runtime.seed)
    batch = max(bench.batch_sizes)
    dtype = timed_dtype(config, tuned)
    lab = make_lab(session, dtype, device, batch, tuned["draft_step"] == "compiled")
    arms = [Arm(batch, 0.0, 0, "none"), Arm(batch, 0.0, bench.max_draft_tokens, "eagle31-pid")]
    for arm in arms:
        say(f"bench: load: {arm.name}: warm-up{' and costs' if arm.draft_tokens else ''}")
        warm = session.work.window(0, batch)
        lab.engine(arm.method).generate(warm, max_new_tokens=4, draft_tokens=min(arm.draft_tokens, 2), ignore_eos=True)
        lab.prepare(arm, session.work)
    limits = Limits(bench.load_ttft_ms / 1e3, bench.load_itl_ms / 1e3)
    points: dict[Arm, list[Any]] = {arm: [] for arm in arms}
    with Track("bench: load", len(arms) * len(bench.load_rates) * bench.load_requests, "requests") as track:
        for turn, rate in enumerate(bench.load_rates):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                track.begin(f"{rate:g} requests/s: {arm.name}")
                point = run_load(
                    lab.engine(arm.method), lab.policy(arm), session.work, rate=rate, count=bench.load_requests,
                    max_new_tokens=bench.max_new_tokens, limits=limits, seed=config.runtime.seed, done=track.advance,
                )  # fmt: skip
                points[arm].append(point)
    plain, pid = (LoadResult(arm.name, limits, tuple(points[arm])) for arm in arms)
    rows = [row for pair in zip(plain.rows(), pid.rows(plain), strict=True) for row in pair]
    told = {"dtype": dtype, "threads": tuned["threads"], "batch": batch, "requests": bench.load_requests}
    result = {**told, "max_new_tokens": bench.max_new_tokens, "limits_ms": [bench.load_ttft_ms, bench.load_itl_ms], "rows": rows}
    manifest.write_json(folder / "load.json", {**result, "versions": manifest.versions()})
    text = render_load(result)
    manifest.write_text(folder / "load.txt", text)
    say("\n" + text)


def render_load(result: dict[str, Any]) -> str:
    """Return the load suite's rows as a plain table."""
    ttft, itl = result["limits_ms"]
    title = (
        f"{result['requests']} requests a rate, at most {result['batch']} at once, {result['max_new_tokens']} new tokens, "
        f"{result['dtype']}; good: TTFT <= {ttft:g} ms and mean ITL <= {itl:g} ms"
    )
    table = Table(title=title, title_justify="left", show_edge=False)
    for head in ("requests/s", "speculation"):
        table.add_column(head, no_wrap=True)
    for head in ("TTFT ms p50 / p95", "ITL ms p50 / p95", "latency ms p50 / p95", "tokens/s", "good/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in result["rows"]:
        pairs = [f"{row[f'{name}_ms_p50']:.0f} / {row[f'{name}_ms_p95']:.0f}" for name in ("ttft", "itl", "latency")]
        table.add_row(f"{row['rate']:g}", row["arm"], *pairs, f"{row['tokens_per_second']:.1f}", f"{row['goodput']:.2f}")
    return "\n".join(plain(table, 140)) + "\n"
