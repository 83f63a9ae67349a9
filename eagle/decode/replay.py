"""Policies replayed over recorded acceptance: how much a choice of speculation lengths costs against the best one.

A trace is recorded with K_max drafts in every round. A request that would accept a drafts then gives min(a, K) + 1 tokens
with K drafts. Limitation: the recorded rounds are an exogenous stream, one for each round of the policy. In truth a
policy that accepts fewer tokens in a round starts its next round earlier in the text; here every policy sees the same
rounds, whatever it chose. That is exact when acceptance does not depend on the position in the text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from eagle.decode.control import FixedLength, LengthPolicy
from eagle.decode.cost import CostTable
from eagle.errors import DataError


@dataclass(frozen=True)
class Round:
    """A recorded round of `batch` requests: request i would have accepted `accepted[i]` of K_max drafts."""

    batch: int
    accepted: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.batch < 1 or len(self.accepted) != self.batch or min(self.accepted) < 0:
            raise ValueError(f"a round of {self.batch} requests cannot have accepted {list(self.accepted)}")


@dataclass(frozen=True)
class Outcome:
    """What a policy made of a stream: for each round K, tokens emitted by the whole batch, and seconds."""

    lengths: tuple[int, ...]
    round_tokens: tuple[int, ...]
    round_seconds: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Tokens emitted, bonus tokens included."""
        return sum(self.round_tokens)

    @property
    def seconds(self) -> float:
        """Seconds by the cost table."""
        return sum(self.round_seconds)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Regret:
    """Share of the throughput that a policy leaves on the table against the best fixed K and against the oracle."""

    fixed: float
    oracle: float


def replay(stream: Sequence[Round], policy: LengthPolicy, costs: CostTable, k_max: int) -> Outcome:
    """Run `policy` over a `stream` that was recorded with `k_max` drafts per round; chunked plans run synchronously.

    Raises ValueError for an empty stream, a recorded count above `k_max`, or a plan longer than `k_max`.
    """
    _check(stream, k_max)
    lengths, tokens, seconds = [], [], []
    for now in stream:
        plan = policy.plan(now.batch)
        if plan.length > k_max:
            raise ValueError(f"the policy drafts {plan.length} tokens, the trace has {k_max}")
        accepted = [min(count, plan.length) for count in now.accepted]
        lengths.append(plan.length)
        tokens.append(sum(accepted) + now.batch)
        seconds.append(costs.verified_seconds(plan.length, plan.chunk, accepted))
        policy.observe(now.batch, plan, accepted if plan.length else [])
    return Outcome(tuple(lengths), tuple(tokens), tuple(seconds))


def best_fixed(stream: Sequence[Round], costs: CostTable, k_max: int) -> Outcome:
    """The best of K = 0 .. `k_max` held over the whole stream, in hindsight. Raises ValueError as `replay` does."""
    return max((replay(stream, FixedLength(k), costs, k_max) for k in range(k_max + 1)), key=lambda outcome: outcome.rate)


def oracle(stream: Sequence[Round], costs: CostTable, k_max: int) -> Outcome:
    """The best K in every round, knowing what each request will accept: an upper bound of all one-pass policies.

    A round's K maximises tokens - rate * seconds with the rate that the whole stream reaches (Dinkelbach's method), which
    maximises total tokens / total seconds; each round's own best tokens / second would not. Raises ValueError as
    `replay` does.
    """
    _check(stream, k_max)
    options = [replay(stream, FixedLength(k), costs, k_max) for k in range(k_max + 1)]
    best = max(options, key=lambda outcome: outcome.rate)
    while True:
        rate = best.rate
        lengths = [
            max(range(k_max + 1), key=lambda k: options[k].round_tokens[i] - rate * options[k].round_seconds[i])
            for i in range(len(stream))
        ]
        better = Outcome(
            tuple(lengths),
            tuple(options[k].round_tokens[i] for i, k in enumerate(lengths)),
            tuple(options[k].round_seconds[i] for i, k in enumerate(lengths)),
        )
        if better.rate <= rate * (1.0 + 1e-12):
            return best
        best = better


def regret(outcome: Outcome, stream: Sequence[Round], costs: CostTable, k_max: int) -> Regret:
    """1 - rate / rate of the best fixed K, and of the oracle (methods: R_static, R_oracle). Below 0 = better than it."""
    fixed, clairvoyant = best_fixed(stream, costs, k_max), oracle(stream, costs, k_max)
    return Regret(1.0 - outcome.rate / fixed.rate, 1.0 - outcome.rate / clairvoyant.rate)


def good_lengths(stream: Sequence[Round], costs: CostTable, k_max: int, share: float = 0.95) -> frozenset[int]:
    """The draft lengths K = 0 .. `k_max` which, held over the whole stream, reach `share` of the best one's rate.

    The optimum is often flat: with a heavy tail of long acceptances K = 3 and K = 6 may differ by 3 %. Raises ValueError as
    `replay` does.
    """
    rates = [replay(stream, FixedLength(k), costs, k_max).rate for k in range(k_max + 1)]
    return frozenset(k for k, rate in enumerate(rates) if rate >= share * max(rates))


def settle_rounds(lengths: Sequence[int], switch: int, good: Collection[int], hold: int = 5) -> int | None:
    """Rounds after round `switch` until K first stays among `good` for `hold` rounds (or to the end); None = it never does."""
    for start in range(switch, len(lengths)):
        if all(length in good for length in lengths[start : start + hold]):
            return start - switch
    return None


def worst_window(outcome: Outcome, reference: Outcome, window: int = 64) -> float:
    """The largest regret of `outcome` against `reference` over any `window` rounds in a row (or all, if fewer).

    Raises ValueError for outcomes of different streams (by their number of rounds) or a window below 1.
    """
    rounds = len(outcome.lengths)
    if len(reference.lengths) != rounds or window < 1:
        raise ValueError("two outcomes of the same stream and a window of at least one round are needed")
    window = min(window, rounds)

    def rates(of: Outcome) -> list[float]:
        tokens = [0, *accumulate(of.round_tokens)]
        seconds = [0.0, *accumulate(of.round_seconds)]
        return [(tokens[i + window] - tokens[i]) / (seconds[i + window] - seconds[i]) for i in range(rounds - window + 1)]

    return max(1.0 - ours / theirs for ours, theirs in zip(rates(outcome), rates(reference), strict=True))


def save_trace(path: Path, stream: Iterable[Round]) -> None:
    """Write a stream as JSON lines, one round each: {"batch": 2, "accepted": [1, 3]}."""
    lines = (json.dumps({"batch": now.batch, "accepted": list(now.accepted)}) + "\n" for now in stream)
    path.write_text("".join(lines), encoding="utf-8")


def load_trace(path: Path) -> list[Round]:
    """Read what `save_trace` wrote. Raises DataError naming the file, and the row (from 1) when a row is bad."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable acceptance trace ({error})") from None
    stream = []
    for row, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            counts = record["accepted"]
            if set(record) != {"batch", "accepted"} or any(type(value) is not int for value in (record["batch"], *counts)):
                raise ValueError("batch and accepted must be whole numbers")  # noqa: TRY301
            stream.append(Round(record["batch"], tuple(counts)))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, row {row}: not a recorded round ({error!r}); record the trace again") from None
    return stream


def _check(stream: Sequence[Round], k_max: int) -> None:
    if not stream:
        raise ValueError("an empty stream cannot be replayed")
    if max(max(now.accepted) for now in stream) > k_max:
        raise ValueError(f"the trace has counts above {k_max}, the drafts it was recorded with")
