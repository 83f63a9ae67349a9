"""Batches of rows: which rows at which step (a pure function of seed and step), and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle.errors import DataError
from eagle.train.features import FeatureStore

_JITTER = 0.1  # rows are sorted by length times exp(noise of this size), so that batches differ between epochs


@dataclass(frozen=True)
class Batch:
    """B rows, right padded to T. `topk_*` [B, T, k] and `own` [B, T] belong to the token after each position; zeros in the padding.

    tokens [B, T] int64 target ids; lengths [B] int64; aux [B, T, A*Ht] bf16; loss_mask [B, T] bool, True at answer
    tokens; topk_index int64 target ids, topk_prob float32 at temperature 1, not renormalised; own float32, the target's log p of
    the row's next token at temperature 1, where that is an answer's; rows: numbers in the store.
    """

    rows: tuple[int, ...]
    tokens: Tensor
    lengths: Tensor
    aux: Tensor
    loss_mask: Tensor
    topk_index: Tensor
    topk_prob: Tensor
    own: Tensor

    def anchors(self) -> tuple[Tensor, Tensor]:
        """Return (rows, cols) int64 [N] of the positions t whose first draft token, x[t+2], is an answer's token."""
        where = self.loss_mask[:, 2:].nonzero()
        return where[:, 0], where[:, 1]


def collate(store: FeatureStore, rows: Sequence[int], device: str = "cpu") -> Batch:
    """Gather rows of the store into one padded batch on `device`."""
    lengths = [store.rows[i].length for i in rows]
    shape = (len(rows), max(lengths))
    first = store.aux(rows[0])
    tokens = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    aux = torch.zeros(*shape, first.shape[1], dtype=torch.bfloat16)
    index = torch.zeros(*shape, store.top_k, dtype=torch.int64)
    prob = torch.zeros(*shape, store.top_k, dtype=torch.float32)
    own = torch.zeros(shape, dtype=torch.float32)
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids, p = store.targets(row)
        tokens[at, :length] = torch.from_numpy(store.tokens(row))
        mask[at, :length] = torch.from_numpy(store.loss_mask(row))
        aux[at, :length] = store.aux(row)
        index[at, :length] = torch.from_numpy(ids)
        prob[at, :length] = torch.from_numpy(p)
        own[at, :length] = torch.from_numpy(store.own_log_probs(row))
    made = (torch.tensor(lengths), aux, mask, index, prob, own)
    return Batch(tuple(rows), tokens.to(device), *(tensor.to(device) for tensor in made))


def trainable(store: FeatureStore, rows: Sequence[int]) -> list[int]:
    """Return those of `rows` in which at least one draft token falls on an answer's token."""
    return [i for i in rows if bool(store.loss_mask(i)[2:].any())]


class BatchPlan:
    """Which rows make the batch of a step: every epoch visits each row once, in batches of similar length.

    A batch holds at most `tokens_per_step` tokens with padding (a longer row comes alone). Depends only on the lengths,
    the seed and the step, so a resumed run sees the batches that it would have seen.
    """

    def __init__(self, rows: Sequence[int], lengths: Sequence[int], tokens_per_step: int, seed: int) -> None:
        if not rows:
            raise DataError("no training row has an answer that a draft could learn; generate more data (dataset step)")
        self._rows, self._lengths = np.asarray(rows), np.asarray(lengths, dtype=np.int64)
        self._tokens, self._seed = tokens_per_step, seed
        self._ends: list[int] = []  # steps at the end of each epoch
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def at(self, step: int) -> list[int]:
        """Return the store's row numbers of the batch of optimiser step `step` (from 0)."""
        while not self._ends or step >= self._ends[-1]:
            number = len(self._ends)
            self._epoch = (number, self._make(number))
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._epoch[1]))
        epoch = int(np.searchsorted(self._ends, step, side="right"))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._make(epoch))
        return self._epoch[1][step - (self._ends[epoch - 1] if epoch else 0)]

    def _make(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng([self._seed, epoch])
        order = np.argsort(self._lengths * np.exp(_JITTER * random.standard_normal(len(self._lengths))), kind="stable")
        batches: list[list[int]] = []
        batch: list[int] = []
        longest = 0
        for i in order:
            longest = max(longest, int(self._lengths[i]))
            if batch and (len(batch) + 1) * longest > self._tokens:
                batches.append(batch)
                batch, longest = [], int(self._lengths[i])
            batch.append(int(self._rows[i]))
        batches.append(batch)
        return [batches[i] for i in random.permutation(len(batches))]
