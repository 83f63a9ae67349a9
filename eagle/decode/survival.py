"""How far drafts survive: S_k = P(the first k draft tokens are all accepted), learnt online.

Acceptance belongs to the text and the draft, not to the batch, so one estimator serves all batch sizes. Evidence is
kept per position as weighted counts of drafts that reached it and that passed it, with exponential forgetting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEAST_SURPRISE = 0.1  # hit rate; requests of one batch are more alike than independent ones, whose noise is computed here

_UNSEEN_MEMORY = 4.0  # positions that are not drafted keep their evidence this many times longer: else K flaps to relearn them


class SurvivalEstimator:
    """S_1 .. S_n for n = `positions`, from the accepted counts of each round.

    A round counts as one unit of evidence whatever its batch, so the memory is `memory` rounds. The conditional
    acceptance of position k is shrunk towards that of position k - 1 with a weight of `prior_weight` drafts, so a position
    that was never drafted is extrapolated from the shallower ones. Position 1 is shrunk towards `prior`, which itself
    follows the estimate as evidence is forgotten: a long pause does not bring the first guess back.

    `deviation` is the hit rate (accepted / drafted) minus what the estimate expected for the drafted length, as an
    exponential average with factor `beta`; `noise` is the standard deviation it has by chance. While the deviation is
    beyond `surprise` times the noise, the memory is `surprise_memory` rounds.
    Raises ValueError for settings outside their range.
    """

    def __init__(
        self,
        positions: int,
        *,
        memory: float = 32.0,
        prior: float = 0.5,
        prior_weight: float = 6.0,
        beta: float = 0.2,
        surprise: float = 2.0,
        surprise_memory: float = 4.0,
    ) -> None:
        if positions < 0 or memory < 1.0 or surprise_memory < 1.0 or not prior_weight > 0.0:
            raise ValueError("positions >= 0, memories >= 1 round and a prior weight > 0 are needed")
        if not (0.0 <= prior <= 1.0 and 0.0 < beta <= 1.0 and surprise > 0.0):
            raise ValueError("prior must be in [0, 1], beta in (0, 1], surprise > 0")
        self._reached = [0.0] * positions
        self._passed = [0.0] * positions
        self._keep, self._keep_surprised = 1.0 - 1.0 / memory, 1.0 - 1.0 / surprise_memory
        self._prior, self._prior_weight, self._beta, self._surprise = prior, prior_weight, beta, surprise
        self._deviation = self._filled = self._variance = 0.0
        self._requests = 1
        self._surprised = False
        self._survival: list[float] = []
        self._refresh()

    @property
    def survival(self) -> Sequence[float]:
        """S_1 .. S_n, non-increasing."""
        return self._survival

    @property
    def deviation(self) -> float:
        """Filtered hit rate minus expected hit rate, in [-1, 1]; 0 before the first draft."""
        return self._deviation

    @property
    def noise(self) -> float:
        """Standard deviation of `deviation` if requests are independent and the estimate is right."""
        return math.sqrt(self._variance)

    @property
    def surprised(self) -> bool:
        """Whether the last round left the deviation beyond what chance explains."""
        return self._surprised

    @property
    def evidence(self) -> float:
        """Remembered rounds with a draft (position 1), after forgetting."""
        return self._reached[0] if self._reached else 0.0

    def tau(self, length: int) -> float:
        """Expected tokens per request of a round with `length` draft tokens, bonus token included: 1 + sum of S_k."""
        return 1.0 + sum(self._survival[:length])

    def hit_rate(self, length: int) -> float:
        """Expected accepted / drafted of a round with `length` >= 1 draft tokens."""
        return sum(self._survival[:length]) / length

    def observe(self, length: int, accepted: Sequence[int]) -> None:
        """Take in a round of `length` >= 1 draft tokens: `accepted[i]` of them were accepted for request i.

        Raises ValueError for an empty round, a length beyond the positions, or counts outside 0 .. `length`.
        """
        if not accepted or not 1 <= length <= len(self._reached) or not 0 <= min(accepted) <= max(accepted) <= length:
            raise ValueError(f"accepted counts {list(accepted)} do not fit {length} of {len(self._reached)} draft tokens")
        self._requests = requests = len(accepted)
        self._filter(sum(accepted) / (requests * length), length)
        self._surprised = abs(self._deviation) > max(self._surprise * self.noise, _LEAST_SURPRISE)
        self._forget(self._keep_surprised if self._surprised else self._keep, len(self._reached) if self._surprised else length)
        for position in range(length):
            self._reached[position] += sum(count >= position for count in accepted) / requests
            self._passed[position] += sum(count > position for count in accepted) / requests
        self._refresh()

    def rest(self, floor: float) -> None:
        """Take in a round without drafts: evidence beyond `floor` rounds fades, the estimate hardly moves."""
        self._filled *= 1.0 - self._beta
        if self.evidence > floor:
            self._forget(max(self._keep, floor / self.evidence), len(self._reached))
            self._refresh()

    def _filter(self, hit_rate: float, length: int) -> None:
        mean = self.hit_rate(length)
        square = sum((2 * k + 1) * alive for k, alive in enumerate(self._survival[:length])) / length**2
        # dividing by the filled weight lets the first round after a pause count in full
        self._filled = (1.0 - self._beta) * self._filled + self._beta
        gain = self._beta / self._filled
        self._deviation += gain * (hit_rate - mean - self._deviation)
        self._variance = (1.0 - gain) ** 2 * self._variance + gain**2 * max(square - mean**2, 0.0) / self._requests

    def _forget(self, keep: float, length: int) -> None:
        self._prior += (1.0 - keep) * (self._survival[0] - self._prior)
        for position in range(len(self._reached)):
            kept = keep if position < length else keep ** (1.0 / _UNSEEN_MEMORY)
            self._reached[position] *= kept
            self._passed[position] *= kept

    def _refresh(self) -> None:
        alive, rate, self._survival = 1.0, self._prior, []
        weight = self._prior_weight / self._requests
        for reached, passed in zip(self._reached, self._passed, strict=True):
            rate = (passed + weight * rate) / (reached + weight)
            alive *= rate
            self._survival.append(alive)
