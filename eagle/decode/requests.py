"""A request on its way through the engine: what was asked, what it got so far, and its place in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from eagle.decode.proposal import Proposal
from eagle.decode.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt (token ids) and how to answer it. Requests of one `sampling.seed` are told apart by `key`."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: AbstractSet[int] = frozenset()
    key: int = 0


@dataclass
class Answer:
    """What a request got so far: `tokens` (the stop token included), and `finish` when it is done.

    `accepted`: accepted draft tokens of each of its rounds. `first_token`, `finished`: clock readings in seconds.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    accepted: list[int] = field(default_factory=list)
    first_token: float = 0.0
    finished: float = 0.0


@dataclass
class Left:
    """What is left of a row's draft: row `row` of `proposal` from token `at` on; `tokens` are all its tokens."""

    proposal: Proposal
    row: int
    tokens: list[int]
    at: int = 0

    @property
    def rest(self) -> list[int]:
        """The tokens that are not decided yet."""
        return self.tokens[self.at :]


@dataclass
class Slot:
    """A request in the batch: `length` positions are in the target's cache, `pending` is the token after them."""

    answer: Answer
    length: int
    pending: int
    since: float  # when its last token was emitted
    left: Left | None = None

    @property
    def open_tokens(self) -> int:
        """How many tokens the request may still get."""
        return self.answer.request.max_new_tokens - len(self.answer.tokens)
