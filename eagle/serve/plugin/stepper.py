"""The controller as vLLM's scheduler needs it: a draft length when a step is scheduled, an outcome when it has run.

In vLLM the length is set when a step is scheduled, the drafts are made at that step's end, and what became of them is seen
one step later (two with asynchronous scheduling). So a round is judged by what was really drafted, not by the last plan.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle.decode.control import PidController, Plan, RoundRecord
from eagle.serve.plugin.costs import LearntCosts
from eagle.serve.plugin.settings import PidSettings

INTAKE_SHARE = 0.25  # of a step's requests: where fewer of them bring a prompt, the others are not drafted less for its sake
LAG = 3  # steps after which a probe that nobody answered (its requests have ended) is forgotten


@dataclass
class StepState:
    """What the metrics show. `rounds` counts planned steps by (mode, draft length); mode: draft, off, probe, trial or intake."""

    batch: int = 0
    length: int = 0
    record: RoundRecord | None = None
    rounds: Counter[tuple[str, int]] = field(default_factory=Counter)


class StepController:
    """`PidController` behind vLLM's step cycle, with costs learnt from the steps' own times.

    `limit` is the server's num_speculative_tokens. Raises ValueError for settings out of range.
    """

    def __init__(self, settings: PidSettings, limit: int) -> None:
        control = settings.control_settings(limit)
        self.costs = LearntCosts(control.max_tokens, settings.cost_table())
        self.state = StepState()
        self._pid = PidController(self.costs, control)
        self._intake = settings.intake_length
        self._probes: deque[int] = deque()  # steps in which a probe was planned whose outcome is not known yet
        self._step = 0
        self._rows = 0
        self._then: float | None = None
        self._verified: int | None = None  # drafts that each decoding request verified in the step before

    @property
    def rows(self) -> int:
        """How many requests the last planned drafts are meant for; 0 = all."""
        return self._rows

    @property
    def survival(self) -> Sequence[float]:
        """The present estimate of S_1 .. S_max."""
        return self._pid.survival

    def next_length(self, batch: int, prompts: int = 0) -> int:
        """The draft length K of a step of `batch` requests, of which `prompts` bring their prompt. ValueError for `batch` < 1.

        A step's tokens come out when its drafts are made, so what is drafted behind a prompt delays the first token: at most
        `intake_length`. Such a step tells no cost, so no trial is spent on it.
        """
        self._step += 1
        while self._probes and self._step - self._probes[0] > LAG:
            self._probes.popleft()
        intake = prompts >= max(1.0, INTAKE_SHARE * batch)
        trial = None if intake else self.costs.trial(batch, self._pid.survival)
        if trial is not None:
            plan, mode = Plan(trial), "trial"
        elif intake and self._pid.plan(batch).length > self._intake:
            plan, mode = Plan(self._intake), "intake"
        else:
            plan, mode = self._controlled(batch)
        self._rows = plan.rows
        self.state.batch, self.state.length = batch, plan.length
        self.state.rounds[mode, plan.length] += 1
        return plan.length

    def _controlled(self, batch: int) -> tuple[Plan, str]:
        plan = self._pid.plan(batch)
        if plan.length == 0:
            return plan, "off"
        left = self._pid.probes_left(batch)
        if not left:
            return plan, "draft"
        if len(self._probes) >= left:  # all of the probe's rounds are on their way
            return Plan(0), "off"
        self._probes.append(self._step)
        return plan, "probe"

    def learn(self, scheduled: Any, output: Any, now: float) -> None:
        """Learn from vLLM's SchedulerOutput and ModelRunnerOutput of a step whose output came at `now` (seconds)."""
        sampled, index = output.sampled_token_ids, output.req_id_to_index
        invalid = scheduled.num_invalid_spec_tokens or {}
        drafted: list[int] = []
        accepted: list[int] = []
        for name, tokens in scheduled.scheduled_spec_decode_tokens.items():
            got = len(sampled[index[name]]) if sampled else 0
            if got and name not in invalid:
                drafted.append(len(tokens))
                accepted.append(got - 1)
        requests, new = len(scheduled.num_scheduled_tokens), len(scheduled.scheduled_new_reqs)
        self.observe(requests - new, drafted, accepted)
        # A cost is told by a step in which everybody verifies K drafts, K are drafted again, and no prompt comes in.
        length = drafted[0] if drafted else 0
        whole = len(drafted) == requests if length else not scheduled.scheduled_spec_decode_tokens
        steady = (
            whole
            and requests > 0
            and not new
            and scheduled.total_num_scheduled_tokens == requests * (length + 1)
            and scheduled.num_spec_tokens_to_schedule == length
        )
        self.time(now, (requests, length) if steady else None, length if requests > new else None)

    def observe(self, batch: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step of `batch` decoding requests: `accepted[i]` of `drafted[i]` drafts, for those that had any.

        Drafts that were cut (end of the room, grammar) are left out: they say nothing of the cut positions.
        """
        if batch < 1:
            return
        length = max(drafted, default=0)
        if length == 0:
            self._pid.observe(batch, Plan(0), ())
        else:
            if self._probes:
                self._probes.popleft()
            whole = [count for count, size in zip(accepted, drafted, strict=True) if size == length]
            self._pid.observe(batch, Plan(length), whole)
        self.state.record = self._pid.trace[-1]

    def time(self, now: float, steady: tuple[int, int] | None, verified: int | None = None) -> None:
        """A step's output has come at `now` (seconds of any steady clock); `steady` = (batch, K) if its time tells a cost.

        `verified`: drafts of each decoding request, None where there was none; K in a steady step. The first step after a
        change of it is no cost: vLLM compiles for new shapes and fills caches in it.
        """
        if steady is not None:
            verified = steady[1]
            if self._then is not None and verified == self._verified:
                self.costs.add(*steady, now - self._then)
        self._then, self._verified = now, verified

    def pause(self) -> None:
        """No request is left: the time to the next output is no cost."""
        self._then = None
