"""Runs under vLLM's own interpreter: `PYTHON -P worker.py JOBS.json OUT.jsonl`. Several engines, one after the other.

Each engine generates for all prompts in one batch; whenever the runner has drafted, the tokens that the target has just
emitted and the drafts are written down for every request. A job that fails is written down as such, and the next begins.
Arguments, environment and batching are the product's own (eagle/target/vllm_worker.py).
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def load_product_worker(path: str) -> ModuleType:
    """Import vllm_worker.py by its path: its folder holds modules whose names other packages use."""
    spec = importlib.util.spec_from_file_location("vllm_worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record_drafts(rounds: list[Any]) -> None:
    """Make every runner append [request, emitted tokens, drafts] to `rounds` after it has drafted."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.propose_draft_token_ids

    def propose(self: Any, scheduler_output: Any, sampled_token_ids: Any, *rest: Any) -> Any:
        emitted = sampled_token_ids.tolist()
        drafts = original(self, scheduler_output, sampled_token_ids, *rest)
        for name, tokens, draft in zip(self.input_batch.req_ids, emitted, drafts.tolist(), strict=True):
            rounds.append([int(name.split("-", 1)[0]), [token for token in tokens if token >= 0], draft])
        return drafts

    GPUModelRunner.propose_draft_token_ids = propose


def run(job: dict[str, Any], product: ModuleType, rounds: list[Any]) -> dict[str, Any]:
    """Start the job's engine, generate, and return {answers, rounds, seconds}; the engine is gone afterwards."""
    from vllm import LLM

    began = time.monotonic()
    rounds.clear()
    engine: Any = None
    try:
        engine = LLM(**product.engine_arguments(job, True))
        answers = product.run_wave(engine, 0, job["requests"], product.Progress(sys.stderr))
        seconds = time.monotonic() - began
        return {"answers": [a["tokens"] for a in answers], "rounds": list(rounds), "seconds": seconds}
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def main(jobs_path: Path, out_path: Path) -> None:
    """Run all jobs; one line of OUT.jsonl each."""
    content = json.loads(jobs_path.read_text(encoding="utf-8"))
    product = load_product_worker(content["product_worker"])
    product.die_with_parent(content["parent"])
    os.dup2(2, 1)
    product.set_environment({"kv_cache_gib": 1, "threads": 1}, True)
    rounds: list[Any] = []
    record_drafts(rounds)
    for job in content["jobs"]:
        try:
            found = run(job, product, rounds)
        except Exception as error:  # noqa: BLE001 -- whatever vLLM raises is the outcome of this job
            found = {"error": f"{type(error).__name__}: {error}"}
        with out_path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"name": job["name"], **found}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
