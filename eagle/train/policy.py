"""Stage 2: policy gradient of the expected accepted length, with a cross-entropy anchor.

One optimiser step: rows of one temperature, the rounds that serving would run in them (`rollout`), the objective on those
rounds (`reward`), AdamW. Method exact: at temperature 0, J = sum_k prod_{i<=k} q_i(y_i) along the target's greedy path y
(D-PACE with a = 0); above it the unbiased, Rao-Blackwellised gradient of E[L] along drafts sampled from q
(`objectives.policy_terms`). Methods group and naive: sampled drafts and accept bits (`group`). With `policy.path` answers the
exact method looks at the target's own answers instead, and at the rounds that serving would need for them (`answers`).
Supervised losses treat every position alike; this objective moves probability where it decides how long a round gets.

The draft that is kept is the one with the best measured validation acceptance, the distilled draft included: stage 2
never makes the product worse by its own measure. Its draft-vocabulary map is the distilled draft's.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle import manifest
from eagle.config import DepthStage
from eagle.draft.io import load_draft, save_draft
from eagle.errors import StepFailed
from eagle.progress import Track, say
from eagle.steps import StepContext
from eagle.target.load import ensure_target, pick_device, setup_torch
from eagle.train.answers import AnswerRollouts
from eagle.train.checkpoint import load_checkpoint, save_checkpoint
from eagle.train.distill import make_optimizer
from eagle.train.features import ensure_features
from eagle.train.reference import KL_ROWS, Reference
from eagle.train.reward import Objective, objective
from eagle.train.rollout import Rounds
from eagle.train.schedule import Pace, learning_rate
from eagle.train.validate import Acceptance, heldout_rows, replay_acceptance
from eagle.train.visits import MIN_ANSWER, Rollouts, arithmetic


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
        self.reference = Reference(self.model) if self.config.steps else None
        self.progress = self._resume()
        if self.config.steps:
            length = self.progress.before.length
            if self.config.path == "answers":
                self.answers: AnswerRollouts | None = AnswerRollouts(config, self.store, self.model, length)
                self.skipped = self.answers.skipped
            else:
                self.answers, self.rollouts = None, Rollouts(config, self.store, self.model, target, length)
                self.skipped = self.rollouts.skipped
            if self.skipped:
                say(f"policy: {self.skipped} training rows with an answer below {MIN_ANSWER} tokens are skipped")

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
        goal, norm, kl, temperature, rounds = self._drafts(step) if self.answers is None else self._answers(step, self.answers)
        return {
            "step": step + 1, "temperature": temperature, "rounds": rounds, "expected_accepted": goal.expected,
            "accepted": goal.accepted, "reward": goal.reward, "kl_to_distilled": kl if math.isfinite(kl) else None,
            "anchor_cross_entropy": goal.anchor, "anchor_weight": self.config.anchor_weight,
            "gradient_norm": norm if math.isfinite(norm) else None, "learning_rate": rate, "acceptance_length": None,
        }

    def _drafts(self, step: int) -> tuple[Objective, float, float, float, int]:
        """Update along the draft's own rollouts; return (objective, gradient norm, KL, temperature, rounds)."""
        rounds, generator = self.rollouts.at(step)
        kl, alphas = self._compare(rounds)
        goal: Objective | None = None
        for update in range(self.config.updates):
            rounds = self.rollouts.again(rounds) if update else rounds
            goal = objective(rounds, self.config, generator, goal.judged if goal else None, alphas)
            norm = self._update(goal, rounds.temperature)
            if not math.isfinite(norm):
                break
        assert goal is not None  # noqa: S101  (there is at least one update)
        return goal, norm, kl, rounds.temperature, len(rounds.token)

    def _answers(self, step: int, source: AnswerRollouts) -> tuple[Objective, float, float, float, int]:
        """Update along the target's own answers; returns what `_drafts` returns."""
        answers, generator = source.at(step)
        with arithmetic(self.device, self.context.config.distill.autocast):
            kl, _ = self._compare(answers.some_rounds(KL_ROWS, self.config.draft_tokens, source.ends))
        goal = source.objective(answers, generator)
        return goal, self._update(goal, answers.temperature), kl, answers.temperature, len(answers.anchors()[0])

    def _update(self, goal: Objective, temperature: float) -> float:
        """Take one optimiser step; return the gradient's norm. One that is not finite ends the stage, without a step."""
        self.optimizer.zero_grad(set_to_none=True)
        goal.loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm))
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            self.progress.ended = f"the gradient is not finite (temperature {temperature:g})"
        return norm

    def _compare(self, rounds: Rounds) -> tuple[float, Tensor | None]:
        """Return (KL to the distilled draft before the update; its alphas along the rounds, where they are the baseline)."""
        assert self.reference is not None  # noqa: S101  (made for any number of steps)
        wanted = self.config.method != "exact" and self.config.baseline == "reference"
        with arithmetic(self.device, self.context.config.distill.autocast):
            return self.reference.kl(rounds), self.reference.alphas(rounds) if wanted else None

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
            "steps": now.pace.step, "best_step": now.best_step, "rows_dropped": self.store.dropped,
            "rows_skipped": self.skipped if self.config.steps else 0,
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
