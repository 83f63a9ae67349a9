"""How many tokens to draft next: the speculation length K, chosen round by round from what was accepted before.

Only history decides, never the tokens of the round itself, so verification stays lossless (DSpark, arXiv 2607.05147,
appendix A). The controller has two parts. The feed-forward maximises expected tokens per second over K, from learnt
survival (`eagle.decode.survival`) and measured costs (`eagle.decode.cost`). A PID trim of at most a token corrects it
while the recent hit rate is not what the survival says: it reacts within rounds, the survival remembers tens of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eagle.decode.cost import RoundCosts
from eagle.decode.intake import QUIET, Intake, Traffic
from eagle.decode.survival import SurvivalEstimator


@dataclass(frozen=True)
class Plan:
    """A round to come: `length` draft tokens K (0 = no speculation), fed to the target `chunk` at a time (0 = one pass).

    `rows`: how many requests are drafted for, 0 = all. The others get their one token: a probe need not cost all of them.
    """

    length: int
    chunk: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        if self.length < 0 or self.chunk < 0 or self.rows < 0:
            raise ValueError(f"no round has {self.length} draft tokens and chunk {self.chunk}")


class LengthPolicy(Protocol):
    """Chooses each round's plan for the whole batch."""

    def plan(self, batch: int) -> Plan:
        """The next round's plan for `batch` requests. Asking twice gives the same answer."""

    def observe(self, batch: int, plan: Plan, accepted: Sequence[int], traffic: Traffic = QUIET) -> None:
        """Tell a round's outcome: the accepted draft tokens of each request that was drafted for; empty when K was 0.

        `traffic`: requests that ended and prompts that the draft took in; their seconds are not in the cost table.
        """


@dataclass(frozen=True)
class ControlSettings:
    """Settings of `PidController` and `Chooser`. Raises ValueError for a value out of range.

    `max_tokens`: largest K. `memory`: rounds the survival estimate remembers. `prior_acceptance`: per-token acceptance
    before any evidence; `prior_weight`: drafts of evidence that it, and the extrapolation from shallower positions, is worth.

    `beta`: smoothing factor of the hit rate, the PID's measured variable. `kp`, `ki`, `kd`: gains, draft tokens per unit
    of hit rate. `trim_limit`: bound of the trim and of its integrator, draft tokens. `back_calculation`: share of the
    clipped output taken from the integrator each round; `leak`: share of the integrator lost each round, while the survival
    estimate takes over what it stood for. `dead_band`: the whole-token trim moves only when the real-valued one is further
    than this from it, tokens. `surprise`: when the filtered hit rate is this many standard deviations of its own noise from
    the expected one, the survival estimate forgets with a memory of `surprise_memory` rounds.

    `length_margin`: another K must promise this much more tokens/s (relative) to replace the present one;
    `speculation_margin`: the same for switching speculation on or off. `probe_every`: rounds without speculation before
    K = 1 is tried again, doubled with each probe that fails, until probes are expected to cost no more than `probe_budget`
    of the time, and at most to `probe_limit`. `probe_drafts`: drafts (requests * rounds) in a probe; at least one round.
    `trace_rounds`: rounds kept in the trace.
    """

    max_tokens: int = 8
    memory: float = 32.0
    prior_acceptance: float = 0.5
    prior_weight: float = 6.0
    beta: float = 0.2
    kp: float = 2.0
    ki: float = 0.15
    kd: float = 0.5
    trim_limit: float = 1.0
    back_calculation: float = 0.3
    leak: float = 0.1
    dead_band: float = 0.75
    surprise: float = 1.7
    surprise_memory: float = 4.0
    length_margin: float = 0.01
    speculation_margin: float = 0.02
    probe_every: int = 5
    probe_limit: int = 512
    probe_budget: float = 0.015
    probe_drafts: int = 4
    trace_rounds: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_tokens", "kp", "ki", "kd", "trim_limit", "length_margin", "speculation_margin"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number, 0 or more")
        for name in ("prior_acceptance", "back_calculation", "leak"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in [0, 1]")
        for name in ("beta", "probe_budget"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in (0, 1]")
        for name in ("prior_weight", "surprise"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and above 0")
        for name in ("memory", "surprise_memory", "probe_every", "probe_limit", "probe_drafts", "trace_rounds"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 1")
        if not 0.5 <= self.dead_band < 1.0:
            raise ValueError("dead_band must be in [0.5, 1)")
        if self.probe_limit < self.probe_every:
            raise ValueError("probe_limit must be at least probe_every")

    def probe(self, batch: int) -> Plan:
        """A round that asks whether speculation would pay: K = 1 for as many requests as the evidence needs."""
        return Plan(1, rows=self.probe_drafts if self.probe_drafts < batch else 0)

    def estimator(self, positions: int) -> SurvivalEstimator:
        """A survival estimator over `positions` draft tokens with these settings."""
        return SurvivalEstimator(
            positions,
            memory=self.memory,
            prior=self.prior_acceptance,
            prior_weight=self.prior_weight,
            beta=self.beta,
            surprise=self.surprise,
            surprise_memory=self.surprise_memory,
        )


def batch_bucket(batch: int) -> int:
    """The power of two, as an exponent, that `batch` is rounded up to. Raises ValueError for `batch` < 1."""
    if batch < 1:
        raise ValueError(f"no round has batch {batch}")
    return (batch - 1).bit_length()


class FixedLength:
    """Always the same plan."""

    def __init__(self, length: int, chunk: int = 0) -> None:
        self._plan = Plan(length, chunk)

    def plan(self, batch: int) -> Plan:
        """The plan given at construction."""
        return self._plan

    def observe(self, batch: int, plan: Plan, accepted: Sequence[int], traffic: Traffic = QUIET) -> None:
        """Nothing is learnt."""


class Pid:
    """A discrete PID regulator whose output rises with the measured variable, clamped to +-`limit`.

    The derivative acts on the measurement, so a step of the setpoint gives no kick. When the output is clipped, the share
    `back` of what was clipped is taken from the integrator (back-calculation), which is clamped to +-`limit` as well and
    loses the share `leak` of itself each round.
    """

    def __init__(self, kp: float, ki: float, kd: float, limit: float, back: float, leak: float = 0.0) -> None:
        self._kp, self._ki, self._kd, self._limit, self._back, self._keep = kp, ki, kd, limit, back, 1.0 - leak
        self._previous: float | None = None
        self.integral = 0.0

    def update(self, measured: float, setpoint: float) -> float:
        """The output after a new measurement."""
        error = measured - setpoint
        self.integral += self._ki * error
        change = 0.0 if self._previous is None else measured - self._previous
        self._previous = measured
        wanted = self._kp * error + self.integral + self._kd * change
        output = max(-self._limit, min(self._limit, wanted))
        self.integral = max(-self._limit, min(self._limit, self._keep * self.integral + self._back * (output - wanted)))
        return output

    def restart(self) -> None:
        """Forget the last measurement: the next one gives no derivative. The integrator stays."""
        self._previous = None


class ProbeSchedule:
    """When to try K = 1 while speculation is off.

    A probe lasts `burst` rounds: `probe_drafts` drafts, at least one round. After each probe that fails the wait doubles,
    up to the wait at which probes cost `probe_budget` of the time (and never beyond `probe_limit`).
    """

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._wait = settings.probe_every
        self._waited = 0
        self._left = 0

    @property
    def probing(self) -> bool:
        """Whether the next round is part of a probe."""
        return self._left > 0

    @property
    def left(self) -> int:
        """Rounds left of the probe under way."""
        return max(self._left, 0)

    def burst(self, batch: int) -> int:
        """Rounds of a probe at this batch."""
        return math.ceil(self._settings.probe_drafts / batch)

    def begin(self, batch: int) -> None:
        """Probe in the next rounds."""
        self._left, self._waited = self.burst(batch), 0

    def reset(self) -> None:
        """Speculation pays: when it is switched off again, the waits begin anew."""
        self._left, self._waited, self._wait = 0, 0, self._settings.probe_every

    def rest(self, batch: int) -> None:
        """A round without speculation has passed."""
        self._waited += 1
        if self._waited >= self._wait:
            self.begin(batch)

    def failed(self, batch: int, costs: RoundCosts, survival: float, intake: float = 0.0) -> None:
        """A probe round has passed and K = 1, of which the share `survival` is accepted, does not pay.

        `intake`: seconds that a prompt costs the draft.
        """
        self._left -= 1
        if self._left:
            return
        # A probe widens everybody's pass and drafts for a few rows.
        plain, rows = costs.round_seconds(batch, 0), min(self._settings.probe_drafts, batch)
        widened = costs.target_seconds(batch, 2) - costs.target_seconds(batch, 1)
        drafted = costs.draft_seconds(rows, 1)
        lost = max(widened + drafted - survival * plain * rows / batch, 0.0) * self.burst(batch) + rows * intake
        affordable = math.ceil(lost / (self._settings.probe_budget * plain))
        longest = max(min(affordable, self._settings.probe_limit), self._settings.probe_every)
        self._wait = min(2 * self._wait, longest)


@dataclass(frozen=True)
class RoundRecord:
    """One round of the controller. `hit_rate`: filtered accepted / drafted at the feed-forward K, `setpoint`: what was
    expected of it (both None when nothing was drafted); `trim`: the PID's output in draft tokens before rounding."""

    batch: int
    length: int
    hit_rate: float | None
    setpoint: float | None
    feed_forward: int
    trim: float
    probe: bool


@dataclass
class _Bucket:
    """What belongs to a range of batches: the regulator, its output as real and as whole tokens, the feed-forward K."""

    pid: Pid
    probe: ProbeSchedule
    feed_forward: int = 0
    trim: float = 0.0
    steps: int = 0


class PidController:
    """Feed-forward from survival and costs, trimmed by a PID on the hit rate.

    The setpoint is the hit rate expected at the feed-forward K. The measured variable is the filtered hit rate, referred to
    that K: setpoint + filtered(hit rate - what was expected of the round). A change of K, or of the batch, is therefore no
    disturbance. There is a regulator for each batch bucket (powers of two); the survival estimate, and with it the deviation
    from it, is shared, since acceptance does not depend on the batch. Entering a bucket restarts its derivative only.

    When K = 0 is best, speculation is off: the regulator is frozen and K = 1 is probed (`ProbeSchedule`). K never exceeds
    `settings.max_tokens` nor the largest K in `costs`.
    """

    def __init__(self, costs: RoundCosts, settings: ControlSettings | None = None) -> None:
        self._costs = costs
        self._settings = settings or ControlSettings()
        self._max = min(self._settings.max_tokens, costs.max_length)
        self._model = self._settings.estimator(self._max)
        self._intake = Intake()
        self._buckets: dict[int, _Bucket] = {}
        self._last: _Bucket | None = None
        self._trace: deque[RoundRecord] = deque(maxlen=self._settings.trace_rounds)

    @property
    def trace(self) -> Sequence[RoundRecord]:
        """The last rounds, oldest first."""
        return tuple(self._trace)

    @property
    def survival(self) -> Sequence[float]:
        """The present estimate of S_1 .. S_max."""
        return self._model.survival

    def probes_left(self, batch: int) -> int:
        """Rounds left of the probe under way for `batch` requests; 0 between probes and while speculation pays."""
        bucket = self._bucket(batch)
        return 0 if self._feed_forward(batch, bucket) else bucket.probe.left

    def plan(self, batch: int) -> Plan:
        """The next round's K for `batch` requests, verified in one pass. Raises ValueError for `batch` < 1."""
        bucket = self._bucket(batch)
        base = self._feed_forward(batch, bucket)
        if base == 0:
            return self._settings.probe(batch) if bucket.probe.probing and self._max else Plan(0)
        return Plan(max(1, min(self._max, base + bucket.steps)))

    def observe(self, batch: int, plan: Plan, accepted: Sequence[int], traffic: Traffic = QUIET) -> None:
        """Learn from a round. Raises ValueError for counts that do not fit `plan` or `batch`."""
        bucket = self._bucket(batch)
        base = self._feed_forward(batch, bucket)
        if plan.length == 0:
            self._model.rest(bucket.probe.burst(batch))
            bucket.probe.rest(batch)
            self._intake.learn(traffic, batch)
            self._last = None
            self._trace.append(RoundRecord(batch, 0, None, None, base, bucket.trim, False))
            return
        if not 0 < len(accepted) <= batch:
            raise ValueError(f"{len(accepted)} accepted counts for a batch of {batch}")
        setpoint = self._model.hit_rate(base or plan.length)
        self._model.observe(plan.length, accepted)
        self._intake.learn(traffic, batch + sum(accepted))
        if base:
            self._regulate(bucket)
        self._last = bucket
        measured = max(0.0, min(1.0, setpoint + self._model.deviation))
        self._trace.append(RoundRecord(batch, plan.length, measured, setpoint, base, bucket.trim, base == 0))
        if base == 0 and not self._model.surprised and self._feed_forward(batch, bucket) == 0:
            bucket.probe.failed(batch, self._costs, self._model.survival[0], self._intake.per_request)

    def _regulate(self, bucket: _Bucket) -> None:
        if bucket is not self._last:
            bucket.pid.restart()
        # both relative to the setpoint: when that moves with K or the batch, the derivative must not see it
        bucket.trim = bucket.pid.update(self._model.deviation, 0.0)
        if abs(bucket.trim - bucket.steps) > self._settings.dead_band:
            bucket.steps = round(bucket.trim)

    def _bucket(self, batch: int) -> _Bucket:
        key = batch_bucket(batch)
        if key not in self._buckets:
            s = self._settings
            bucket = _Bucket(Pid(s.kp, s.ki, s.kd, s.trim_limit, s.back_calculation, s.leak), ProbeSchedule(s))
            if not self._model.evidence:
                bucket.probe.begin(batch)
            self._buckets[key] = bucket
        return self._buckets[key]

    def _rate(self, batch: int, length: int, *, on: bool) -> float:
        """Expected tokens per second and request."""
        tau = self._model.tau(length)
        return tau / (self._costs.round_seconds(batch, length) + (self._intake.seconds(batch, tau, on=on) if length else 0.0))

    def _feed_forward(self, batch: int, bucket: _Bucket) -> int:
        """K of most expected tokens per second; the present one stays unless another is better by a margin."""
        rates = [self._rate(batch, k, on=bucket.feed_forward > 0) for k in range(self._max + 1)]
        best = max(range(self._max + 1), key=rates.__getitem__)
        present = bucket.feed_forward
        margin = self._settings.length_margin if present and best else self._settings.speculation_margin
        if rates[best] > rates[present] * (1.0 + margin):
            if not present:
                bucket.probe.reset()
            bucket.feed_forward = best
        return bucket.feed_forward
