"""Figures F2.4, F2.5, F2.9: acceptance length counted by vLLM at T=0 with K=4, on prompts that the draft was not trained on.

The user's traffic is GSM8K's train questions (`dataset.prompt_files`), the test its evaluation file; MT-bench's first turns are
unlike it. The files lie beside the project; where one is missing, the figure says so. F2.4's draft is that of the default profile
with that traffic, trained here when it is not there yet; F2.9 is the largest memory that its steps took. F2.5's run is what
`find_run` finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.decoding_run import Run, find_run
from benchmarks.figures import ROOT, Figure, Measured
from benchmarks.spine import MT_BENCH, first_turns, vllm_acceptance, watched
from eagle import manifest
from eagle.bundle.export import export_draft
from eagle.profiles import load_config

GSM8K = MT_BENCH.parents[1] / "eagle_eval" / "gsm8k_question.jsonl"
TRAFFIC = MT_BENCH.parents[1] / "gsm8k_train_questions" / "train_questions.jsonl"
K, TOKENS = 4, 128
STEPS = ("dataset", "distill", "policy")


def acceptance(run: Run, path: Path) -> Measured:
    """Acceptance length (bonus token counted) on the first turns in `path`, fp32, in vLLM; by position in the runs."""
    if not path.is_file():
        return run.measured(None, [], f"{path.name} is not at hand")
    folder = ROOT / "build" / "figures-quality" / run.profile
    export_draft(run.sources.policy / "draft", folder / "bundle", "float32")
    found = vllm_acceptance(
        first_turns(path, run.target), run.config, run.target, folder / "bundle", k=K, max_new_tokens=TOKENS, work=folder,
        title=f"F2.5: {path.name}",
    )  # fmt: skip
    return run.measured(round(found["acceptance_length"], 3), [{"file": path.name, **found}])


@cache
def default_run() -> tuple[Run, list[dict[str, Any]]]:
    """Return the default profile's run on the user's traffic, and what each step took; made if it is not there."""
    state = ROOT / "build" / "figures-quality" / "own-traffic"
    base = state / "runs" / "default"
    base.mkdir(parents=True, exist_ok=True)
    said = [f"dataset.prompt_files=[{TRAFFIC}]", "distill.eval_tokens=4", "policy.draft_tokens=4"]
    words = [word for item in (*said, f"paths.cache={state / 'cache'}") for word in ("--set", item)]
    taken = []
    for step in STEPS:
        record = state / f"{step}.json"
        if manifest.read_manifest(base / step) is None or not record.is_file():
            command = [sys.executable, "-m", "eagle", *words, "step", step, "--dir", str(base)]
            manifest.write_json(record, {"step": step, **watched(command, state / f"{step}.log")})
        taken.append(manifest.read_json(record))
    config = load_config(ROOT, "default", [*said, f"paths.cache={state / 'cache'}"])
    return Run(ROOT, base, "default", config), taken


def on_default(path: Path) -> Measured:
    """F2.4: as F2.5, of the default profile's draft."""
    missing = [name.name for name in (TRAFFIC, path) if not name.is_file()]
    if missing:
        return Measured(None, [], f"not at hand: {', '.join(missing)}")
    run, taken = default_run()
    found = acceptance(run, path)
    return Measured(found.value, [*found.runs, *taken], profile="default")


def peak_memory() -> Measured:
    """F2.9: the largest memory of a step of the default profile, GiB, all its processes together."""
    if not TRAFFIC.is_file():
        return Measured(None, [], f"not at hand: {TRAFFIC.name}")
    _, taken = default_run()
    return Measured(max(step["peak_gib"] for step in taken), taken, profile="default")


def _on(path: Path) -> Callable[[], Measured]:
    return lambda: acceptance(find_run(), path)


FIGURES = (
    Figure(
        "F2.4a", "acceptance length in vLLM, K=4, T=0, default profile: own traffic (GSM8K)", "tokens", ">=", 2.1,
        lambda: on_default(GSM8K),
    ),
    Figure(
        "F2.4b", "acceptance length in vLLM, K=4, T=0, default profile: MT-bench first turns", "tokens", ">=", 1.7,
        lambda: on_default(MT_BENCH),
    ),
    Figure("F2.5a", "acceptance length in vLLM, K=4, T=0: own traffic (GSM8K)", "tokens", ">=", 2.6, _on(GSM8K)),
    Figure("F2.5b", "acceptance length in vLLM, K=4, T=0: MT-bench first turns", "tokens", ">=", 2.0, _on(MT_BENCH)),
    Figure("F2.9", "peak memory of data, stage 1 and stage 2, default profile", "GiB", "<=", 6.0, peak_memory),
)  # fmt: skip
