"""What happened between two readings of ever-growing counters, across restarts of the server."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from eagle.watch.scrape import EngineCounters

_SAME_START = 1.0  # seconds: the page rounds


class Counts(BaseModel):
    """Drafts, draft tokens, accepted tokens by position and ended requests of a stretch of time, all engines together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafts: int = 0
    draft_tokens: int = 0
    requests: int = 0
    by_position: tuple[int, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        size = max(len(self.by_position), len(other.by_position))
        mine, theirs = (c.by_position + (0,) * (size - len(c.by_position)) for c in (self, other))
        return Counts(
            drafts=self.drafts + other.drafts,
            draft_tokens=self.draft_tokens + other.draft_tokens,
            requests=self.requests + other.requests,
            by_position=tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def positions(self) -> int:
        """How many draft positions the server counts: the most tokens that it drafts at once."""
        return len(self.by_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included; 1.0 when nothing was drafted."""
        return 1.0 + (sum(self.by_position) / self.drafts if self.drafts else 0.0)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts whose token i was accepted (cumulative, as vLLM reports it)."""
        return [n / self.drafts for n in self.by_position] if self.drafts else []


def between(before: Mapping[str, EngineCounters], now: Mapping[str, EngineCounters]) -> tuple[Counts, list[str]]:
    """Return what was counted between two readings, and the engines that were started in between.

    An engine that was started anew (its start differs, or any counter fell), or is new on the page, counts from zero:
    what it did before its end and after the last reading is lost. An engine that is gone counts nothing. A difference
    that cannot be (tokens accepted that were not drafted: a restart that nothing betrayed) is left out and named too.
    """
    total, restarted = Counts(), []
    for engine, latest in now.items():
        earlier = before.get(engine)
        if earlier is None or _restarted(earlier, latest):
            restarted.append(engine)
            earlier = None
        counted = _difference(earlier, latest)
        if _possible(counted):
            total += counted
        elif engine not in restarted:
            restarted.append(engine)
    return total, restarted


def _restarted(earlier: EngineCounters, latest: EngineCounters) -> bool:
    if earlier.created and latest.created and abs(earlier.created - latest.created) > _SAME_START:
        return True
    if len(earlier.by_position) != len(latest.by_position):  # another K: only a new start changes it
        return True
    names = ("drafts", "draft_tokens", "accepted", "requests")
    pairs = [(getattr(earlier, name), getattr(latest, name)) for name in names]
    return any(new < old for old, new in [*pairs, *zip(earlier.by_position, latest.by_position, strict=True)])


def _difference(earlier: EngineCounters | None, latest: EngineCounters) -> Counts:
    if earlier is None:
        return Counts(
            drafts=latest.drafts, draft_tokens=latest.draft_tokens, requests=latest.requests, by_position=latest.by_position
        )
    return Counts(
        drafts=latest.drafts - earlier.drafts,
        draft_tokens=latest.draft_tokens - earlier.draft_tokens,
        requests=latest.requests - earlier.requests,
        by_position=tuple(new - old for old, new in zip(earlier.by_position, latest.by_position, strict=True)),
    )


def _possible(counts: Counts) -> bool:
    falling = all(a >= b for a, b in zip((counts.drafts, *counts.by_position), counts.by_position, strict=False))
    return falling and sum(counts.by_position) <= counts.draft_tokens
