"""F3.3: tokens sampled with speculation from the real target, counted against its exact probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.decoding_run import FIXED_K, Run
from benchmarks.figures import Measured
from eagle.bench.workload import Workload
from eagle.target.load import load_tokenizer

PROMPT = "Once upon a time"  # short, because each sample decodes it anew
ENOUGH = 5.0  # expected count of a chi-square cell
SPLIT = 50.0  # expected count from which on a sequence is split by its next token
Tokens = tuple[int, ...]  # tokens; a last -1 stands for all tokens that have no cell of their own there
REST = 0  # the cell of all that is too rare for one


def chi_square(run: Run) -> Measured:
    """F3.3: p-value of sampled continuations of one prompt, T=1, eagle31 K=3, against the target's exact probabilities.

    A cell is a sequence, split by its next token while SPLIT of it are expected. Next tokens with an expected count below
    ENOUGH share a cell of their history, or one of all histories where that is too few as well. float32, so that
    batching does not matter.
    """
    effort, batch = run.effort, max(run.effort.batches)
    prompt: list[int] = load_tokenizer(run.target)(PROMPT)["input_ids"]
    work = Workload([prompt], ["prompt"], ["text"])
    lab = run.lab(work, batch=batch, new_tokens=effort.sample_tokens, dtype="float32")
    numbers, expected = cells(run.transformers(lab), prompt, effort.sample_tokens, effort.samples)
    result = lab.engine("eagle31").generate(
        [prompt] * effort.samples, max_new_tokens=effort.sample_tokens, draft_tokens=FIXED_K, temperature=1.0, seed=run.seed,
        ignore_eos=True, batch=batch,
    )  # fmt: skip
    seen = Counter(cell(tokens, numbers) for tokens in result.tokens)
    chi = sum((seen[number] - count) ** 2 / count for number, count in expected.items())
    freedom = len(expected) - 1
    half = torch.tensor([freedom / 2, chi / 2], dtype=torch.float64)
    value = float(torch.special.gammaincc(half[0], half[1]))
    about = run.setting(
        lab, prompt=PROMPT, method="eagle31", draft_tokens=FIXED_K, temperature=1.0, batch=batch, samples=effort.samples,
        tokens_each=effort.sample_tokens, sampled_tokens=result.stats.tokens,
    )  # fmt: skip
    row = {
        "cells": len(expected),
        "smallest_expected": round(min(expected.values()), 2),
        "chi_square": round(chi, 3),
        "degrees_of_freedom": freedom,
        "p": value,
        "acceptance_length": round(result.stats.acceptance_length, 4),
        "acceptance_by_position": [round(share, 4) for share in result.stats.acceptance_by_position],
    }
    return run.measured(value, [about, row])


@torch.inference_mode()
def cells(target: PreTrainedModel, prompt: list[int], length: int, samples: int) -> tuple[dict[Tokens, int], dict[int, float]]:
    """Return the cell of each sequence that is told apart, and the expected count of each cell; these add up to `samples`."""
    numbers: dict[Tokens, int] = {}
    expected = {REST: 0.0}
    histories: dict[Tokens, float] = {(): float(samples)}

    def add(sequence: Tokens, count: float) -> None:
        number = REST if count < ENOUGH else len(numbers) + 1
        numbers[sequence] = number
        expected[number] = expected.get(number, 0.0) + count

    for level in range(length):
        longer: dict[Tokens, float] = {}
        for history, p in _following(target, prompt, list(histories)):
            counts = histories[history] * p
            likely = (counts >= ENOUGH).nonzero()[:, 0].tolist()
            for token in likely:
                if level + 1 < length and counts[token] >= SPLIT:
                    longer[*history, token] = float(counts[token])
                else:
                    add((*history, token), float(counts[token]))
            add((*history, -1), max(histories[history] - float(counts[likely].sum()), 0.0))
        histories = longer
    if expected[REST] < ENOUGH and len(expected) > 1:
        smallest = min((number for number in expected if number != REST), key=expected.__getitem__)
        expected[REST] += expected.pop(smallest)
        numbers = {sequence: REST if number == smallest else number for sequence, number in numbers.items()}
    return numbers, expected


def _following(target: PreTrainedModel, prompt: list[int], histories: list[Tokens]) -> Iterator[tuple[Tokens, Tensor]]:
    """Yield each history (of one length) with the target's probabilities [V] (float64) of the token after it."""
    for start in range(0, len(histories), 32):
        part = histories[start : start + 32]
        ids = torch.tensor([[*prompt, *history] for history in part], device=target.device)
        logits: Tensor = target(ids, logits_to_keep=1, use_cache=False).logits[:, -1]
        yield from zip(part, logits.double().softmax(-1).cpu(), strict=True)


def cell(tokens: list[int], numbers: dict[Tokens, int]) -> int:
    """Return the cell of a sampled sequence."""
    for length in range(1, len(tokens) + 1):
        start = tuple(tokens[:length])
        if start in numbers:
            return numbers[start]
        if (*start, -1) not in numbers:  # not told apart any further
            return numbers[*start[:-1], -1]
    raise ValueError(f"a sequence of {len(tokens)} tokens is shorter than the cells' own")
