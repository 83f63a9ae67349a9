"""Figure F2.5: acceptance length of the full profile's draft, counted by vLLM at T=0 with K=4, on prompts it was not trained on.

The user's traffic is GSM8K's train questions (`dataset.prompt_files`), the test its evaluation file; MT-bench's first turns are
unlike it. Both files lie beside the project; where one is missing, the figure says so. The run is what `find_run` finds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.decoding_run import Run, find_run
from benchmarks.figures import ROOT, Figure, Measured
from benchmarks.spine import MT_BENCH
from eagle.bundle.export import export_draft
from eagle.target.generate import Request
from eagle.target.load import load_tokenizer
from eagle.target.template import render_prompt
from eagle.target.vllm import VllmJob, run_vllm

GSM8K = MT_BENCH.parents[1] / "eagle_eval" / "gsm8k_question.jsonl"
K, TOKENS = 4, 128


def first_turns(path: Path, tokenizer_folder: Path) -> list[list[int]]:
    """Return the rendered first turns, token ids, of a file in MT-bench's form."""
    tokenizer = load_tokenizer(tokenizer_folder)
    turns = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()]
    return [render_prompt(tokenizer, [{"role": "user", "content": turn}]) for turn in turns]


def acceptance(run: Run, path: Path) -> Measured:
    """Acceptance length (bonus token counted) on the first turns in `path`, fp32, in vLLM; by position in the runs."""
    if not path.is_file():
        return run.measured(None, [], f"{path.name} is not at hand")
    folder = ROOT / "build" / "figures-quality" / run.profile
    export_draft(run.sources.policy / "draft", folder / "bundle", "float32")
    prompts = first_turns(path, run.target)
    requests = [Request(prompt, TOKENS, 0.0, run.seed, tuple(sorted(run.stops))) for prompt in prompts]
    speculative = {"method": "eagle3", "model": str(folder / "bundle"), "num_speculative_tokens": K}
    job = VllmJob(model=run.target, dtype="float32", requests=requests, speculative=speculative)
    result = run_vllm(job, run.config, ROOT, work=folder, title=f"F2.5: {path.name}")
    counters = result.counters
    if counters is None:
        raise RuntimeError("vLLM reported no speculation counters")
    row = {
        "file": path.name, "prompts": len(prompts), "max_new_tokens": TOKENS, "draft_tokens": K, "drafts": counters.drafts,
        "acceptance_length": counters.acceptance_length, "by_position": counters.acceptance_by_position, "vllm": result.version,
    }  # fmt: skip
    return run.measured(round(counters.acceptance_length, 3), [row])


def _on(path: Path) -> Callable[[], Measured]:
    return lambda: acceptance(find_run(), path)


FIGURES = (
    Figure("F2.5a", "acceptance length in vLLM, K=4, T=0: own traffic (GSM8K)", "tokens", ">=", 2.6, _on(GSM8K)),
    Figure("F2.5b", "acceptance length in vLLM, K=4, T=0: MT-bench first turns", "tokens", ">=", 2.0, _on(MT_BENCH)),
)
