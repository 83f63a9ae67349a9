"""What a round costs: measured seconds, interpolated, for the policies that choose the speculation length."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

_VERSION = 1


def chunk_widths(length: int, chunk: int) -> list[int]:
    """Tokens a row is fed in each pass of a round: the pending token and `length` drafts, `chunk` at a time (0 = all)."""
    total = length + 1
    if chunk < 1 or chunk >= total:
        return [total]
    return [min(chunk, total - start) for start in range(0, total, chunk)]


class RoundCosts(Protocol):
    """What a length policy asks of its costs: seconds of a round with `length` drafts verified in one pass, and its parts."""

    @property
    def max_length(self) -> int:
        """The largest K that there are costs for."""

    def round_seconds(self, batch: int, length: int) -> float:
        """Expected seconds of a round of `batch` rows with `length` draft tokens each."""

    def target_seconds(self, batch: float, width: float) -> float:
        """One target pass over `width` tokens of each of `batch` rows."""

    def draft_seconds(self, batch: float, length: int) -> float:
        """Drafting `length` tokens for each of `batch` rows."""


class _Curve:
    """Piecewise linear, non-decreasing through measured points: flat below the first, last slope beyond the last."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self.x = sorted(points)
        self.y = list(accumulate((points[x] for x in self.x), max))

    def __call__(self, x: float) -> float:
        if x <= self.x[0] or len(self.x) == 1:
            return self.y[0]
        right = min(bisect_left(self.x, x), len(self.x) - 1)
        x0, x1, y0, y1 = self.x[right - 1], self.x[right], self.y[right - 1], self.y[right]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class _Surface:
    """A curve for each measured batch, and between batches a curve through theirs."""

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        batches = sorted({batch for batch, _ in points})
        self.curves = {b: _Curve({x: seconds for (batch, x), seconds in points.items() if batch == b}) for b in batches}

    def __call__(self, batch: float, x: float) -> float:
        return _Curve({b: curve(x) for b, curve in self.curves.items()})(batch)


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of the parts of a round.

    `target[(batch, width)]`: one target pass over `width` tokens of each row. `draft[(batch, K)]`: drafting K >= 1
    tokens for each row, taking in the accepted positions included; K = 0, if given, is what a round without
    speculation still spends on the draft (else nothing). `overhead[batch]`: the rest of a round (sampling, bookkeeping).

    Between measured batches, widths and K the seconds are interpolated linearly after a running maximum has made them
    monotone in both; below the smallest they are flat, beyond the largest they go on with the last slope. A lone
    measured value holds everywhere. Raises ValueError for an empty `target` or `draft`, sizes out of range, or seconds
    that are not finite and positive (`draft` and `overhead`: not negative).
    """

    target: Mapping[tuple[int, int], float]
    draft: Mapping[tuple[int, int], float]
    overhead: Mapping[int, float] = field(default_factory=dict)
    _target: _Surface = field(init=False, repr=False, compare=False)
    _draft: _Surface = field(init=False, repr=False, compare=False)
    _idle: _Curve = field(init=False, repr=False, compare=False)
    _overhead: _Curve = field(init=False, repr=False, compare=False)
    _known: dict[tuple[int, int], float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        drafting = {(batch, length): seconds for (batch, length), seconds in self.draft.items() if length != 0}
        if not self.target or not drafting:
            raise ValueError("a cost table needs at least one measured target pass and one measured draft")
        if any(batch < 1 or width < 1 for batch, width in self.target) or any(batch < 1 or k < 0 for batch, k in self.draft):
            raise ValueError("cost table: batches and widths start at 1, draft lengths at 0")
        if any(batch < 1 for batch in self.overhead):
            raise ValueError("cost table: batches start at 1")
        if not all(math.isfinite(seconds) and seconds > 0.0 for seconds in self.target.values()):
            raise ValueError("cost table: seconds of target passes must be finite and positive")
        if not all(math.isfinite(seconds) and seconds >= 0.0 for seconds in (*self.draft.values(), *self.overhead.values())):
            raise ValueError("cost table: seconds must be finite and not negative")
        idle = {float(batch): seconds for (batch, length), seconds in self.draft.items() if length == 0}
        built = {
            "_target": _Surface(self.target),
            "_draft": _Surface(drafting),
            "_idle": _Curve(idle or {1.0: 0.0}),
            "_overhead": _Curve({float(batch): seconds for batch, seconds in self.overhead.items()} or {1.0: 0.0}),
        }
        for name, value in built.items():
            object.__setattr__(self, name, value)

    @property
    def max_length(self) -> int:
        """The largest K that was measured, both drafted and verified in one pass."""
        return min(max(k for _, k in self.draft), max(width for _, width in self.target) - 1)

    def target_seconds(self, batch: float, width: float) -> float:
        """One target pass over `width` tokens of each of `batch` rows (both may be means)."""
        return self._target(batch, width)

    def draft_seconds(self, batch: float, length: int) -> float:
        """Drafting `length` tokens for each of `batch` rows."""
        return self._draft(batch, length) if length else self._idle(batch)

    def overhead_seconds(self, batch: float) -> float:
        """The rest of a round of `batch` rows."""
        return self._overhead(batch)

    def round_seconds(self, batch: int, length: int, chunk: int = 0, survival: Sequence[float] | None = None) -> float:
        """Expected seconds of a round of `batch` rows with `length` draft tokens each.

        `chunk` = 0: one target pass. Else batch-sequential verification, synchronous: pass j (from 0) feeds the next
        `chunk` tokens of the rows whose first j * chunk drafts were accepted, and is left out when there is none.
        Rows are taken as independent with `survival` = S_1, S_2, ..: pass j runs with probability
        1 - (1 - S)^batch, S = S_(j chunk), over batch * S / that many rows in the mean (exact for costs that are
        linear in the rows). Raises ValueError for sizes out of range, or a chunked round without enough `survival`.
        """
        if batch < 1 or length < 0 or chunk < 0:
            raise ValueError(f"no round has batch {batch}, {length} draft tokens and chunk {chunk}")
        if 0 < chunk <= length:
            seconds = self.round_seconds(batch, length) - self.target_seconds(batch, length + 1)
            for index, width in enumerate(chunk_widths(length, chunk)):
                alive = _survival_at(survival, index * chunk)
                if alive > 0.0:
                    runs = -math.expm1(batch * math.log1p(-alive)) if alive < 1.0 else 1.0
                    seconds += runs * self.target_seconds(batch * alive / runs, width)
            return seconds
        known = self._known.get((batch, length))
        if known is None:
            known = self.target_seconds(batch, length + 1) + self.draft_seconds(batch, length) + self.overhead_seconds(batch)
            self._known[batch, length] = known
        return known

    def verified_seconds(self, length: int, chunk: int, accepted: Sequence[int]) -> float:
        """Seconds of a synchronous round whose outcome is known: `accepted[i]` drafts of row i were accepted.

        Raises ValueError as `round_seconds` does, and for an empty round.
        """
        batch = len(accepted)
        seconds = self.round_seconds(batch, length)
        if not 0 < chunk <= length:
            return seconds
        seconds -= self.target_seconds(batch, length + 1)
        for index, width in enumerate(chunk_widths(length, chunk)):
            alive = sum(count >= index * chunk for count in accepted)
            seconds += self.target_seconds(alive, width) if alive else 0.0
        return seconds

    def carry_seconds(self, batch: int, length: int, chunk: int, survival: Sequence[float]) -> float:
        """Expected seconds in which each of `batch` rows completes one round, in the carry-over form.

        A row whose chunk passed sends its next chunk in the next global pass, together with the first chunks of the
        others. A row's round takes N = sum over passes j of S_(j chunk) global passes, so in each pass batch / N rows
        begin a round and are drafted for. A pass is a padded rectangle of `batch` rows and `chunk` tokens.
        Raises ValueError as `round_seconds` does.
        """
        if not 0 < chunk <= length:
            return self.round_seconds(batch, length, chunk)
        passes = sum(_survival_at(survival, index * chunk) for index in range(len(chunk_widths(length, chunk))))
        drafting = self.draft_seconds(batch / passes, length)
        return passes * (self.target_seconds(batch, chunk) + drafting + self.overhead_seconds(batch))

    def to_json(self) -> str:
        """The measured values as one JSON object: rows [batch, width, seconds], [batch, K, seconds], [batch, seconds]."""
        rows: dict[str, Any] = {
            "version": _VERSION,
            "target": [[*key, seconds] for key, seconds in sorted(self.target.items())],
            "draft": [[*key, seconds] for key, seconds in sorted(self.draft.items())],
            "overhead": [[batch, seconds] for batch, seconds in sorted(self.overhead.items())],
        }
        return json.dumps(rows)

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Read what `to_json` wrote. Raises ValueError for anything else: bad JSON, version, rows, or values."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != _VERSION:
            raise ValueError(f"not a cost table of version {_VERSION}")
        target = {(b, w): s for b, w, s in _rows(data, "target", 3)}
        draft = {(b, k): s for b, k, s in _rows(data, "draft", 3)}
        return cls(target, draft, {b: s for b, s in _rows(data, "overhead", 2)})


def _survival_at(survival: Sequence[float] | None, position: int) -> float:
    if position == 0:
        return 1.0
    if survival is None or len(survival) < position:
        raise ValueError(f"a chunked round needs the survival of {position} draft tokens")
    return survival[position - 1]


def _rows(data: dict[str, Any], name: str, size: int) -> list[Any]:
    """Rows of whole numbers and a last number, each key once."""
    rows = data.get(name)
    if not isinstance(rows, list):
        raise ValueError(f"cost table: {name} is not a list of rows")
    for row in rows:
        whole = isinstance(row, list) and len(row) == size and all(type(value) is int for value in row[:-1])
        if not whole or type(row[-1]) not in (int, float):
            raise ValueError(f"cost table: {row} is no row of {name}")
    if len({tuple(row[:-1]) for row in rows}) < len(rows):
        raise ValueError(f"cost table: {name} has a row twice")
    return rows
