"""Counters of a decoding run, with vLLM's meaning.

vLLM counts a draft when a request's draft tokens are verified, counts what verification accepts (also beyond a stop
token or the length limit, before the output is cut there), and reports 1 + accepted / drafts as acceptance length.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One step of a run: `length` draft tokens were drafted for a batch of `batch` requests.

    `accepted`: accepted draft tokens of each draft that was decided in it.
    """

    batch: int
    length: int
    accepted: tuple[int, ...]
    draft_seconds: float
    target_seconds: float


@dataclass
class DecodeStats:
    """What a `generate` call did and how long it took. Times are wall-clock seconds.

    `rounds`: drafts verified (one request in one round), vLLM's num_drafts. `drafted`, `accepted`: draft tokens.
    `accepted_by_position[i]`: drafts whose token i was accepted. `target_steps`, `draft_steps`: forward passes of a
    whole batch after the prefill, which `target_seconds` and `draft_seconds` cover (verification and sampling
    included; a draft step's share of taking in what was accepted too). `ttft_seconds`: mean time from a request's
    admission to its first token; the draft takes the prompt in after that. `token_seconds`: one entry per token after
    a request's first: the time since its last one over the tokens that it got at once. `lengths[K]`: steps that drafted
    K tokens. `steps`: all steps after prefills. `peak_logits_bytes`:
    the largest logits of one verification pass; `target_passes`: how many there were.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    ttft_seconds: float = 0.0
    tokens: int = 0
    target_steps: int = 0
    target_seconds: float = 0.0
    draft_steps: int = 0
    draft_seconds: float = 0.0
    token_seconds: list[float] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    steps: list[Step] = field(default_factory=list)
    target_passes: int = 0
    peak_logits_bytes: int = 0

    @property
    def mean_draft_tokens(self) -> float:
        """Draft tokens per step, steps without a draft included."""
        return sum(length * n for length, n in self.lengths.items()) / max(sum(self.lengths.values()), 1)

    def record(self, batch: int, length: int, accepted: list[int], draft_seconds: float, target_seconds: float) -> None:
        """Count one step of `batch` requests that drafted `length` tokens."""
        self.lengths[length] += 1
        self.steps.append(Step(batch, length, tuple(accepted), draft_seconds, target_seconds))
        self.target_steps += 1
        self.target_seconds += target_seconds
        self.draft_steps += length
        self.draft_seconds += draft_seconds if length else 0.0

    def saw_logits(self, logits: Tensor) -> None:
        """Count a verification pass and note the size of its logits."""
        self.target_passes += 1
        self.peak_logits_bytes = max(self.peak_logits_bytes, logits.numel() * logits.element_size())

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included; 1.0 when nothing was drafted."""
        return 1.0 + (self.accepted / self.rounds if self.rounds else 0.0)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts whose token i was accepted (and so all before it): cumulative, not conditional."""
        return [n / self.rounds for n in self.accepted_by_position] if self.rounds else []

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the whole time, prefill included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def target_step_seconds(self) -> float:
        """Mean time of a target step after the prefill."""
        return self.target_seconds / self.target_steps if self.target_steps else 0.0

    @property
    def draft_step_seconds(self) -> float:
        """Mean time per drafted position of a batch (head and sampling included) after the prefill."""
        return self.draft_seconds / self.draft_steps if self.draft_steps else 0.0

    def observe(self, accepted: list[int], length: int) -> None:
        """Count one verification of `length` draft tokens for each request of a batch."""
        if not length:
            return
        self.rounds += len(accepted)
        self.drafted += length * len(accepted)
        self.accepted += sum(accepted)
        by_position = self.accepted_by_position
        by_position.extend([0] * (length - len(by_position)))
        for count in accepted:
            for position in range(count):
                by_position[position] += 1
