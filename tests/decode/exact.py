"""Exact distributions of verifiers that are called as they are: their outcome as a function of one uniform at a time.

A verifier is a step function of each of its uniforms. `edge` finds by bisection of the real function where it steps, to
2^-52; products of such lengths are the probabilities of its outcomes, with no statistics and no second formula.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle.decode.sampling import SamplingParams, Warp, distribution

TOP = 1 - 2.0**-52  # the largest uniform there is


def edge(holds: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Return for each of `count` rows the length of the u in [0, 1) where holds(u [count]) is true: they begin at 0."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(52):
        middle = (low + high) / 2
        true = holds(middle)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    return torch.where(holds(low), high, low)


def token_masses(following: Callable[[Tensor], Tensor], count: int, vocab_size: int) -> Tensor:
    """Return the probability [count, V] of each token that following(u [count]) gives; tokens ascend with u."""
    cuts = [torch.zeros(count, dtype=torch.float64)]
    for token in range(vocab_size - 1):
        cuts.append(edge(lambda u, t=token: following(u) <= t, count))  # type: ignore[misc]
    cuts.append(torch.ones(count, dtype=torch.float64))
    return torch.stack(cuts, 1).diff(dim=1)


def tables(
    seed: int, vocab_size: int, depth: int, params: SamplingParams, ids: Tensor | None = None, noise: float = 0.0
) -> list[Tensor]:
    """Return random distributions of the token after every history: entry i is [V^i, V], float64.

    A history is a number in base V, its first token the highest digit. Each distribution is `distribution` of `params`.
    For a draft of this target: the logits of the tokens `ids` only (None = all), with `noise` added.
    """
    target, draft, found = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000), []
    for level in range(depth):
        logits = torch.randn(vocab_size**level, vocab_size, generator=target) * 1.5
        logits = logits if ids is None else logits[:, ids]
        logits = logits + noise * torch.randn(logits.shape, generator=draft)
        rows = distribution(logits, Warp.of([params] * len(logits), "cpu")).double()
        found.append(rows / rows.sum(1, keepdim=True))
    return found


def continued(masses: list[Tensor], p: list[Tensor]) -> Tensor:
    """Return the joint [V^D] of D tokens, when masses[i] [V^(i+1)] is what a round left ending after i + 1 tokens.

    What a round did not decide is continued by the target's tables `p`.
    """
    joint = torch.zeros(1, dtype=torch.float64)
    for mass, table in zip(masses, p, strict=True):
        joint = (joint[:, None] * table).flatten() + mass
    return joint


def target_joint(p: list[Tensor]) -> Tensor:
    """Return the target's own joint [V^D]."""
    joint = torch.ones(1, dtype=torch.float64)
    for table in p:
        joint = (joint[:, None] * table).flatten()
    return joint


def distance(a: Tensor, b: Tensor) -> float:
    """Return the total variation between two joints."""
    return 0.5 * float((a - b).abs().sum())
