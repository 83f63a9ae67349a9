"""Counters of a decoding run, with vLLM's meaning.

vLLM counts a draft when a request's draft tokens are verified, counts what verification accepts (also beyond a stop
token or the length limit, before the output is cut there), and reports 1 + accepted / drafts as acceptance length.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """What a `generate` call did and how long it took. Times are wall-clock seconds.

    `rounds`: drafts verified (one request in one round), vLLM's num_drafts. `drafted`, `accepted`: draft tokens.
    `accepted_by_position[i]`: drafts whose token i was accepted. `target_steps`, `draft_steps`: forward passes of a
    whole batch after the prefill, which `target_seconds` and `draft_seconds` cover (verification and sampling
    included). `ttft_seconds`: mean time from the start of a request's wave to its first token; the draft's own
    prefill and first draft come before that token is handed out, as in vLLM. `token_seconds`: one entry per token
    after a request's first: the round's time over the tokens that the request got in it.
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
