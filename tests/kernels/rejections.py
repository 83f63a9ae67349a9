"""Random rounds of chain rejection sampling, and what any form of it may return; shared by the tests of each form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.decode.verify import acceptance, residual, scatter

TOP = 1 - 2.0**-52


@dataclass(frozen=True)
class Case:
    """The arguments of `eager.rejection`, in its order."""

    draft: Tensor
    q_chosen: Tensor
    q: Tensor | None
    p: Tensor
    ids: Tensor | None
    accept_uniform: Tensor
    token_uniform: Tensor

    def arguments(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def make(
    count: int, length: int, vocab: int, draft_vocab: int | None, *, seed: int = 0, bonus: bool = True, drawn: bool = True,
    dtype: torch.dtype = torch.float32, zeros: float = 0.0, edges: bool = False,
) -> Case:  # fmt: skip
    """A round with q near p. `zeros`: the share of tokens without probability. `edges`: uniforms of 0 and the largest."""
    generator = torch.Generator().manual_seed(seed)

    def soft(logits: Tensor) -> Tensor:
        cut = torch.rand(logits.shape, generator=generator) < zeros
        return torch.softmax(logits.masked_fill(cut & (logits < logits.amax(-1, keepdim=True)), -torch.inf), -1)

    logits = torch.randn(count, length + 1, vocab, generator=generator, dtype=torch.float64) * 2
    ids = None if draft_vocab is None else torch.randperm(vocab, generator=generator)[:draft_vocab]
    names = torch.arange(vocab) if ids is None else ids
    q = soft(logits[:, :length, names] + torch.randn(count, length, len(names), generator=generator)).to(dtype)
    index = torch.multinomial(q.reshape(-1, len(names)), 1, generator=generator) if q.numel() else torch.zeros(0).long()
    index = index.reshape(count, length)
    chosen = q.gather(2, index[:, :, None])[:, :, 0] if drawn else torch.ones(count, length, dtype=dtype)
    numbers = [torch.rand(count, width, generator=generator, dtype=torch.float64) for width in (length, length + 1)]
    if edges:
        numbers = [torch.where(u < 0.3, 0.0, torch.where(u > 0.7, TOP, u)) for u in numbers]
    p = soft(logits)[:, : length + bonus].to(dtype)
    return Case(names[index], chosen, q if drawn else None, p, ids, *numbers)


def check(case: Case, accepted: Tensor, following: Tensor) -> int:
    """Assert that a form's answer is right; returns how many tokens differ from the exact inversion.

    `accepted` must be exact: one float64 division and comparison. `following` must have positive weight, and its interval
    of the cumulative weights must hold u times the total within V float64 roundings of the total, what sums in any order
    can be off by.
    """
    length, width, vocab = case.draft.shape[1], case.p.shape[1], case.p.shape[2]
    differ = 0
    for row in range(len(case.draft)):
        kept = 0
        while kept < length:
            odds = acceptance(case.p[row, kept, case.draft[row, kept]].double(), case.q_chosen[row, kept].double())
            if not case.accept_uniform[row, kept] < odds:
                break
            kept += 1
        assert int(accepted[row]) == kept
        if kept == width:
            assert int(following[row]) == -1
            continue
        weights = case.p[row, kept][None].double()
        if kept < length:
            if case.q is None:
                q = torch.nn.functional.one_hot(case.draft[row, kept][None], vocab).double()
            else:
                q = scatter(case.q[row, kept][None].double(), case.ids, vocab)
            weights = residual(weights, q)
        cumulative = weights[0].cumsum(0)
        aim, slack = case.token_uniform[row, kept] * cumulative[-1], vocab * 2.0**-53 * cumulative[-1]
        token = int(following[row])
        assert 0 <= token < vocab
        assert weights[0, token] > 0
        assert cumulative[token] - weights[0, token] - slack <= aim <= cumulative[token] + slack
        differ += token != int((cumulative > aim).nonzero()[0])
    return differ
