"""Poisson arrivals, and the figures of a load run from the times of its requests."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.bench.arrivals import Limits, LoadResult, RequestTimes, load_point, poisson_arrivals
from eagle.bench.measure import quantile
from eagle.errors import ConfigError

LIMITS = Limits(ttft=0.5, itl=0.125)  # exact in binary: the limit itself can be tested


def test_gaps_are_exponential() -> None:
    count, rate = 20_000, 4.0
    arrivals = poisson_arrivals(rate, count, seed=3)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *arrivals])]
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(1 / rate, rel=4 / math.sqrt(count))
    # Kolmogorov-Smirnov distance to 1 - exp(-rate x); 1.63 / sqrt(n) is its 1 % point.
    ordered = sorted(1 - math.exp(-rate * gap) for gap in gaps)
    assert max(abs(value - (at + 0.5) / count) for at, value in enumerate(ordered)) < 1.63 / math.sqrt(count)
    # The number of arrivals in windows of equal length has a variance equal to its mean.
    hits = [0] * int(arrivals[-1])
    for at in arrivals:
        if at < len(hits):
            hits[int(at)] += 1
    assert statistics.pvariance(hits) / statistics.fmean(hits) == pytest.approx(1.0, abs=0.1)


def test_arrivals_follow_the_seed() -> None:
    one = poisson_arrivals(2.0, 50, seed=1)
    assert one == poisson_arrivals(2.0, 50, seed=1)
    assert one != poisson_arrivals(2.0, 50, seed=2)
    assert one[:20] == poisson_arrivals(2.0, 20, seed=1)
    assert poisson_arrivals(4.0, 50, seed=1) == pytest.approx([at / 2 for at in one])
    assert poisson_arrivals(2.0, 0, seed=1) == []


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        poisson_arrivals(rate, 5, seed=0)


def test_negative_count() -> None:
    with pytest.raises(ValueError, match="count"):
        poisson_arrivals(1.0, -1, seed=0)


def test_times_of_a_request() -> None:
    request = RequestTimes(arrived=10.0, first_token=10.5, finished=12.5, tokens=5)
    assert (request.ttft, request.itl, request.latency) == (0.5, 0.5, 2.5)
    assert RequestTimes(1.0, 2.0, 2.0, 1).itl is None


@pytest.mark.parametrize(
    "times", [(2.0, 1.0, 3.0, 4), (0.0, 3.0, 2.0, 4), (0.0, 1.0, 2.0, 0), (0.0, math.nan, 2.0, 4), (0.0, 1.0, math.inf, 4)]
)
def test_impossible_times(times: tuple[float, float, float, int]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        RequestTimes(*times)


def test_limits_are_inclusive_and_both_count() -> None:
    assert LIMITS.met_by(RequestTimes(0.0, 0.5, 0.5 + 0.125 * 4, 5))
    assert not LIMITS.met_by(RequestTimes(0.0, 0.51, 0.6, 5)), "late first token"
    assert not LIMITS.met_by(RequestTimes(0.0, 0.1, 0.9, 5)), "slow after it"
    assert LIMITS.met_by(RequestTimes(0.0, 0.5, 0.5, 1)), "one token has no gap"


def test_point_by_hand() -> None:
    requests = [
        RequestTimes(1.0, 1.2, 1.6, 9),  # TTFT 200 ms, ITL 50 ms
        RequestTimes(2.0, 2.4, 4.0, 9),  # TTFT 400 ms, ITL 200 ms: misses the ITL limit
        RequestTimes(2.5, 3.5, 3.5, 1),  # TTFT 1 s: misses the TTFT limit, no ITL
        RequestTimes(4.0, 4.1, 5.0, 11),  # TTFT 100 ms, ITL 90 ms
    ]
    point = load_point(0.8, requests, LIMITS)
    assert point == load_point(0.8, requests[::-1], LIMITS)
    assert (point.rate, point.requests, point.seconds) == (0.8, 4, 4.0)
    assert (point.ttft_ms_p50, point.ttft_ms_p95) == pytest.approx((400.0, 1000.0))
    assert (point.itl_ms_p50, point.itl_ms_p95) == pytest.approx((90.0, 200.0))
    assert (point.latency_ms_p50, point.latency_ms_p95) == pytest.approx((1000.0, 2000.0))
    assert (point.good, point.goodput) == (2, 0.5)
    assert point.tokens_per_second == pytest.approx(30 / 4)
    assert point.good_tokens_per_second == pytest.approx(20 / 4)


def test_answers_of_one_token_have_no_itl() -> None:
    point = load_point(1.0, [RequestTimes(0.0, 0.1, 0.1, 1)], LIMITS)
    assert (point.itl_ms_p50, point.itl_ms_p95, point.good) == (0.0, 0.0, 1)


def test_no_requests_or_no_time() -> None:
    with pytest.raises(ValueError, match="no request"):
        load_point(1.0, [], LIMITS)
    with pytest.raises(ValueError, match="no time"):
        load_point(1.0, [RequestTimes(1.0, 1.0, 1.0, 1)], LIMITS)


SPANS = st.floats(0.001, 100.0)


@given(st.lists(st.tuples(SPANS, SPANS, SPANS, st.integers(1, 50)), min_size=1, max_size=30), SPANS, SPANS)
def test_bounds_hold_for_any_times(spans: list[tuple[float, float, float, int]], ttft: float, itl: float) -> None:
    requests = [RequestTimes(a, a + b, a + b + c, n) for a, b, c, n in spans]
    point = load_point(1.0, requests, Limits(ttft, itl))
    assert point.ttft_ms_p50 <= point.ttft_ms_p95 <= 1e3 * max(r.ttft for r in requests)
    assert point.ttft_ms_p50 in [1e3 * r.ttft for r in requests], "a measured value, not an interpolated one"
    assert point.latency_ms_p50 == quantile([1e3 * r.latency for r in requests], 0.5)
    assert 0 <= point.good <= len(requests)
    assert point.good_tokens_per_second <= point.tokens_per_second
    assert load_point(1.0, requests, Limits(2 * ttft, 2 * itl)).good >= point.good
    assert load_point(1.0, requests, Limits(math.inf, math.inf)).good == len(requests)


def test_ratios_to_the_base() -> None:
    def arm(name: str, speed: float, rates: tuple[float, ...] = (1.0, 2.0)) -> LoadResult:
        times = [RequestTimes(float(n), n + 0.4 * speed, n + 0.4 * speed + 0.8 * speed, 9) for n in range(4)]
        return LoadResult(name, LIMITS, tuple(load_point(rate, times, LIMITS) for rate in rates))

    none, drafted, slow = arm("none", 1.0), arm("Eagle 3.1", 0.5), arm("slow", 3.0)
    rows = drafted.rows(none)
    assert [(row["arm"], row["rate"]) for row in rows] == [("Eagle 3.1", 1.0), ("Eagle 3.1", 2.0)]
    assert rows[0]["ttft_ratio"] == pytest.approx(0.5)
    assert rows[0]["latency_ratio"] == pytest.approx(0.5)
    assert rows[0]["goodput_ratio"] == pytest.approx(4.2 / 3.6)
    assert drafted.rows(slow)[0]["goodput_ratio"] is None, "nothing of the base was good"
    assert "ttft_ratio" not in none.rows()[0]
    assert drafted.rows(arm("none", 1.0, (2.0, 1.0))) == rows, "joined by rate, not by place"
    with pytest.raises(ValueError, match="same limits and rates"):
        drafted.rows(arm("none", 1.0, (1.0,)))
    with pytest.raises(ValueError, match="same limits and rates"):
        drafted.rows(LoadResult("none", Limits(1.0, 1.0), none.points))
