"""`vllm bench serve`, vLLM's own client, on the same server: a second opinion that this project did not write.

It is started as a module of vLLM's interpreter; the `vllm` console script of the CPU package cannot start.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.errors import StepFailed
from eagle.servebench.pool import Running
from eagle.target.load import load_tokenizer
from eagle.target.vllm import worker_environment

_CLIENT = (
    "import argparse\nfrom vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = argparse.ArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())\n"
)
LIMIT_SECONDS = 1800.0


def write_prompts(path: Path, prompts: Sequence[Sequence[int]], running: Running) -> None:
    """Write the prompts as texts in the form that vLLM's client reads (ShareGPT's)."""
    wanted = running.wanted
    tokenizer = load_tokenizer(wanted.target, trust_remote_code=wanted.config.target.trust_remote_code)
    turns = [[{"from": "human", "value": tokenizer.decode(list(prompt))}, {"from": "gpt", "value": ""}] for prompt in prompts]
    manifest.write_json(path, [{"conversations": pair} for pair in turns])


def run_client(running: Running, prompts: Path, count: int, concurrency: int, max_tokens: int, work: Path) -> dict[str, Any]:
    """Run vLLM's client once; returns tokens_per_second, ttft_ms, tpot_ms (medians), requests and output tokens.

    Raises StepFailed when it fails, or did not get every answer whole.
    """
    out = work / "client.json"
    out.unlink(missing_ok=True)
    wanted = running.wanted
    command = [
        str(wanted.interpreter), "-P", "-c", _CLIENT, "--backend", "openai", "--base-url", running.where.url,
        "--endpoint", "/v1/completions", "--model", running.where.model, "--tokenizer", str(wanted.target),
        "--dataset-name", "sharegpt", "--dataset-path", str(prompts), "--num-prompts", str(count), "--output-len", str(max_tokens),
        "--max-concurrency", str(concurrency), "--ignore-eos", "--temperature", "0", "--disable-tqdm",
        "--save-result", "--result-dir", str(work), "--result-filename", out.name,
    ]  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603 -- the interpreter is the configured one
            command, cwd=work, env=worker_environment(work, wanted.root), capture_output=True, text=True, timeout=LIMIT_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise StepFailed(f"bench: vLLM's own client did not end within {LIMIT_SECONDS:.0f} s") from None
    if done.returncode or not out.is_file():
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise StepFailed(f"bench: vLLM's own client ended with exit code {done.returncode}: {last[:300]}")
    said = json.loads(out.read_text(encoding="utf-8"))
    if said["completed"] != count or said["total_output_tokens"] != count * max_tokens:
        raise StepFailed(
            f"bench: vLLM's own client got {said['completed']} of {count} answers, {said['total_output_tokens']} tokens of "
            f"{count * max_tokens}"
        )
    return {
        "tokens_per_second": said["output_throughput"], "ttft_ms": said["median_ttft_ms"], "tpot_ms": said["median_tpot_ms"],
        "requests": said["completed"], "output_tokens": said["total_output_tokens"],
    }  # fmt: skip
