"""Figure F5.9: what a served draft answers under load and bad clients: 1,000 requests, 32 at once, then is it still well?

The run is what `benchmarks/decoding_run.py` finds; its bundle is served in fp32 with the controller, as `eagle serve` does. Every
prompt is first asked alone, then all again in a mixed order with answers of many lengths: some clients leave in the middle of
an answer, and between them come prompts larger than the room, broken JSON, and connections that are dropped half-way.

An answer counts as equal when its tokens begin the one that the same prompt got alone (greedy), or when they part where the
target's two highest logits are closer than `GAP`: rounding, since a batch's matrix products are not those of one request. Each
such one is listed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import psutil

from benchmarks.decoding_run import Run, find_run
from benchmarks.figures import Figure, Measured
from eagle.bench.measure import logit_gap
from eagle.bundle.record import read_record
from eagle.errors import StepFailed
from eagle.ports import free_port
from eagle.progress import say
from eagle.serve.launch import Wanted, serving, want
from eagle.servebench.arms import describe, wanted_for
from eagle.servebench.client import Endpoint, closed_loop, token_ids
from eagle.servebench.pool import Running
from eagle.target.load import load_target, target_dims

GAP = 1e-4  # a difference of the target's two highest logits that is rounding
GROWTH = 0.05  # of the servers' memory over the second half: more is a leak
REST_SECONDS = 15.0  # in which a server must have let go of requests whose clients left
SILENCE_SECONDS = 180.0
REFUSALS = (400, 413, 422)

Kind = Literal["whole", "cancelled", "oversized", "bad JSON", "half sent", "unread"]
BAD: tuple[Kind, ...] = ("oversized", "bad JSON", "half sent", "unread")


@dataclass(frozen=True)
class Effort:
    """`requests` in all that are well formed, the share `cancelled` of them by their client; `bad` of each other kind besides."""

    requests: int = 1000
    at_once: int = 32
    cancelled: float = 0.1
    bad: int = 10
    prompts: int = 100
    prompt_tokens: int = 96
    new_tokens: int = 24


@dataclass(frozen=True)
class Job:
    """One request: which prompt, how many new tokens, and after how many of them the client leaves (`cancelled`)."""

    kind: Kind
    prompt: int
    tokens: int
    stay: int = 0


@dataclass
class Soaked:
    """What came back: tokens of whole answers, requests by kind that went as they should, and what went wrong."""

    answers: list[tuple[Job, tuple[int, ...]]] = field(default_factory=list)
    done: Counter[Kind] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def make_jobs(effort: Effort, prompts: int, seed: int) -> list[Job]:
    """The requests in the order in which they are sent."""
    dice = random.Random(seed)  # noqa: S311 -- a mixed order
    gone = round(effort.requests * effort.cancelled)
    kinds: list[Kind] = [*BAD] * effort.bad
    kinds += ["cancelled"] * gone
    kinds += ["whole"] * (effort.requests - gone)
    dice.shuffle(kinds)
    jobs = []
    for kind in kinds:
        tokens = effort.new_tokens if kind == "cancelled" else dice.randint(1, effort.new_tokens)
        jobs.append(Job(kind, dice.randrange(prompts), tokens, dice.randrange(effort.new_tokens)))
    return jobs


def soak(
    where: Endpoint, prompts: Sequence[Sequence[int]], jobs: Sequence[Job], at_once: int, room: int, tell: Callable[[int], None]
) -> Soaked:
    """Send `jobs`, `at_once` at a time. `room`: the most tokens the server takes; `tell` hears how many have ended."""
    found = Soaked()

    async def everything() -> None:
        waiting = iter(jobs)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=SILENCE_SECONDS, limits=limits, trust_env=False) as client:

            async def worker() -> None:
                for job in waiting:
                    try:
                        async with asyncio.timeout(SILENCE_SECONDS):
                            await _send(client, where, prompts[job.prompt], job, room, found)
                    except (httpx.HTTPError, OSError, StepFailed) as error:  # TimeoutError is an OSError
                        found.failures.append(f"{job.kind}: {str(error) or type(error).__name__}")
                    else:
                        found.done[job.kind] += 1
                    tell(found.done.total() + len(found.failures))

            await asyncio.gather(*(worker() for _ in range(at_once)))

    asyncio.run(everything())
    return found


async def _send(client: httpx.AsyncClient, where: Endpoint, prompt: Sequence[int], job: Job, room: int, found: Soaked) -> None:
    """Send one request. Raises StepFailed when the answer is not what this kind should get."""
    if job.kind in ("half sent", "unread"):
        await _drop(where, _body(where, prompt, job.tokens), whole=job.kind == "unread")
    elif job.kind in ("oversized", "bad JSON"):
        text = _body(where, [3] * (room + 1), job.tokens) if job.kind == "oversized" else _body(where, prompt, job.tokens)[:-9]
        headers = {"Content-Type": "application/json"}
        answer = await client.post(f"{where.url}/v1/completions", content=text, headers=headers)
        if answer.status_code not in REFUSALS:
            raise StepFailed(f"answered {answer.status_code}, not refused: {answer.text[:200]}")
    else:
        tokens = await _stream(client, where, prompt, job)
        if job.kind == "whole":
            if len(tokens) != job.tokens:
                raise StepFailed(f"{len(tokens)} tokens of {job.tokens}")
            found.answers.append((job, tuple(tokens)))


def _body(where: Endpoint, prompt: Sequence[int], tokens: int) -> bytes:
    asked = {"model": where.model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return json.dumps(asked | {"stream": True, "return_token_ids": True}).encode()


async def _stream(client: httpx.AsyncClient, where: Endpoint, prompt: Sequence[int], job: Job) -> list[int]:
    """The answer's tokens; a client that cancels leaves as soon as it has `job.stay` of them."""
    tokens: list[int] = []
    headers = {"Content-Type": "application/json"}
    async with client.stream(
        "POST", f"{where.url}/v1/completions", content=_body(where, prompt, job.tokens), headers=headers
    ) as answer:
        if answer.status_code != httpx.codes.OK:
            raise StepFailed(f"answered {answer.status_code}: {(await answer.aread()).decode('utf-8', 'replace')[:200]}")
        if job.kind == "cancelled" and not job.stay:
            return tokens
        async for line in answer.aiter_lines():
            tokens += token_ids(line, where.url)
            if job.kind == "cancelled" and len(tokens) >= job.stay:
                break
    return tokens


async def _drop(where: Endpoint, body: bytes, *, whole: bool) -> None:
    """Send half of a request, or a `whole` one whose answer nobody reads, and hang up."""
    url = httpx.URL(where.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    lines = ("POST /v1/completions HTTP/1.1", f"Host: {url.host}", "Content-Type: application/json", f"Content-Length: {len(body)}")
    writer.write("\r\n".join((*lines, "", "")).encode() + (body if whole else body[: len(body) // 2]))
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()


def compare(found: Soaked, alone: Sequence[Sequence[int]]) -> tuple[int, list[dict[str, Any]]]:
    """Return how many answers begin the one that was got alone, and where the others first differ from it."""
    equal, parted = 0, []
    for job, tokens in found.answers:
        wanted = alone[job.prompt][: len(tokens)]
        if list(tokens) == list(wanted):
            equal += 1
        else:
            at = next(i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b)
            parted.append({"prompt": job.prompt, "position": at, "tokens": len(tokens)})
    return equal, parted


def _get(url: str) -> tuple[int, str]:
    """Status (0: no answer) and text of a page."""
    try:
        answer = httpx.get(url, timeout=SILENCE_SECONDS, trust_env=False)
    except httpx.HTTPError:
        return 0, ""
    return answer.status_code, answer.text


def requests_left(url: str, limit: float = REST_SECONDS) -> int:
    """Requests that the server still runs or holds back, when there are none or `limit` seconds are over. -1: it does not say."""
    ends = time.monotonic() + limit
    while True:
        _, text = _get(f"{url}/metrics")
        lines = [one for one in text.splitlines() if one.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))]
        left = int(sum(float(one.rpartition(" ")[2]) for one in lines)) if lines else -1
        if left <= 0 or time.monotonic() > ends:
            return left
        time.sleep(0.2)


@dataclass(frozen=True)
class After:
    """What a soaked server is like. `alone`: the prompts' answers before; `again`: the first one's afterwards."""

    found: Soaked
    alone: list[tuple[int, ...]]
    again: tuple[int, ...]
    memory: dict[str, int]
    left: int
    health: int
    processes: int
    alive: int

    @property
    def growth(self) -> float:
        """Of the memory over the second half: in the first one the KV cache is still being filled."""
        return self.memory["after"] / max(self.memory["half-way"], 1) - 1.0  # 0 of a server that has died

    def wrongs(self) -> list[str]:
        """What is not as it should be, beside the answers."""
        said = {
            f"health answers {self.health}": self.health != httpx.codes.OK,
            f"requests running by /metrics: {self.left}": self.left != 0,
            f"memory grew by {100 * self.growth:.1f} % over the second half": self.growth > GROWTH,
            f"{self.alive} processes outlive the server": self.alive > 0,
            "afterwards the first prompt is answered otherwise": self.again != self.alone[0],
            f"{len(self.found.failures)} requests failed": bool(self.found.failures),
        }
        return [text for text, wrong in said.items() if wrong]


def serve_and_soak(wanted: Wanted, prompts: Sequence[Sequence[int]], jobs: Sequence[Job], effort: Effort) -> After:
    """Serve, ask every prompt alone, soak, look, end the server."""
    room, memory = target_dims(wanted.target).max_position_embeddings, dict[str, int]()
    with serving(wanted) as server:
        running = Running(Endpoint(wanted.url, wanted.name), wanted, server)
        processes = psutil.Process(server.pid).children(recursive=True)
        alone = [one.tokens for one in closed_loop(running.where, prompts, 1, effort.new_tokens, lambda: None)]
        memory["before"] = running.memory_bytes()

        def tell(ended: int) -> None:
            if ended == len(jobs) // 2:
                memory["half-way"] = running.memory_bytes()
            if ended % 100 == 0:
                say(f"soak: {ended} of {len(jobs)} requests")

        found = soak(running.where, prompts, jobs, effort.at_once, room, tell)
        left = requests_left(wanted.url)
        memory["after"] = running.memory_bytes()
        health, _ = _get(f"{wanted.url}/health")
        try:
            again = closed_loop(running.where, prompts[:1], 1, effort.new_tokens, lambda: None)[0].tokens
        except StepFailed:
            again = ()
    _, alive = psutil.wait_procs(processes, timeout=REST_SECONDS)
    return After(found, alone, again, memory, left, health, len(processes), len(alive))


def measure(run: Run, effort: Effort) -> Measured:
    """Soak the run's bundle; the share of whole answers that are equal, and all that was seen."""
    bundle = run.base / "bundle" / "bundle"
    if not bundle.is_dir():
        return Measured(None, [], "the run has no bundle", profile=run.profile)
    config = run.config.model_copy(update={
        "target": run.config.target.model_copy(update={"dtype": "float32"}),
        "vllm": run.config.vllm.model_copy(update={"kv_cache_gib": 1}),  # all of it is touched before the memory is compared
    })  # fmt: skip
    wanted = wanted_for("eagle31-pid", want(bundle, config, run.root), read_record(bundle), free_port())
    suite = run.suite("default").prompts
    prompts = [prompt for prompt in suite if len(prompt) <= effort.prompt_tokens][: effort.prompts]
    jobs = make_jobs(effort, len(prompts), run.seed)
    began = time.monotonic()
    after = serve_and_soak(wanted, prompts, jobs, effort)
    seconds = time.monotonic() - began
    equal, parted = compare(after.found, after.alone)
    if parted:
        model = load_target(wanted.target, "float32", "cpu", trust_remote_code=config.target.trust_remote_code)
        for miss in parted:
            alone = after.alone[miss["prompt"]]
            miss["logit_gap"] = logit_gap(model, [*prompts[miss["prompt"]], *alone[: miss["position"]]])
    rounding = sum(miss["logit_gap"] < GAP for miss in parted)
    sent = Counter(job.kind for job in jobs)
    about = {
        "engine": f"vLLM {wanted.build.version}", "method": describe("eagle31-pid", wanted.speculation), "dtype": "float32",
        "prompts": len(prompts), "max_new_tokens": effort.new_tokens, "at_once": effort.at_once, "seconds": round(seconds),
        "requests": dict(sorted(sent.items())), "as_they_should": dict(sorted(after.found.done.items())),
        "failures": after.found.failures[:20], "health_after": after.health, "requests_running_after": after.left,
        "memory_bytes": after.memory, "processes": after.processes, "processes_left": after.alive,
        "equal": equal, "rounding": rounding, "differences": parted,
    }  # fmt: skip
    why = after.wrongs()
    broken = bool(why)
    if rounding:
        why.append(f"{rounding} answers differ from some token on, where the top-2 logit gap is below {GAP:g}")
    return Measured(round(100 * (equal + rounding) / sent["whole"], 4), [about], "; ".join(why) or None, broken, run.profile)


FIGURES = (
    Figure(
        "F5.9", "1,000 requests, 32 at once, with bad clients, through the server: answers as when asked alone, fp32",
        "%", "==", 100.0, lambda: measure(find_run(), Effort()),
    ),
)  # fmt: skip
