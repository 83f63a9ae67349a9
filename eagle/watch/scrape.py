"""One look at a vLLM server's Prometheus page: its speculation counters, per engine.

vLLM (v1/spec_decode/metrics.py) exports `vllm:spec_decode_num_drafts_total`, `_num_draft_tokens_total`,
`_num_accepted_tokens_total` and, with a label `position` from "0" on, `_num_accepted_tokens_per_pos_total`, each with
the labels `model_name` and `engine`; and `vllm:request_success_total` by `finished_reason` (v1/metrics/loggers.py) for all
requests that ended. They grow from the server's start on and begin at zero when it starts again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import BaseModel, ConfigDict

from eagle.errors import ConfigError, EagleError

PREFIX = "vllm:spec_decode_"
DRAFTS, DRAFT_TOKENS, ACCEPTED, BY_POSITION = (
    f"{PREFIX}num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
FINISHED = "vllm:request_success"
MAX_BYTES = 64 << 20
MOST, MOST_POSITIONS = 2.0**53, 256  # beyond: counters of something else


class Unreachable(EagleError):
    """The server gave no page of metrics: it is down, starting, or does not answer in time."""

    exit_code = 12


class NoCounters(ConfigError):
    """The page is there and tells nothing of speculation."""


class EngineCounters(BaseModel):
    """Counters of one engine since it started. `by_position[i]`: drafts whose token i was accepted, and so all before it.

    `requests`: those that ended, for whatever reason. `created`: the engine's start as the page tells it, Unix seconds; 0
    when it does not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafts: int
    draft_tokens: int
    accepted: int
    requests: int
    by_position: tuple[int, ...]
    created: float = 0.0


def metrics_url(url: str) -> str:
    """Return the address of the metrics page of a server: `URL/metrics`, unless the path names a page already.

    Raises ConfigError for what is no http address.
    """
    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"watch: '{url}' is no address ({error}); give the server's, for example http://127.0.0.1:8000") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"watch: '{url}' is no http address; give the server's, for example http://127.0.0.1:8000")
    path = parsed.path.rstrip("/")
    if path in ("", "/v1"):
        parsed = parsed.copy_with(path="/metrics")
    return str(parsed)


def fetch(url: str, timeout: float) -> str:
    """Return the text of a metrics page. Unreachable says why there is none; `timeout` in seconds bounds each part of it."""
    try:
        # No proxy from the environment: the server is named by the user and is mostly on this machine.
        with httpx.Client(timeout=timeout, trust_env=False, follow_redirects=True) as client, client.stream("GET", url) as answer:
            if answer.status_code != httpx.codes.OK:
                raise Unreachable(f"watch: {url} answers {answer.status_code} {answer.reason_phrase}")
            parts, size = [], 0
            for part in answer.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_BYTES:
                    raise NoCounters(f"watch: {url} sends more than {MAX_BYTES >> 20} MiB: this is no page of metrics")
    except httpx.HTTPError as error:
        raise Unreachable(f"watch: {url} is not reachable ({str(error) or type(error).__name__})") from None
    return b"".join(parts).decode("utf-8", "replace")


def parse(text: str, url: str) -> dict[str, EngineCounters]:
    """Return the speculation counters of a metrics page, by engine ("model_name/engine").

    Raises NoCounters when it holds none (no vLLM, or one that does not speculate), or they are not Prometheus text.
    """
    lines = "".join(f"{line}\n" for line in text.splitlines() if PREFIX in line or FINISHED in line)
    try:
        samples = [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
        found = _by_engine(samples)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise NoCounters(f"watch: {url}: its speculation counters cannot be read ({error!r})") from None
    if not found:
        raise NoCounters(
            f"watch: {url} has no {DRAFTS}_total: it is no vLLM server, or one without --speculative-config, "
            "or with --disable-log-stats"
        )
    return found


def _by_engine(samples: Iterable[Sample]) -> dict[str, EngineCounters]:
    values: dict[str, dict[str, float]] = defaultdict(dict)
    positions: dict[str, dict[int, int]] = defaultdict(dict)
    for sample in samples:
        if not 0.0 <= sample.value <= MOST:  # NaN is not, either
            raise ValueError(f"{sample.name} is {sample.value}")
        engine = f"{sample.labels.get('model_name', '')}/{sample.labels.get('engine', '0')}"
        if sample.name == f"{BY_POSITION}_total":
            at = int(sample.labels["position"])
            if not 0 <= at < MOST_POSITIONS:
                raise ValueError(f"{sample.name} has position {at}")
            positions[engine][at] = int(sample.value)
        elif sample.name == f"{FINISHED}_total":
            values[engine][sample.name] = values[engine].get(sample.name, 0.0) + sample.value
        else:
            values[engine][sample.name] = sample.value
    return {
        engine: EngineCounters(
            drafts=int(found[f"{DRAFTS}_total"]),
            draft_tokens=int(found[f"{DRAFT_TOKENS}_total"]),
            accepted=int(found[f"{ACCEPTED}_total"]),
            requests=int(found[f"{FINISHED}_total"]),
            by_position=tuple(positions[engine].get(at, 0) for at in range(max(positions[engine], default=-1) + 1)),
            created=found.get(f"{DRAFTS}_created", 0.0),
        )
        for engine, found in values.items()
        if f"{DRAFTS}_total" in found
    }
