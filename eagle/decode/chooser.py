"""Batch-sequential verification, and when it pays: drafts are verified chunk by chunk, and only while all pass.

A round of K drafts feeds K + 1 tokens to the target: the pending token, then the drafts. With chunk width w a pass feeds
w of them for each row that is still alive and decides w drafts (logit i decides draft i + 1). A row goes on only if all
were accepted, so it takes at most ceil((K + 1) / w) passes. What a chunk decides does not depend on later chunks, so the
output is the same as in one pass.

When it wins. Let a pass of n tokens cost F + c n. Two chunks instead of one pass save the tokens of the rows that are out
after the first, and pay another F whenever any row is alive; in the mean over b rows chunking wins iff

    c b (K + 1 - w) (1 - S_w) > F (1 - (1 - S_w)^b)

which for many rows is c b (K - m)(1 - S_m) > F' with m = w - 1 drafts in the first chunk, but for S_w in the place of
S_m: the chunk's last logit judges one draft more than the chunk holds. Dense targets that are bound by their weights
(large F / c) do not satisfy it below some hundred tokens per pass; the option set therefore contains the single pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle.decode.control import ControlSettings, Plan, ProbeSchedule, batch_bucket
from eagle.decode.cost import CostTable
from eagle.decode.intake import QUIET, Intake, Traffic

CHUNKS = (1, 2, 3, 4, 6)


@dataclass
class _Bucket:
    """What belongs to a range of batches: the plan in force and the probes while it is K = 0."""

    probe: ProbeSchedule
    plan: Plan = Plan(0)


class Chooser:
    """Chooses K and the chunk width together: the most expected tokens per second over a grid with the single pass in it.

    The grid is K = 0 .. max (of the settings and of `costs`) times one pass and each of `chunks` that splits K + 1 tokens.
    `carry_over` says which form the engine runs: synchronous passes within a round (False), or chunks of rows that are alive
    travelling with the next round's first chunks of the others (True). The plan in force, one for each batch bucket (powers
    of two), is replaced when another promises 2 % more (`settings.speculation_margin`). While it is K = 0, K = 1
    is probed as `PidController` does. Raises ValueError for a chunk width below 1.
    """

    def __init__(
        self,
        costs: CostTable,
        settings: ControlSettings | None = None,
        *,
        chunks: Sequence[int] = CHUNKS,
        carry_over: bool = False,
    ) -> None:
        if any(width < 1 for width in chunks):
            raise ValueError(f"chunk widths start at 1, not {list(chunks)}")
        self._costs, self._carry_over = costs, carry_over
        self._settings = settings or ControlSettings()
        longest = min(self._settings.max_tokens, costs.max_length)
        self._model = self._settings.estimator(longest)
        self._options = [Plan(k) for k in range(longest + 1)]
        self._options += [Plan(k, width) for k in range(1, longest + 1) for width in sorted(set(chunks)) if width <= k]
        self._intake = Intake()
        self._buckets: dict[int, _Bucket] = {}

    @property
    def options(self) -> Sequence[Plan]:
        """The grid, single passes first."""
        return tuple(self._options)

    @property
    def survival(self) -> Sequence[float]:
        """The present estimate of S_1 .. S_max."""
        return self._model.survival

    def expected_rate(self, batch: int, plan: Plan) -> float:
        """Expected tokens per second of `batch` requests under `plan`, by the present estimate and the cost table."""
        seconds_of = self._costs.carry_seconds if self._carry_over else self._costs.round_seconds
        seconds, tau = seconds_of(batch, plan.length, plan.chunk, self._model.survival), self._model.tau(plan.length)
        if plan.length:
            seconds += self._intake.seconds(batch, tau, on=self._bucket(batch).plan.length > 0)
        return batch * tau / seconds

    def plan(self, batch: int) -> Plan:
        """The next round's plan for `batch` requests. Raises ValueError for `batch` < 1."""
        bucket = self._bucket(batch)
        chosen = self._choose(batch, bucket)
        return self._settings.probe(batch) if chosen.length == 0 and bucket.probe.probing and len(self._options) > 1 else chosen

    def observe(self, batch: int, plan: Plan, accepted: Sequence[int], traffic: Traffic = QUIET) -> None:
        """Learn from a round. Raises ValueError for counts that do not fit `plan` or `batch`."""
        bucket = self._bucket(batch)
        if plan.length == 0:
            self._model.rest(bucket.probe.burst(batch))
            bucket.probe.rest(batch)
            self._intake.learn(traffic, batch)
            return
        if not 0 < len(accepted) <= batch:
            raise ValueError(f"{len(accepted)} accepted counts for a batch of {batch}")
        probing = bucket.plan.length == 0
        self._model.observe(plan.length, accepted)
        self._intake.learn(traffic, batch + sum(accepted))
        if probing and not self._model.surprised and self._choose(batch, bucket).length == 0:
            bucket.probe.failed(batch, self._costs, self._model.survival[0], self._intake.per_request)

    def _bucket(self, batch: int) -> _Bucket:
        key = batch_bucket(batch)
        if key not in self._buckets:
            self._buckets[key] = _Bucket(ProbeSchedule(self._settings))
            if not self._model.evidence:
                self._buckets[key].probe.begin(batch)
        return self._buckets[key]

    def _choose(self, batch: int, bucket: _Bucket) -> Plan:
        rates = {option: self.expected_rate(batch, option) for option in self._options}
        best = max(self._options, key=rates.__getitem__)
        if rates[best] > rates[bucket.plan] * (1.0 + self._settings.speculation_margin):
            if bucket.plan.length == 0:
                bucket.probe.reset()
            bucket.plan = best
        return bucket.plan
