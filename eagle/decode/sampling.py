"""From logits to probabilities: temperature, top-k and top-p of each request, as transformers' warpers do it.

The draft's and the target's logits go through the same function, because rejection sampling needs the probabilities
that the tokens were really drawn with (eagle/decode/verify.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5  # logits divided by less can overflow float32


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    `temperature` 0: always the most probable token; else 1e-5 or more. `top_k`: only the k most probable tokens, 0 =
    off. `top_p`: only the smallest set of most probable tokens that has this much probability, 1 = off. `seed`: of
    the request's random numbers. Raises ValueError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, not {value!r}")
        for name, whole in (("top_k", self.top_k), ("seed", self.seed)):
            if isinstance(whole, bool) or not isinstance(whole, int) or not 0 <= whole < 2**63:
                raise ValueError(f"{name} must be a whole number from 0 on, below 2^63, not {whole!r}")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:  # refuses NaN too
            raise ValueError(f"temperature must be 0 or a finite number from {MIN_TEMPERATURE} on, not {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")


@dataclass(frozen=True)
class Warp:
    """The settings of n rows on a device.

    `temperature` [n] (float32), `top_k` [n] (int64), `top_p` [n] (float64: transformers rounds 1 - top_p to float32,
    not top_p). `rows`: the same on the host, so that no decision waits for the device.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    rows: tuple[SamplingParams, ...]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> Warp:
        """Return the settings `params`, one a row."""
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            tuple(params),
        )

    @property
    def greedy(self) -> bool:
        """Whether every row has temperature 0."""
        return all(p.temperature == 0 for p in self.rows)

    @property
    def plain(self) -> bool:
        """Whether no row uses top-k or top-p."""
        return all(p.top_k == 0 and p.top_p == 1 for p in self.rows)

    def take(self, rows: Sequence[int]) -> Warp:
        """Return the settings of these rows, in this order."""
        return Warp.of([self.rows[row] for row in rows], self.temperature.device)


def distribution(logits: Tensor, warp: Warp) -> Tensor:
    """Return the probabilities [n, ..., V] (float32) that logits [n, ..., V] stand for under the settings of the n rows.

    Temperature, then top-k, then top-p. A row of temperature 0 has probability 1 at its (first) most probable token.
    """
    sampled = [row for row, p in enumerate(warp.rows) if p.temperature > 0]
    if not sampled:
        return _one_hot(logits)
    if len(sampled) == len(warp.rows):
        temperature = _per_row(warp.temperature, logits)
        scores = logits.float() / temperature
        return torch.softmax(scores if warp.plain else _truncate(scores, warp), dim=-1)
    probabilities = _one_hot(logits)
    index = torch.tensor(sampled, device=logits.device)
    return probabilities.index_copy_(0, index, distribution(logits[index], warp.take(sampled)))


def _per_row(setting: Tensor, logits: Tensor) -> Tensor:
    """Return setting [n] in a shape that broadcasts with logits [n, ..., V]."""
    return setting.reshape(-1, *[1] * (logits.dim() - 1))


def _one_hot(logits: Tensor) -> Tensor:
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)


def _truncate(scores: Tensor, warp: Warp) -> Tensor:
    """Return scores [n, ..., V] with -inf where top-k, then top-p removes a token.

    All tokens that tie with the k-th best stay (TopKLogitsWarper). Top-p removes tokens from the least probable on
    while their cumulative probability is at most 1 - top_p, never the most probable one (TopPLogitsWarper).
    """
    vocab_size = scores.shape[-1]
    most = max(p.top_k for p in warp.rows)
    if most:
        best = scores.topk(min(most, vocab_size), dim=-1).values
        place = _per_row(warp.top_k.clamp(1, vocab_size) - 1, scores).expand(*scores.shape[:-1], 1)
        removed = (scores < best.gather(-1, place)) & _per_row(warp.top_k > 0, scores)
        scores = scores.masked_fill(removed, -torch.inf)
    nucleus = [row for row, p in enumerate(warp.rows) if p.top_p < 1]
    if nucleus:  # only these rows: the sort is the expensive part
        index = torch.tensor(nucleus, device=scores.device)
        part = scores if len(nucleus) == len(warp.rows) else scores[index]
        ascending, order = part.sort(dim=-1)
        tail = (1 - warp.top_p[index]).float()
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= _per_row(tail, part)
        removed[..., -1] = False
        removed = torch.zeros_like(removed).scatter_(-1, order, removed)
        scores = scores.index_copy(0, index, part.masked_fill(removed, -torch.inf))
    return scores
