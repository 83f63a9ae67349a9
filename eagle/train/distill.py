"""Stage 1: distil a draft from the target's own outputs (the `distill` step).

The loss (`distill.objective`; the soft cross-entropy against the target's probabilities unless another is chosen) is taken
at answer positions only, over the steps of a training-time test (EAGLE-3, arXiv 2503.01840): step k starts from the
draft's own feedback of step k-1, with the row's tokens. The draft that is kept is the one with the best acceptance length
replayed on held-out greedy answers; after a warm start (`eagle.train.warm`) the draft it began with is one of them.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle import manifest
from eagle.config import Config, DistillConfig
from eagle.draft.attention import ChainAttention, PrefixAttention
from eagle.draft.init import init_from_target, initialise
from eagle.draft.io import save_draft, target_embedding
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from eagle.draft.vocab import choose_vocab, coverage, fitting_size
from eagle.errors import StepFailed
from eagle.progress import Track, say
from eagle.steps import StepContext
from eagle.target.identity import IDENTITY, target_identity
from eagle.target.load import TargetDims, ensure_target, pick_device, setup_torch, target_dims
from eagle.target.taps import resolve_aux_layers
from eagle.train.batches import Batch, BatchPlan, collate, trainable
from eagle.train.checkpoint import load_checkpoint, save_checkpoint
from eagle.train.features import FeatureStore, ensure_features
from eagle.train.objectives import soft_cross_entropy
from eagle.train.schedule import Pace, learning_rate
from eagle.train.supervised import DPACE, RowObjective, dpace_loss, row_objective, token_loss
from eagle.train.validate import heldout_rows, replay_acceptance
from eagle.train.warm import warm_draft

LOG_EVERY = 10  # optimiser steps averaged into one row of curves.json


def run(context: StepContext, trainer_of: Callable[..., Trainer] | None = None) -> dict[str, Any]:
    """Train a draft and write it to `context.out`/draft (config.json, model.safetensors), with curves.json beside it.

    Goes on from the checkpoint in `context.work` when there is one. `trainer_of` makes the loop, with `Trainer`'s arguments;
    `Trainer` itself when not given. Returns acceptance_length and acceptance_by_position (held-out, K = distill.eval_tokens,
    bonus included), best_step, steps, train_tokens, parameters, rows_dropped (states not finite), rows_skipped (no answer
    token to learn), draft_vocab_size, draft_vocab_coverage (held-out answers). Raises StepFailed when the loss is not finite.
    """
    config = context.config
    setup_torch(config.runtime.threads, config.runtime.seed)
    device = pick_device(config.runtime.device)
    target = ensure_target(config.target, context.root, context.cache)
    dims = target_dims(target)
    aux_layers = resolve_aux_layers(config.target.aux_layers, dims.num_layers)
    store = ensure_features(
        context.inputs["dataset"], target, aux_layers, config.distill.top_k, context.cache, config.target.dtype,
        device=device, trust_remote_code=config.target.trust_remote_code,
    )
    if config.distill.warm_start:
        model, ids = warm_draft(context, target, dims, aux_layers)
    else:
        model, ids = new_draft(config, store, target, dims, aux_layers)
    trainer = (trainer_of or Trainer)(model.to(device), store, config.distill, config.runtime.seed, context.work)
    trainer.train()
    best = trainer.state.best
    shutil.copytree(trainer.best_folder(best["step"]), context.out / "draft")
    manifest.write_json(context.out / "curves.json", trainer.state.curves)
    manifest.write_json(context.out / IDENTITY, target_identity(config.target, target, context.root, context.cache))
    return {
        "acceptance_length": best["acceptance_length"],
        "acceptance_by_position": best["acceptance_by_position"],
        "best_step": best["step"],
        "steps": trainer.pace.step,
        "train_tokens": trainer.state.tokens,
        "parameters": model.num_parameters(),
        "rows_dropped": store.dropped,
        "rows_skipped": trainer.skipped,
        "draft_vocab_size": len(ids),
        "draft_vocab_coverage": round(coverage(answer_tokens(store, store.select("heldout")), ids), 5),
    }


def new_draft(
    config: Config, store: FeatureStore, target: Path, dims: TargetDims, aux_layers: tuple[int, ...]
) -> tuple[DraftModel, NDArray[np.int64]]:
    """Return a fresh draft (fp32, CPU) and its vocabulary, ascending target ids, chosen from the training answers."""
    spec = DraftSpec.from_config(config.draft, dims, aux_layers)
    ids = draft_vocabulary(store, spec.draft_vocab_size, dims)
    spec = replace(spec, draft_vocab_size=len(ids))
    model = DraftModel(spec, target_embedding(target, spec), ids)
    initialise(model, output_scale=config.distill.output_init_scale, generator=torch.Generator().manual_seed(config.runtime.seed))
    if config.distill.init_from_target:
        init_from_target(model, target)
    return model, ids


def draft_vocabulary(store: FeatureStore, size: int, dims: TargetDims) -> NDArray[np.int64]:
    """Return up to `size` target ids, ascending, chosen from the training answers; says so when they hold fewer tokens."""
    train = store.select("train")
    counts, must = count_tokens(store, train), stop_tokens(store, train, dims)
    fitting = fitting_size(counts, size, must)
    if fitting < size:
        say(f"draft vocabulary: {fitting}, not {size}: the training answers hold {np.count_nonzero(counts)} distinct tokens")
    return choose_vocab(counts, fitting, must)


def answer_tokens(store: FeatureStore, rows: list[int]) -> NDArray[np.int32]:
    """Return all answer tokens of `rows`, one after the other."""
    parts = [store.tokens(i)[store.loss_mask(i)] for i in rows]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def count_tokens(store: FeatureStore, rows: list[int]) -> NDArray[np.int64]:
    """Return [V]: how often each id is an answer's token or the target's likeliest next token in an answer."""
    counts = np.bincount(answer_tokens(store, rows), minlength=store.vocab_size)
    for i in rows:
        index, prob = store.targets(i)
        counts += np.bincount(index[prob[:, 0] > 0, 0], minlength=store.vocab_size)
    return counts


def stop_tokens(store: FeatureStore, rows: list[int], dims: TargetDims) -> list[int]:
    """Return the ids that end an answer: the target's own and those that ended one in the data."""
    seen = {int(store.tokens(i)[-1]) for i in rows if store.rows[i].finish == "stop"}
    return sorted(seen | set(dims.eos_token_ids))


def unroll(model: DraftModel, batch: Batch, depth: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run `depth` steps of the training-time test; yield (normed [N, H], rows [N], label positions [N]) for each.

    Step 0 runs over whole rows, the later ones only from the rounds whose first draft token is an answer's token. Label
    position p means: the step predicts token x[p], given everything up to x[p-1]; only answer tokens are yielded.
    """
    width = batch.tokens.shape[1]
    rows, cols = batch.anchors()
    prefix = PrefixAttention()
    positions = torch.arange(width - 1, device=batch.tokens.device).expand(len(batch.tokens), -1)
    normed, feedback = model.step(batch.tokens[:, 1:], model.fuse(batch.aux[:, :-1]), positions, prefix)
    yield normed[rows, cols], rows, cols + 2
    if depth == 1:
        return
    feedback = feedback[rows, cols][None]
    chain = ChainAttention(prefix, rows, cols)
    for k in range(1, depth):
        token = batch.tokens[rows, (cols + 1 + k).clamp_max(width - 1)]
        normed, feedback = model.step(token[None], feedback, (cols + k)[None], chain)
        label = cols + 2 + k
        inside = (label < batch.lengths[rows]) & batch.loss_mask[rows, label.clamp_max(width - 1)]
        yield normed[0][inside], rows[inside], label[inside]


def distillation_loss(
    model: DraftModel, batch: Batch, depth: int, decay: float, draft_of: Tensor,
    objective: RowObjective = soft_cross_entropy, head_rows: int | None = None,
) -> tuple[Tensor, list[float]]:
    """Return (loss, share of right argmax tokens by step) of one batch with a position to learn.

    The loss is the mean over positions of the objective at each step, averaged over steps with weights decay^k.
    draft_of [V] int64: draft id of each target id, or -1. `head_rows`: see `supervised.in_slabs`.
    """
    total, weights, right = torch.zeros((), device=batch.tokens.device), 0.0, []
    for k, (normed, rows, label) in enumerate(unroll(model, batch, depth)):
        if not len(rows):
            right.append(0.0)
            continue
        loss, share = token_loss(model, batch, normed, rows, label, draft_of, objective, head_rows)
        total = total + decay**k * loss
        weights += decay**k
        right.append(share)
    return total / weights, right


@dataclass
class TrainState:
    """What a run knows beside weights and pace. `best` is {} before the first validation."""

    tokens: int = 0
    validated: int = -1
    best: dict[str, Any] = field(default_factory=dict)
    curves: list[dict[str, Any]] = field(default_factory=list)
    window: list[list[float]] = field(default_factory=list)  # [loss, right by step...] since the last row of `curves`


class Trainer:
    """The loop: batches, optimiser, schedule, validation, checkpoints in `work`."""

    name: ClassVar[str] = "distill"  # as lines and errors say it
    budget_key: ClassVar[str] = "distill.max_minutes"

    def __init__(self, model: DraftModel, store: FeatureStore, config: DistillConfig, seed: int, work: Path) -> None:
        self.model, self.store, self.config, self.work = model, store, config, work
        train = store.select("train")
        rows = trainable(store, train)
        self.skipped = len(train) - len(rows)
        if self.skipped:
            say(f"{self.name}: {self.skipped} training rows without an answer token to learn are skipped")
        self.plan = BatchPlan(rows, [store.rows[i].length for i in rows], config.tokens_per_step, seed)
        self.heldout = heldout_rows(store, config.eval_sequences)
        self.draft_of = model.target_to_draft()
        self.device = model.lm_head.weight.device
        self.optimizer = make_optimizer(model, config.learning_rate, config.weight_decay, config.betas)
        self.pace = Pace(config.stages, config.max_minutes * 60)
        self.state = TrainState()

    def best_folder(self, step: int) -> Path:
        """Where the draft of a validation that was the best one is kept."""
        return self.work / f"best-{step:08d}"

    def loss(self, batch: Batch) -> tuple[Tensor, list[float]]:
        """Return (loss, share of right argmax tokens by step) of one batch at the depth of the stage at hand."""
        config, depth = self.config, self.pace.depth
        if config.objective == DPACE:
            steps = unroll(self.model, batch, depth)
            return dpace_loss(self.model, batch, steps, self.draft_of, config.dpace_smoothing, config.head_rows)
        objective = row_objective(config)
        return distillation_loss(self.model, batch, depth, config.step_decay, self.draft_of, objective, config.head_rows)

    def train(self) -> None:
        """Train to the end of the stages or of the budget, from the checkpoint if there is one; validate at the end."""
        saved = load_checkpoint(self.work, self.model, self.optimizer)
        if saved is not None:
            self.pace = Pace.from_json(self.config.stages, self.config.max_minutes * 60, saved["pace"])
            self.state = TrainState(**saved["state"])
            say(f"{self.name}: going on from step {self.pace.step}, {self.pace.elapsed / 60:.1f} min done")
        elif self.config.warm_start:
            self._validate()  # what it starts from may be the best; not timed: the pace would take it for every step's share
        with Track(self.name, self.pace.total, "steps", done=self.pace.step) as track:
            while not self.pace.done:
                note = self.step()
                step = self.pace.step
                if step % self.config.eval_every == 0 or self.pace.done:
                    note = self._timed(self._validate)
                    self._end_flat_stage()
                if step % self.config.checkpoint_every == 0 or step % self.config.eval_every == 0 or self.pace.done:
                    self._timed(self._checkpoint)
                track.advance(1, note)
        if self.pace.step < self.pace.total and self.pace.elapsed >= self.pace.budget:
            say(
                f"{self.name}: the budget of {self.config.max_minutes:g} min ({self.budget_key}) was spent after "
                f"{self.pace.step} of {self.pace.total} steps"
            )
        if self.state.validated != self.pace.step:  # a resumed run that had nothing left to do
            self._validate()
            self._checkpoint()

    def _timed(self, work: Any) -> str:
        began = time.monotonic()
        note = work()
        self.pace.other_work(time.monotonic() - began)
        return note or ""

    def step(self) -> str:
        """Take one optimiser step on the next batch; return a note for the progress line."""
        began = time.monotonic()
        config, depth = self.config, self.pace.depth
        rows = self.plan.at(self.pace.step)
        rate = learning_rate(
            self.pace.step, self.pace.progress, base=config.learning_rate, min_ratio=config.min_learning_rate_ratio,
            warmup=config.warmup_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = collate(self.store, rows, str(self.device))
        self.model.train()
        with self.model.half_precision(config.autocast):
            loss, right = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm))
        value = float(loss.detach())
        if not (math.isfinite(value) and math.isfinite(norm)):
            names = ", ".join(self.store.rows[i].id[:12] for i in rows)
            raise StepFailed(
                f"{self.name}: loss {value}, gradient norm {norm} at step {self.pace.step} (rows {names}); "
                "lower distill.learning_rate or set distill.autocast=false"
            )
        self.optimizer.step()
        tokens = int(batch.lengths.sum())
        self.state.tokens += tokens
        seconds = time.monotonic() - began
        self.pace.step_done(seconds)
        self._record(value, right, depth, rate)
        shown = " ".join(f"{r:.2f}" for r in right)
        return f"depth {depth}  loss {value:.3f}  right {shown}  lr {rate:.1e}  {tokens / seconds:.0f} tok/s"

    def _record(self, loss: float, right: list[float], depth: int, rate: float) -> None:
        self.state.window.append([loss, *right])
        if len(self.state.window) >= LOG_EVERY or self.pace.done or self.pace.depth != depth:
            self._flush(depth, rate)

    def _flush(self, depth: int, rate: float) -> None:
        """Write the steps since the last row of `curves`, all of one depth, as one row."""
        window = self.state.window
        if not window:
            return
        mean = [round(sum(column) / len(window), 5) for column in zip(*window, strict=True)]
        at = {"step": self.pace.step, "depth": depth, "tokens": self.state.tokens, "learning_rate": rate}
        self.state.curves.append({**at, "loss": mean[0], "top1_by_step": mean[1:]})
        window.clear()

    def _validate(self) -> str:
        """Measure acceptance; keep the draft when it is the best so far."""
        self.model.eval()
        config = self.config
        found = replay_acceptance(self.model, self.store, self.heldout, config.eval_tokens, autocast=config.autocast)
        step = self.pace.step
        self.state.validated = step
        self.state.curves.append({"step": step, **found.as_json(), "tokens": self.state.tokens})
        if not self.state.best or found.length > self.state.best["acceptance_length"]:
            save_draft(self.best_folder(step), self.model)
            self.state.best = {"step": step, **found.as_json()}
        positions = " ".join(f"{share:.2f}" for share in found.by_position)
        best = self.state.best["acceptance_length"]
        say(f"{self.name}: step {step}: held-out acceptance length {found.length:.3f} ({positions}), best {best:.3f}")
        return ""

    def _end_flat_stage(self) -> None:
        """End the stage at hand when its last `patience` validations brought no gain over those before them in it."""
        patience, pace = self.config.patience, self.pace
        if patience is None or pace.done:
            return
        first = pace.step - pace.inside
        lengths = [row["acceptance_length"] for row in self.state.curves if row["step"] > first and "acceptance_length" in row]
        if len(lengths) <= patience or max(lengths[-patience:]) - max(lengths[:-patience]) >= self.config.flat_gain:
            return
        then = f"depth {pace.stages[pace.stage + 1].depth} begins" if pace.stage + 1 < len(pace.stages) else "training ends"
        say(
            f"{self.name}: step {pace.step}: acceptance length is flat ({patience} validations gained less than "
            f"{self.config.flat_gain:g}; distill.patience), {then}"
        )
        self._flush(pace.depth, self.optimizer.param_groups[0]["lr"])
        pace.end_stage()

    def _checkpoint(self) -> str:
        extra = {"pace": self.pace.as_json(), "state": asdict(self.state)}
        save_checkpoint(self.work, self.model, self.optimizer, self.pace.step, extra)
        for old in self.work.glob("best-*"):
            if self.state.best and old != self.best_folder(self.state.best["step"]):
                shutil.rmtree(old)
        return ""


def make_optimizer(model: DraftModel, rate: float, decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW without weight decay on norms and on an own embedding (whose unseen rows would only shrink)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if p.ndim == 1 or name.startswith("embed_tokens")]
    decayed = [p for name, p in named if p.ndim > 1 and not name.startswith("embed_tokens")]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=betas, fused=True)
