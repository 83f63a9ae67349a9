"""Load: when requests arrive, and what the times of the answered ones say. Nothing here runs an engine.

All times are seconds on one clock. Quantiles are `eagle.bench.measure.quantile`: of n sorted values the one at rank
floor(share * n) + 1, at most n; a value that was measured, never one between two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle.bench.measure import quantile
from eagle.errors import ConfigError


def poisson_arrivals(rate_per_second: float, count: int, seed: int) -> list[float]:
    """Return `count` arrival times in seconds after the start, ascending, of a Poisson process with that rate.

    The gaps are independent and exponential with mean 1 / rate, the one before the first arrival included. One seed gives
    the same pattern at every rate, only stretched, so that rates and arms differ in nothing else. Raises ConfigError when
    the rate is not a positive finite number, ValueError when `count` is negative.
    """
    if not 0.0 < rate_per_second < math.inf:
        raise ConfigError(f"load: a rate of {rate_per_second:g} requests per second is impossible; give a positive number")
    if count < 0:
        raise ValueError("count must not be negative")
    rng = random.Random(seed)  # noqa: S311 - a load pattern, not a secret
    passed, arrivals = 0.0, []
    for _ in range(count):
        passed -= math.log1p(-rng.random())  # by inversion; 1 - u is never 0
        arrivals.append(passed / rate_per_second)
    return arrivals


@dataclass(frozen=True)
class RequestTimes:
    """One answered request: when it arrived, when its first and its last token were there, and how many tokens it got.

    Raises ValueError when the times are not in this order or not finite, or there is no token.
    """

    arrived: float
    first_token: float
    finished: float
    tokens: int

    def __post_init__(self) -> None:
        if not -math.inf < self.arrived <= self.first_token <= self.finished < math.inf or self.tokens < 1:
            raise ValueError(f"impossible times of a request: {self}")

    @property
    def ttft(self) -> float:
        """Time to first token in seconds; waiting for a place in the batch is part of it."""
        return self.first_token - self.arrived

    @property
    def itl(self) -> float | None:
        """Mean seconds per token after the first; None for an answer of one token.

        The mean, because a speculative round delivers several tokens at once: most single gaps would be zero.
        """
        return (self.finished - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def latency(self) -> float:
        """Seconds from arrival to the last token."""
        return self.finished - self.arrived


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count for goodput (its SLO), in seconds: both limits, each inclusive."""

    ttft: float
    itl: float

    def met_by(self, request: RequestTimes) -> bool:
        """Say whether the request kept both limits; an answer of one token has no ITL to keep."""
        return request.ttft <= self.ttft and (request.itl is None or request.itl <= self.itl)


@dataclass(frozen=True)
class LoadPoint:
    """One arm at one arrival rate.

    `rate` is the rate asked for, requests per second; `seconds` runs from the first arrival to the last token. Times are in
    milliseconds (`itl_*` over requests with two tokens or more, 0.0 when there is none). `good` requests met both limits;
    `goodput` is their number per second, `good_tokens_per_second` their tokens. `tokens_per_second` counts all requests.
    """

    rate: float
    requests: int
    seconds: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    itl_ms_p50: float
    itl_ms_p95: float
    latency_ms_p50: float
    latency_ms_p95: float
    tokens_per_second: float
    good: int
    goodput: float
    good_tokens_per_second: float


def load_point(rate: float, requests: Sequence[RequestTimes], limits: Limits) -> LoadPoint:
    """Return the figures of one run with arrivals at `rate` (requests per second), in any order of the requests.

    Raises ValueError when there is no request, or no time passed.
    """
    if not requests:
        raise ValueError("no request was answered")
    seconds = max(r.finished for r in requests) - min(r.arrived for r in requests)
    if seconds <= 0.0:
        raise ValueError("no time passed between the first arrival and the last token")
    ttft = [1e3 * r.ttft for r in requests]
    itl = [1e3 * r.itl for r in requests if r.itl is not None]
    latency = [1e3 * r.latency for r in requests]
    good = [r for r in requests if limits.met_by(r)]
    return LoadPoint(
        rate=rate, requests=len(requests), seconds=seconds,
        ttft_ms_p50=quantile(ttft, 0.5), ttft_ms_p95=quantile(ttft, 0.95),
        itl_ms_p50=quantile(itl, 0.5), itl_ms_p95=quantile(itl, 0.95),
        latency_ms_p50=quantile(latency, 0.5), latency_ms_p95=quantile(latency, 0.95),
        tokens_per_second=sum(r.tokens for r in requests) / seconds,
        good=len(good), goodput=len(good) / seconds, good_tokens_per_second=sum(r.tokens for r in good) / seconds,
    )  # fmt: skip


@dataclass(frozen=True)
class LoadResult:
    """One arm (for example 'none' or 'Eagle 3.1') over the arrival rates, all under the same limits."""

    arm: str
    limits: Limits
    points: tuple[LoadPoint, ...]

    def rows(self, base: LoadResult | None = None) -> list[dict[str, Any]]:
        """Return one row of bench.json per rate; with `base`, the arm without speculation, also ratios to its point.

        `ttft_ratio` (p50; below 1 is faster), `latency_ratio` (p50) and `goodput_ratio` (above 1 is better); each is None
        where the base's value is 0. Raises ValueError when `base` has other limits or lacks one of the rates.
        """
        found = []
        bases = {} if base is None else {point.rate: point for point in base.points}
        if base is not None and (base.limits != self.limits or not {p.rate for p in self.points} <= bases.keys()):
            raise ValueError(f"'{self.arm}' and '{base.arm}' were not measured under the same limits and rates")
        for point in self.points:
            row: dict[str, Any] = {"arm": self.arm, **asdict(point)}
            if base is not None:
                other = bases[point.rate]
                row["ttft_ratio"] = _ratio(point.ttft_ms_p50, other.ttft_ms_p50)
                row["latency_ratio"] = _ratio(point.latency_ms_p50, other.latency_ms_p50)
                row["goodput_ratio"] = _ratio(point.goodput, other.goodput)
            found.append(row)
        return found


def _ratio(value: float, base: float) -> float | None:
    return value / base if base else None
