"""Stage 2: exact policy gradient of the expected accepted length, with a cross-entropy anchor.

One optimiser step: rows of one temperature, the rounds that serving would run in them (`rollout`), the objective on those
rounds, AdamW. Temperature 0: J = sum_k prod_{i<=k} q_i(y_i) along the target's greedy path y (D-PACE with a = 0).
Temperature > 0: the unbiased, Rao-Blackwellised gradient of E[L] along drafts sampled from q (`objectives.policy_terms`).
Supervised losses treat every position alike; this objective moves probability where it decides how long a round gets.

The draft that is kept is the one with the best measured validation acceptance, the distilled draft included: stage 2
never makes the product worse by its own measure. Its draft-vocabulary map is the distilled draft's.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle import manifest
from eagle.config import Config, DepthStage, TemperatureShare
from eagle.draft.io import load_draft, save_draft
from eagle.draft.model import DraftModel
from eagle.errors import DataError, StepFailed
from eagle.progress import Track, say
from eagle.steps import StepContext
from eagle.target.load import ensure_target, load_target, pick_device, setup_torch
from eagle.train import objectives, rollout
from eagle.train.batches import collate
from eagle.train.checkpoint import load_checkpoint, save_checkpoint
from eagle.train.distill import make_optimizer
from eagle.train.features import FeatureStore, ensure_features
from eagle.train.rollout import DraftPass, Rounds, TreeVerifier
from eagle.train.schedule import Pace, learning_rate
from eagle.train.validate import Acceptance, heldout_rows, replay_acceptance

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


@dataclass(frozen=True)
class Objective:
    """What one step optimises. `loss` = -surrogate + weight * anchor; the floats are means over the rounds.

    `expected` E[L] of the rollouts, tokens a round (bonus not counted); `accepted` tokens really accepted (T = 0: the
    draft's argmax; T > 0: coin tosses); `anchor` soft cross-entropy, nats a position.
    """

    loss: Tensor
    expected: float
    accepted: float
    anchor: float


def objective(rounds: Rounds, anchor_weight: float, generator: torch.Generator) -> Objective:
    """Return the loss on `rounds` and what to report of them. The anchor is the mean over live positions."""
    live = rounds.live.to(torch.float32)
    alphas, entropies, log_q, hits = [], [], [], []
    for i, logits in enumerate(rounds.logits):
        token = rounds.token[:, i]
        if rounds.dense is not None:
            alpha, entropy = objectives.dense_terms(logits, rounds.dense[:, i])
        elif rounds.topk_index is not None and rounds.topk_prob is not None:
            entropy = objectives.soft_cross_entropy(logits, rounds.topk_index[:, i], rounds.topk_prob[:, i])
        if rounds.temperature == 0:
            alpha = objectives.path_probability(logits, token)
            hits.append(logits.argmax(1) == token)
        else:
            log_q.append(objectives.log_probs_at(logits, token[:, None]).squeeze(1))
        alphas.append(alpha)
        entropies.append(entropy)
    alpha = torch.stack(alphas, 1) * live
    anchor = (torch.stack(entropies, 1) * live).sum() / live.sum().clamp_min(1.0)
    if rounds.temperature == 0:
        surrogate = value = objectives.expected_accepted_length(alpha)
        hit = torch.stack(hits, 1) & rounds.live
    else:
        dense = rounds.dense
        assert dense is not None  # noqa: S101  (sampled_rounds always gives it)
        log_p = dense.gather(2, rounds.token[:, :, None]).squeeze(2).log()
        logs = torch.stack(log_q, 1)
        terms = objectives.policy_terms(alpha, logs, log_p)
        surrogate, value = terms.surrogate, terms.value
        chance = (log_p - logs.detach()).clamp_max(0.0).exp()
        hit = (torch.rand(chance.shape, generator=generator).to(chance.device) < chance) & rounds.live
    accepted = hit.long().cumprod(1).sum(1).float().mean()
    loss = -surrogate.mean() + anchor_weight * anchor
    return Objective(loss, float(value.detach().mean()), float(accepted), float(anchor.detach()))


class Rollouts:
    """The rounds of every step: a function of the weights, the seed and the step number."""

    def __init__(self, config: Config, store: FeatureStore, model: DraftModel, target_folder: Path, mean_advance: float) -> None:
        self.config, self.store, self.model, self.mean_advance = config.policy, store, model, mean_advance
        self.seed, self.device = config.runtime.seed, model.lm_head.weight.device
        self.schedule = temperature_schedule(self.config.temperatures, self.config.steps)
        self._autocast = config.distill.autocast
        usable = [i for i in store.select("train") if store.rows[i].length - store.rows[i].prompt_length >= MIN_ANSWER]
        if not usable:
            raise DataError(f"no training row has an answer of {MIN_ANSWER} tokens or more; generate more data (dataset step)")
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
        """Return the context of the draft's matrix products (bf16 where configured)."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)

    def at(self, step: int) -> tuple[Rounds, torch.Generator]:
        """Run the rollouts of `step` with the model as it is. Returns the rounds, with gradient, and the step's generator."""
        k, n, temperature = self.config.draft_tokens, self.config.anchors_per_sequence, self.schedule[step]
        cold = temperature == 0
        visit = sum((t == 0) == cold for t in self.schedule[:step])
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0]))
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
            rounds = rollout.sampled_rounds(start, rows, anchors, k, self._ends, self._verifier, temperature, generator)
            return rounds, generator


@dataclass
class Progress:
    """What a checkpoint carries beside the weights: time, curves, the best draft so far and why the stage ended."""

    pace: Pace
    before: Acceptance
    best: Acceptance
    best_step: int = 0
    ended: str = ""
    curves: list[dict[str, Any]] = field(default_factory=list)


class Stage:
    """The training loop. `context.work` holds the checkpoint and `best-<step>/`, the best draft that was measured."""

    def __init__(self, context: StepContext) -> None:
        config = context.config
        self.context, self.config = context, config.policy
        setup_torch(config.runtime.threads, config.runtime.seed)
        self.device = pick_device(config.runtime.device)
        self.distilled = context.inputs["distill"] / "draft"
        target = ensure_target(config.target, context.root, context.cache)
        self.model = load_draft(self.distilled, target, self.device, "float32")
        self.vocabulary = self.model.draft_ids().clone()
        self.store = ensure_features(
            context.inputs["dataset"], target, self.model.spec.aux_layers, config.distill.top_k, context.cache, config.target.dtype,
            device=self.device, trust_remote_code=config.target.trust_remote_code,
        )
        self.rows = heldout_rows(self.store, self.config.eval_sequences)
        self.optimizer = make_optimizer(self.model, self.config.learning_rate, self.config.weight_decay, config.distill.betas)
        self.progress = self._resume()
        if self.config.steps:
            self.rollouts = Rollouts(config, self.store, self.model, target, self.progress.before.length)

    def _resume(self) -> Progress:
        stages = [DepthStage(depth=self.config.draft_tokens, steps=max(self.config.steps, 1))]
        budget = 60.0 * self.config.max_minutes
        saved = load_checkpoint(self.context.work, self.model, self.optimizer)
        if saved is None:
            before = self.measure()
            return Progress(Pace(stages, budget), before, before)
        say(f"policy: goes on from step {saved['pace']['step']}")
        return Progress(
            Pace.from_json(stages, budget, saved["pace"]), _acceptance(saved["before"]), _acceptance(saved["best"]),
            saved["best_step"], saved["ended"], saved["curves"],
        )

    def measure(self) -> Acceptance:
        """Validation: T = 0 acceptance length (bonus counted) on held-out rows, K = policy.draft_tokens."""
        self.model.eval()
        return replay_acceptance(
            self.model, self.store, self.rows, self.config.draft_tokens, autocast=self.context.config.distill.autocast
        )

    def train(self) -> None:
        """Run the steps that are left, until the budget is spent or the guard stops the stage."""
        now = self.progress
        with Track("policy", self.config.steps, "steps", done=now.pace.step) as track:
            while not now.pace.done and not now.ended:
                began = time.monotonic()
                record = self._step(now.pace.step)
                now.curves.append(record)
                now.pace.step_done(time.monotonic() - began)
                began = time.monotonic()
                last = now.pace.done or bool(now.ended)
                if last or now.pace.step % self.config.eval_every == 0:
                    self._evaluate(record)
                    self._checkpoint()
                elif now.pace.step % self.config.checkpoint_every == 0:
                    self._checkpoint()
                now.pace.other_work(time.monotonic() - began)
                track.advance(1, f"T={record['temperature']:g} J={record['expected_accepted']:.3f} best {now.best.length:.3f}")
        if now.ended:
            say(f"policy: stopped at step {now.pace.step}: {now.ended}")

    def _step(self, step: int) -> dict[str, Any]:
        rate = learning_rate(
            step, self.progress.pace.progress, base=self.config.learning_rate,
            min_ratio=self.context.config.distill.min_learning_rate_ratio, warmup=self.config.warmup_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        rounds, generator = self.rollouts.at(step)
        goal = objective(rounds, self.config.anchor_weight, generator)
        self.optimizer.zero_grad(set_to_none=True)
        goal.loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm))
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            self.progress.ended = f"the gradient is not finite (temperature {rounds.temperature:g})"
        return {
            "step": step + 1, "temperature": rounds.temperature, "rounds": len(rounds.token), "expected_accepted": goal.expected,
            "accepted": goal.accepted, "anchor_cross_entropy": goal.anchor, "gradient_norm": norm if math.isfinite(norm) else None,
            "learning_rate": rate, "acceptance_length": None,
        }

    def _evaluate(self, record: dict[str, Any]) -> None:
        now, measured = self.progress, self.measure()
        record["acceptance_length"] = measured.length
        if measured.length > now.best.length:
            now.best, now.best_step = measured, now.pace.step
            save_draft(self._best_folder(), self.model)
        elif measured.length < now.best.length * (1.0 - self.config.max_drop):
            now.ended = f"validation acceptance length fell from {now.best.length:.3f} to {measured.length:.3f}"

    def _best_folder(self) -> Path:
        return self.context.work / f"best-{self.progress.best_step:08d}"

    def _checkpoint(self) -> None:
        now = self.progress
        extra = {
            "pace": now.pace.as_json(), "before": now.before.as_json(), "best": now.best.as_json(), "best_step": now.best_step,
            "ended": now.ended, "curves": now.curves,
        }
        save_checkpoint(self.context.work, self.model, self.optimizer, now.pace.step, extra)
        for old in self.context.work.glob("best-*"):
            if old != self._best_folder():
                shutil.rmtree(old)

    def publish(self) -> dict[str, Any]:
        """Write the kept draft and the curves into `context.out`; return the metrics."""
        now, out = self.progress, self.context.out / "draft"
        if not torch.equal(self.model.draft_ids(), self.vocabulary):
            raise StepFailed("policy: the draft-vocabulary map changed during training; this is a defect, please report it")
        shutil.copytree(self._best_folder() if now.best_step else self.distilled, out)
        manifest.write_json(self.context.out / "curves.json", now.curves)
        gain = f"{now.before.length:.3f} -> {now.best.length:.3f}"
        if now.best_step:
            say(f"policy: validation acceptance length {gain} at step {now.best_step}")
        elif self.config.steps:
            say(f"policy: stage 2 did not improve on the distilled draft ({now.before.length:.3f}), which is kept")
        return {
            "acceptance_length": now.best.length, "acceptance_length_before": now.before.length,
            "acceptance_by_position": list(now.best.by_position), "kept": "policy" if now.best_step else "distilled",
            "steps": now.pace.step, "best_step": now.best_step,
        }


def _acceptance(saved: dict[str, Any]) -> Acceptance:
    return Acceptance(saved["acceptance_length"], tuple(saved["acceptance_by_position"]), saved["rounds"])


def run(context: StepContext) -> dict[str, Any]:
    """Fine-tune the distilled draft. Fills `context.out` with draft/ and curves.json and returns the metrics.

    Steps = 0 copies the distilled draft. A killed run goes on from the checkpoint in `context.work` and, as long as
    `max_minutes` does not cut it short, ends with the same weights.
    """
    stage = Stage(context)
    if context.config.policy.steps:
        stage.train()
    return stage.publish()
