"""The controller's state as Prometheus metrics `eagle_pid_*`.

The scheduler lives in vLLM's engine process, `/metrics` is answered by the API server. Both write to and read from the
folder that PROMETHEUS_MULTIPROC_DIR names (Prometheus' multiprocess mode, which vLLM's endpoint supports): without that
variable, set before the server starts, the metrics exist but nobody can see them.
"""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from eagle.decode.control import batch_bucket
from eagle.serve.plugin.stepper import StepController


class PidMetrics:
    """The metrics, written at most every `every` seconds and when the server falls idle."""

    def __init__(self, version: str, every: float, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._every, self._next = every, 0.0
        self._written: Tally[tuple[str, int]] = Tally()
        self._overhead, self._overhead_written = 0.0, 0.0

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"eagle_pid_{name}", text, labels, registry=registry, multiprocess_mode="mostrecent")

        self._active = gauge("active", "1: the controller sets the draft length; 0: vLLM's own length stays.", "vllm", "reason")
        self._length = gauge("draft_tokens", "Draft tokens per request in the last scheduled step.")
        self._batch = gauge("batch", "Requests in the last scheduled step.")
        self._forward = gauge("feed_forward_tokens", "Draft length of most expected tokens per second.")
        self._trim = gauge("trim_tokens", "Correction by the PID, draft tokens, before rounding.")
        self._hit_rate = gauge("hit_rate", "Filtered accepted / drafted, referred to the feed-forward length.")
        self._setpoint = gauge("setpoint", "Hit rate expected at the feed-forward length.")
        self._survival = gauge("survival", "Estimated probability that the first drafts are all accepted.", "position")
        self._seconds = gauge("round_seconds", "Median time of a round with up to so many requests.", "requests", "draft_tokens")
        self._rounds = Counter(
            "eagle_pid_rounds", "Scheduled steps by mode and draft length.", ("mode", "draft_tokens"), registry=registry
        )
        self._steps = Counter("eagle_pid_steps", "Scheduled steps.", registry=registry)
        self._seconds_spent = Counter("eagle_pid_overhead_seconds", "Processor time spent in the controller.", registry=registry)
        self._version = version

    def active(self, reason: str = "") -> None:
        """Say whether the controller is in charge; `reason` says why it is not."""
        if reason:
            self._active.labels(self._version, "").set(0.0)
        self._active.labels(self._version, reason).set(0.0 if reason else 1.0)

    def spent(self, seconds: float) -> None:
        """Add to the processor time that the controller took."""
        self._overhead += seconds

    def due(self, now: float) -> bool:
        """Whether it is time to write again."""
        return now >= self._next

    def write(self, controller: StepController, now: float) -> None:
        """Write the controller's state."""
        self._next = now + self._every
        state = controller.state
        self._length.set(state.length)
        self._batch.set(state.batch)
        if state.record is not None:
            self._forward.set(state.record.feed_forward)
            self._trim.set(state.record.trim)
            if state.record.hit_rate is not None and state.record.setpoint is not None:
                self._hit_rate.set(state.record.hit_rate)
                self._setpoint.set(state.record.setpoint)
        for position, alive in enumerate(controller.survival, 1):
            self._survival.labels(str(position)).set(alive)
        if state.batch:
            bucket = str(1 << batch_bucket(state.batch))
            for length, seconds in controller.costs.measured(state.batch).items():
                self._seconds.labels(bucket, str(length)).set(seconds)
        for key, count in state.rounds.items():
            new = count - self._written[key]
            if new:
                self._rounds.labels(key[0], str(key[1])).inc(new)
                self._steps.inc(new)
                self._written[key] = count
        self._seconds_spent.inc(self._overhead - self._overhead_written)
        self._overhead_written = self._overhead
