"""A client of vLLM's OpenAI API that keeps times and token ids: a fixed number of requests at once, or Poisson arrivals.

Every request is a streamed completion of token ids, greedy, of exactly `max_tokens` tokens (stop tokens are ignored), so
that all arms have the same work. Times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from eagle.bench.arrivals import RequestTimes
from eagle.errors import StepFailed

SILENCE_SECONDS = 600.0  # longest wait for a next piece of an answer


@dataclass(frozen=True)
class Answered:
    """One answer: its times and its new token ids."""

    times: RequestTimes
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Endpoint:
    """A server and the name of the model that it serves."""

    url: str
    model: str


def closed_loop(
    where: Endpoint, prompts: Sequence[Sequence[int]], concurrency: int, max_tokens: int, done: Callable[[], None]
) -> list[Answered]:
    """Send all prompts, `concurrency` at a time, the next one as soon as one is answered; answers in the prompts' order.

    Raises StepFailed when the server refuses a request, breaks off, or answers too few tokens.
    """

    async def everything(client: httpx.AsyncClient) -> list[Answered]:
        found: dict[int, Answered] = {}
        waiting = iter(enumerate(prompts))

        async def worker() -> None:
            for index, prompt in waiting:
                found[index] = await _ask(client, where, prompt, max_tokens)
                done()

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return [found[index] for index in range(len(prompts))]

    return asyncio.run(_with_client(everything))


def open_loop(
    where: Endpoint, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], max_tokens: int, done: Callable[[], None]
) -> list[Answered]:
    """Send prompt i `arrivals[i]` seconds after the start, whatever is still unanswered. A request's arrival is when it was due.

    Raises StepFailed as `closed_loop`.
    """

    async def everything(client: httpx.AsyncClient) -> list[Answered]:
        began = time.perf_counter()

        async def one(prompt: Sequence[int], at: float) -> Answered:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            answered = await _ask(client, where, prompt, max_tokens, due=began + at)
            done()
            return answered

        return list(await asyncio.gather(*(one(prompt, at) for prompt, at in zip(prompts, arrivals, strict=True))))

    return asyncio.run(_with_client(everything))


async def _with_client(work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, list[Answered]]]) -> list[Answered]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=SILENCE_SECONDS, limits=limits, trust_env=False) as client:
        return await work(client)


async def _ask(
    client: httpx.AsyncClient, where: Endpoint, prompt: Sequence[int], max_tokens: int, due: float | None = None
) -> Answered:
    body = {
        "model": where.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    arrived = time.perf_counter() if due is None else due
    first, tokens = 0.0, list[int]()
    try:
        async with client.stream("POST", f"{where.url}/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                said = (await answer.aread()).decode("utf-8", "replace")[:300]
                raise StepFailed(f"bench: {where.url} answers {answer.status_code}: {said}")
            async for line in answer.aiter_lines():
                new = token_ids(line, where.url)
                if new and not tokens:
                    first = time.perf_counter()
                tokens += new
    except httpx.HTTPError as error:
        raise StepFailed(f"bench: {where.url}: the answer broke off ({str(error) or type(error).__name__})") from None
    if len(tokens) != max_tokens:
        raise StepFailed(f"bench: {where.url} answered {len(tokens)} tokens of {max_tokens}")
    return Answered(RequestTimes(arrived, first, time.perf_counter(), len(tokens)), tuple(tokens))


def token_ids(line: str, url: str) -> list[int]:
    """Return the new token ids of one line of the event stream; none for its other lines."""
    content = line.removeprefix("data:").strip()
    if not line.startswith("data:") or content == "[DONE]":
        return []
    try:
        event = json.loads(content)
    except ValueError:
        raise StepFailed(f"bench: {url} sends what is no JSON: {content[:200]}") from None
    if "error" in event:
        raise StepFailed(f"bench: {url} says: {event['error']}")
    found: list[int] = []
    for choice in event.get("choices", ()):
        if choice.get("text") and choice.get("token_ids") is None:
            raise StepFailed(f"bench: {url} gives no token ids; its vLLM does not know return_token_ids")
        found += choice.get("token_ids") or []
    return found
