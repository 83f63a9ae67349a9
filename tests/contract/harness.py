"""Bundles through vLLM and through our own network, and what differs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle.config import Config
from eagle.draft.io import load_draft
from eagle.serve.command import speculative_config
from eagle.target.load import load_target
from eagle.target.vllm import WORKER, find_vllm, require_vllm, worker_environment
from tests.contract.cases import Case, make_bundle, make_target, prompts
from tests.contract.reference import greedy_chains

ROOT = Path(__file__).parents[2]
STEPS = 3  # drafts a round
NEW_TOKENS = 6
NEAR = 1e-4  # logits nearer to each other than this may change places by rounding
JOBS_PER_PROCESS = 12
SECONDS_PER_JOB = 120


@dataclass(frozen=True)
class Job:
    """`bundle` is what vLLM gets, `ours` the checkpoint that our own network is loaded from."""

    name: str
    target: Path
    bundle: Path
    ours: Path


@dataclass
class Verdict:
    """What came of a job. `differences` and `near_ties` hold (context length, step, vLLM's token, ours, logit gap)."""

    name: str
    error: str = ""
    proposals: int = 0
    tokens: int = 0
    accepted: int = 0
    seconds: float = 0.0
    differences: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    near_ties: list[tuple[int, int, int, int, float]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether vLLM ran the draft and proposed our tokens, every one of them."""
        return not self.error and not self.differences and self.tokens > 0


def has_vllm() -> bool:
    """Whether there is a vLLM to run."""
    return find_vllm(Config().vllm, ROOT) is not None


def make_job(case: Case, work: Path) -> Job:
    """Make the case's target and bundle below `work`."""
    target = make_target(case, work / "targets")
    bundle = make_bundle(case, target, work / case.name)
    return Job(case.name, target, bundle, bundle)


def run_jobs(jobs: list[Job], work: Path) -> list[Verdict]:
    """Run every job in vLLM, several in one process, and compare; verdicts in the order of the jobs."""
    verdicts = []
    for first in range(0, len(jobs), JOBS_PER_PROCESS):
        some = jobs[first : first + JOBS_PER_PROCESS]
        found = _in_vllm(some, work)
        verdicts += [_compare(job, found.get(job.name)) for job in some]
    return verdicts


def _in_vllm(jobs: list[Job], work: Path) -> dict[str, dict[str, Any]]:
    given = prompts()
    longest = max(map(len, given)) + NEW_TOKENS + 2 * STEPS + 2
    requests = [{"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0.0, "seed": 0, "stop": []} for prompt in given]
    common = {
        "dtype": "float32", "seed": 0, "max_model_len": longest, "max_num_seqs": len(given), "tensor_parallel_size": 1,
        "trust_remote_code": False, "requests": requests,
    }  # fmt: skip
    described = [
        {**common, "name": job.name, "model": str(job.target), "speculative": speculative_config(job.bundle, STEPS)} for job in jobs
    ]
    with tempfile.TemporaryDirectory(prefix="contract-") as private:  # short: the paths of vLLM's sockets may not be long
        asked, out = Path(private) / "jobs.json", Path(private) / "out.jsonl"
        asked.write_text(json.dumps({"parent": os.getpid(), "product_worker": str(WORKER), "jobs": described}), encoding="utf-8")
        out.touch()
        command = [str(require_vllm(Config().vllm, ROOT)), "-P", str(Path(__file__).with_name("worker.py")), str(asked), str(out)]
        with (work / "vllm.log").open("ab") as log:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=private, check=False,
                env=worker_environment(Path(private), ROOT), timeout=60 + SECONDS_PER_JOB * len(jobs),
            )  # fmt: skip
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {line.pop("name"): line for line in lines}


def _compare(job: Job, found: dict[str, Any] | None) -> Verdict:
    if found is None or "error" in found:
        return Verdict(job.name, error=found["error"] if found else "vLLM ended before this job was done; see vllm.log")
    contexts, theirs, accepted = _contexts(found)
    target = load_target(job.target, "float32")
    draft = load_draft(job.ours, job.target, dtype="float32").eval()
    chosen, gaps = greedy_chains(target, draft, contexts, STEPS)
    verdict = Verdict(job.name, proposals=len(contexts), accepted=accepted, seconds=found["seconds"])
    for context, their, our, gap in zip(contexts, theirs, chosen.tolist(), gaps.tolist(), strict=True):
        for step in range(STEPS):
            verdict.tokens += 1
            if their[step] != our[step]:
                place = (len(context), step, their[step], our[step], gap[step])
                (verdict.near_ties if gap[step] < NEAR else verdict.differences).append(place)
                break  # what follows is drafted after another token
    return verdict


def _contexts(found: dict[str, Any]) -> tuple[list[list[int]], list[list[int]], int]:
    """Return the context before every drafting, what was drafted there, and how many drafts the target accepted."""
    held = [list(prompt) for prompt in prompts()]
    starts = [len(prompt) for prompt in held]
    contexts, drafts, accepted = [], [], 0
    for request, emitted, drafted in found["rounds"]:
        held[request] += emitted
        accepted += len(emitted) - 1
        contexts.append(list(held[request]))
        drafts.append(drafted)
    for answer, context, start in zip(found["answers"], held, starts, strict=True):
        if context[start : start + NEW_TOKENS] != answer:
            raise AssertionError(f"the rounds give {context[start:]}, the answer is {answer}")
    return contexts, drafts, accepted
