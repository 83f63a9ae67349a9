"""Which rows stage 2 visits at which step and temperature, and the rounds it runs there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle.config import Config, TemperatureShare
from eagle.draft.model import DraftModel
from eagle.errors import DataError
from eagle.target.load import load_target
from eagle.train import rollout
from eagle.train.batches import collate
from eagle.train.features import FeatureStore
from eagle.train.rollout import DraftPass, Rounds, TreeVerifier

_JITTER = 0.2  # rows are sorted by length times exp(noise of this size): little padding, yet other batches each epoch
MIN_ANSWER = 2  # tokens: one to start a round after, one to draft


def temperature_schedule(shares: Sequence[TemperatureShare], steps: int) -> list[float]:
    """Return the rollout temperature of every step: each share as evenly spread as its weight allows, no randomness."""
    total = sum(share.weight for share in shares)
    given = [0] * len(shares)
    schedule = []
    for step in range(1, steps + 1):
        owed = [share.weight / total * step - got for share, got in zip(shares, given, strict=True)]
        pick = owed.index(max(owed))
        given[pick] += 1
        schedule.append(shares[pick].temperature)
    return schedule


def arithmetic(device: torch.device | str, autocast: bool) -> AbstractContextManager[Any]:
    """Return the context of a draft's matrix products (bf16 where configured)."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast)


def usable_rows(store: FeatureStore) -> tuple[list[int], int]:
    """Return (training rows with an answer of MIN_ANSWER tokens or more, how many others there are). DataError when none is."""
    train = store.select("train")
    usable = [i for i in train if int(store.loss_mask(i).sum()) >= MIN_ANSWER]
    if not usable:
        raise DataError(f"no training row has an answer of {MIN_ANSWER} tokens or more; generate more data (dataset step)")
    return usable, len(train) - len(usable)


def step_generator(seed: int, step: int) -> torch.Generator:
    """Return the random stream of an optimiser step: a function of seed and step only."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, step]).generate_state(1)[0]))


class RowOrder:
    """Which rows are visited when: every epoch each row once, in batches of `size` rows of similar length."""

    def __init__(self, rows: Sequence[int], lengths: Sequence[int], size: int, seed: Sequence[int]) -> None:
        self._rows, self._lengths = np.asarray(rows), np.asarray(lengths, dtype=np.float64)
        self._size, self._seed = size, list(seed)

    def at(self, visit: int) -> list[int]:
        """Return the rows of visit number `visit` (from 0): a function of seed and visit only."""
        batches = -(-len(self._rows) // self._size)
        epoch, inside = divmod(visit, batches)
        random = np.random.default_rng([*self._seed, epoch])
        order = np.argsort(self._lengths * np.exp(_JITTER * random.standard_normal(len(self._lengths))), kind="stable")
        first = int(random.permutation(batches)[inside]) * self._size
        return [int(row) for row in self._rows[order[first : first + self._size]]]


class Rollouts:
    """The rounds of every step: a function of the weights, the seed and the step number."""

    def __init__(self, config: Config, store: FeatureStore, model: DraftModel, target_folder: Path, mean_advance: float) -> None:
        self.config, self.store, self.model, self.mean_advance = config.policy, store, model, mean_advance
        self.seed, self.device = config.runtime.seed, model.lm_head.weight.device
        self.schedule = temperature_schedule(self.config.temperatures, self.config.steps)
        self._drafts = 1 if self.config.method == "exact" else self.config.group_size  # per anchor, at temperature > 0
        self._autocast = config.distill.autocast
        usable, self.skipped = usable_rows(store)
        greedy = [i for i in usable if store.rows[i].temperature == 0]
        sampled = [i for i in usable if store.rows[i].temperature > 0]
        self._own_path = bool(greedy)  # temperature-0 rounds follow the rows themselves
        lengths = {i: store.rows[i].length for i in usable}
        self._orders = {
            cold: RowOrder(rows, [lengths[i] for i in rows], self.config.sequences_per_step, [self.seed, int(cold)])
            for cold, rows in ((True, greedy or usable), (False, sampled or usable))
        }
        self._ends = torch.tensor(model.spec.eos_token_id, dtype=torch.long, device=self.device)
        self._verifier: TreeVerifier | None = None
        if any(t > 0 or not self._own_path for t in self.schedule):
            about = config.target
            target = load_target(target_folder, about.dtype, str(self.device), trust_remote_code=about.trust_remote_code)
            self._verifier = TreeVerifier(target, model.draft_ids())

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Return the context of the draft's matrix products."""
        return arithmetic(self.device, self._autocast)

    def at(self, step: int) -> tuple[Rounds, torch.Generator]:
        """Run the rollouts of `step` with the model as it is. Returns the rounds, with gradient, and the step's generator."""
        k, temperature = self.config.draft_tokens, self.schedule[step]
        cold = temperature == 0
        n = self.config.anchors_per_sequence if cold else max(1, self.config.anchors_per_sequence // self._drafts)
        visit = sum((t == 0) == cold for t in self.schedule[:step])
        generator = step_generator(self.seed, step)
        batch = collate(self.store, self._orders[cold].at(visit), str(self.device))
        stretch = rollout.draw_stretch(batch, n, k, self.mean_advance, generator)
        with self.arithmetic():
            start = DraftPass(self.model, stretch.batch)
        with self.arithmetic():  # a context of its own: weights that it casts without gradient must not be cached for the next
            rows, anchors = rollout.walk_rounds(start, stretch, n, k, temperature, generator)
        with self.arithmetic():
            if cold:
                verifier = None if self._own_path else self._verifier
                return rollout.greedy_rounds(start, rows, anchors, k, self._ends, verifier), generator
            assert self._verifier is not None  # noqa: S101  (loaded above for any temperature > 0)
            rows, anchors = (x.repeat_interleave(self._drafts) for x in (rows, anchors))
            rounds = rollout.sampled_rounds(start, rows, anchors, k, self._ends, self._verifier, temperature, generator)
            return rounds, generator

    def again(self, rounds: Rounds) -> Rounds:
        """Return the same rounds, tokens and target's side, with the logits of the model as it is now."""
        origin = rounds.origin
        assert origin is not None  # noqa: S101  (`at` always gives it)
        with self.arithmetic():
            logits = rollout.along(DraftPass(self.model, origin.batch), origin, rounds.temperature)
        return replace(rounds, logits=logits)
