"""What a round costs in this server, learnt from the rounds themselves.

vLLM's rounds are timed from one output to the next. Only steady ones count: every request verifies K drafts and K are
drafted again, no prompt in between. A few draft lengths are tried on purpose when a batch size is new, and seldom again
later, because a length that is never used would keep its first cost for ever.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle.decode.control import batch_bucket
from eagle.decode.cost import CostTable

DRAFT_SHARE = 0.15  # of a round without drafts, per draft token: the shape assumed before anything was timed
CURVE_ROUNDS = 8


@dataclass
class _Bucket:
    """What is known of a range of batches: samples by draft length, and what is still to be tried."""

    samples: dict[int, deque[float]] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)  # draft length -> rounds that may still be spent on it
    seen: dict[int, int] = field(default_factory=dict)  # draft length -> the round it was last timed in
    stale: set[int] = field(default_factory=set)  # draft lengths whose samples give way to the next one
    rounds: int = 0
    curve: list[float] = field(default_factory=list)


class LearntCosts:
    """Seconds of a round by batch bucket (powers of two) and draft length; satisfies `eagle.decode.cost.RoundCosts`.

    `prior` gives the shape before anything was timed, else a line with `DRAFT_SHARE` per draft. A measured length stands
    for itself (median of the last `memory` samples); between measured lengths the ratio of measured to assumed seconds is
    interpolated. `samples`: rounds timed in a trial. `refresh`: rounds after which a length that was not used is tried again.
    Raises ValueError for `longest` < 1 or sizes below 1.
    """

    def __init__(
        self, longest: int, prior: CostTable | None = None, *, samples: int = 3, memory: int = 15, refresh: int = 4096
    ) -> None:
        if min(longest, samples, memory, refresh) < 1:
            raise ValueError("the longest draft, samples, memory and refresh must be at least 1")
        self.max_length = longest
        self._prior, self._samples, self._memory, self._refresh = prior, samples, memory, refresh
        self._trials = sorted({0, 1, (longest + 1) // 2, longest})
        self._buckets: dict[int, _Bucket] = {}

    def trial(self, batch: int, survival: Sequence[float] = ()) -> int | None:
        """A draft length that should be timed now, or None. Asking spends one of the rounds that the trial may take.

        The shortest is tried first. With `survival` = S_1, S_2, .. a length is not tried while it could not win even if it
        cost no more than the shorter ones that were timed.
        """
        bucket = self._bucket(batch)
        bucket.rounds += 1
        for length in self._trials:
            left = bucket.due.get(length, 0)
            if left:
                if survival and self._hopeless(bucket, length, survival):
                    continue
                bucket.due[length] = left - 1
                return length
            if bucket.rounds - bucket.seen[length] > self._refresh:
                bucket.due[length], bucket.seen[length] = self._limit, bucket.rounds
                bucket.stale.add(length)
        return None

    def add(self, batch: int, length: int, seconds: float) -> None:
        """Take in a steady round of `batch` requests with `length` drafts each."""
        bucket = self._bucket(batch)
        found = bucket.samples.setdefault(length, deque(maxlen=self._memory))
        if length in bucket.stale:
            bucket.stale.remove(length)
            found.clear()
        found.append(seconds)
        bucket.seen[length] = bucket.rounds
        if len(found) >= self._samples and bucket.due.get(length):
            bucket.due[length] = 0
        if len(found) <= self._samples or bucket.rounds % CURVE_ROUNDS == 0:  # a median of many moves slowly
            bucket.curve = self._curve(batch, bucket)

    def _hopeless(self, bucket: _Bucket, length: int, survival: Sequence[float]) -> bool:
        timed = [k for k in bucket.samples if k < length]
        if not timed:
            return False
        best = max((1.0 + sum(survival[:k])) / bucket.curve[k] for k in timed)
        return (1.0 + sum(survival[:length])) / bucket.curve[max(timed)] <= best

    @property
    def _limit(self) -> int:
        return 4 * self._samples  # prompts and ends of requests spoil rounds: a trial does not wait for ever

    def round_seconds(self, batch: int, length: int) -> float:
        """Expected seconds of a round; in units of a round without drafts where nothing is known of the batch."""
        curve = self._bucket(batch).curve
        return curve[min(length, self.max_length)]

    def target_seconds(self, batch: float, width: float) -> float:
        """The whole round with `width` - 1 drafts: from outside, its parts cannot be told apart."""
        return self.round_seconds(max(int(batch), 1), int(width) - 1)

    def draft_seconds(self, batch: float, length: int) -> float:
        """0: contained in `target_seconds`."""
        return 0.0

    def measured(self, batch: int) -> dict[int, float]:
        """Median seconds by draft length, of those that were timed at this batch's bucket."""
        return {length: statistics.median(found) for length, found in sorted(self._bucket(batch).samples.items())}

    def _bucket(self, batch: int) -> _Bucket:
        key = batch_bucket(batch)
        found = self._buckets.get(key)
        if found is None:
            found = self._buckets[key] = _Bucket(
                due=dict.fromkeys(self._trials, self._limit), seen=dict.fromkeys(self._trials, 0)
            )
            found.curve = self._curve(batch, found)
        return found

    def _assumed(self, batch: int, length: int) -> float:
        return 1.0 + DRAFT_SHARE * length if self._prior is None else self._prior.round_seconds(batch, length)

    def _curve(self, batch: int, bucket: _Bucket) -> list[float]:
        """Seconds of 0 .. longest drafts, never falling."""
        assumed = [self._assumed(batch, length) for length in range(self.max_length + 1)]
        known = sorted((k, statistics.median(found) / assumed[k]) for k, found in bucket.samples.items())
        curve, highest = [], 0.0
        for length, shape in enumerate(assumed):
            highest = max(highest, shape * _between(known, length))
            curve.append(highest)
        return curve


def _between(points: list[tuple[int, float]], x: int) -> float:
    """Piecewise linear through `points`, flat beyond their ends; 1 without points."""
    if not points:
        return 1.0
    before = [point for point in points if point[0] <= x]
    after = [point for point in points if point[0] >= x]
    if not before or not after:
        return (before[-1] if before else after[0])[1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 if x0 == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
