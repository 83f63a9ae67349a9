"""Figure F2.5: acceptance length of the full profile's draft, counted by vLLM at T=0 with K=4, on prompts it was not trained on.

The user's traffic is GSM8K's train questions (`dataset.prompt_files`), the test its evaluation file; MT-bench's first turns are
unlike it. Both files lie beside the project; where one is missing, the figure says so. The run is what `find_run` finds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.decoding_run import Run, find_run
from benchmarks.figures import ROOT, Figure, Measured
from benchmarks.spine import MT_BENCH, first_turns, vllm_acceptance
from eagle.bundle.export import export_draft

GSM8K = MT_BENCH.parents[1] / "eagle_eval" / "gsm8k_question.jsonl"
K, TOKENS = 4, 128


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


def _on(path: Path) -> Callable[[], Measured]:
    return lambda: acceptance(find_run(), path)


FIGURES = (
    Figure("F2.5a", "acceptance length in vLLM, K=4, T=0: own traffic (GSM8K)", "tokens", ">=", 2.6, _on(GSM8K)),
    Figure("F2.5b", "acceptance length in vLLM, K=4, T=0: MT-bench first turns", "tokens", ">=", 2.0, _on(MT_BENCH)),
)
