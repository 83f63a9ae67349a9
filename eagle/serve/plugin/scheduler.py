"""Scheduler classes for vLLM's `--scheduler-cls`: vLLM's own, with the draft length K of each step set by the controller.

The hook is vLLM's own for dynamic speculative decoding: the scheduler looks K up by the number of scheduled requests
(`Scheduler.dynamic_sd_lookup`) and the worker drafts so many; K = 0 leaves one pass of the draft, which keeps its cache in
step. Here the table is replaced by the controller. Accepted counts are read from the step's output, as vLLM counts them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from eagle.serve.plugin.metrics import PidMetrics
from eagle.serve.plugin.settings import PidSettings, load_settings
from eagle.serve.plugin.stepper import StepController

logger = init_logger("vllm.eagle_pid")  # below "vllm", or vLLM's logging would not show it
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
FAULTS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # the last but one: another vLLM's objects


class LengthLookup:
    """Stands in for vLLM's table `K by number of scheduled requests`."""

    def __init__(self, length: Callable[[int], int]) -> None:
        self._length = length

    def __getitem__(self, batch: int) -> int:
        return self._length(batch)


class PidScheduling:
    """Mixin over a scheduler of vLLM's. Where the controller cannot be used, vLLM's own length stays, with a warning."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        settings = load_settings(os.environ)
        self._metrics = PidMetrics(vllm.__version__, settings.flush_seconds)
        reason = why_not(self, settings)
        self._controller = None if reason else StepController(settings, self.num_spec_tokens)  # type: ignore[attr-defined]
        self._metrics.active(reason)
        if METRICS_FOLDER not in os.environ:
            logger.warning("%s is not set: eagle_pid_* will not be seen on /metrics", METRICS_FOLDER)
        if self._controller is None:
            logger.warning("the draft length stays vLLM's own: %s", reason)
        else:
            self._own_lookup = self.dynamic_sd_lookup  # type: ignore[has-type]
            self.dynamic_sd_lookup = LengthLookup(self._next_length)
            logger.info("the draft length is set by the PID controller, 0 to %d", self._controller.costs.max_length)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Learn from the step, then do what vLLM does (which cuts the sampled ids at a stop, so not before)."""
        controller = self._controller
        if controller is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        began = thread_time()
        try:
            controller.learn(scheduler_output, model_runner_output, perf_counter())
        except FAULTS as error:
            self._give_up(error)
        self._metrics.spent(thread_time() - began)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        idle = not self.has_unfinished_requests()  # type: ignore[attr-defined]
        if idle:
            controller.pause()
        now = perf_counter()
        if idle or self._metrics.due(now):
            began = thread_time()
            self._metrics.write(controller, now)
            self._metrics.spent(thread_time() - began)
        return outputs

    def _next_length(self, batch: int) -> int:
        began = thread_time()
        try:
            length = self._controller.next_length(batch, self._prompts()) if self._controller is not None else self.num_spec_tokens  # type: ignore[attr-defined]
        except FAULTS as error:
            self._give_up(error)
            length = self.num_spec_tokens  # type: ignore[attr-defined]
        self._metrics.spent(thread_time() - began)
        return length

    def _prompts(self) -> int:
        """How many requests of the step being scheduled bring a prompt, or a part of one: their counts have not moved on yet."""
        return sum(request.num_computed_tokens < request.num_prompt_tokens for request in self.running)  # type: ignore[attr-defined]

    def _give_up(self, error: Exception) -> None:
        """A fault of the controller must not end a server: vLLM's own length from here on, and the log and a metric say so."""
        logger.error("the draft length is vLLM's own from now on: the controller failed", exc_info=error)
        self._metrics.active("failed")
        self._controller, self.dynamic_sd_lookup = None, self._own_lookup

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take the drafts; those of a probe are kept for as many requests as it needs (synchronous scheduling only)."""
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
        rows = self._controller.rows if self._controller is not None else 0
        if rows:
            for name in draft_token_ids.req_ids[rows:]:
                request = self.requests.get(name)  # type: ignore[attr-defined]
                if request is not None:
                    request.spec_token_ids = []


class PidScheduler(PidScheduling, Scheduler):
    """For synchronous scheduling (CPU builds of vLLM)."""


class AsyncPidScheduler(PidScheduling, AsyncScheduler):
    """For asynchronous scheduling, vLLM's default on GPUs."""


def why_not(scheduler: Any, settings: PidSettings) -> str:
    """Return why the controller cannot be used with this vLLM and configuration; empty when it can."""
    version = ".".join(vllm.__version__.split(".")[:2])
    if version not in settings.versions:
        return f"vLLM {vllm.__version__} is unknown to the controller (known: {', '.join(settings.versions)})"
    if not hasattr(scheduler, "dynamic_sd_lookup") or "num_spec_tokens_to_schedule" not in SchedulerOutput.__dataclass_fields__:
        return "this vLLM's scheduler has no dynamic draft length"
    if not scheduler.num_spec_tokens:
        return "the server has no speculative_config"
    if scheduler.parallel_config.data_parallel_size > 1:
        return "data-parallel ranks must all draft the same number of tokens"
    return ""
