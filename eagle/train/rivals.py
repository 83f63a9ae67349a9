"""The rivals of the draft, trained on the same data so that `eagle bench` compares them in one engine (the `rivals` step).

Both are our implementations, for the comparison only; no figure of theirs is the papers' own code's.

- Medusa-1 heads: eagle/train/medusa.py.
- A draft in the manner of EAGLE-2 (Li et al. 2024, arXiv 2406.16858, which trains as EAGLE does, arXiv 2401.15077): one
  layer of the target's shape that reads the target's last hidden state and is trained with the target's states and the
  data's tokens only. The loss is the cross-entropy plus the distance of the draft's state to the target's next one, which
  the draft's stands in for while it drafts. Unlike the papers': our `DraftModel` (the layer reads token and state side by
  side, each after a norm of its own; a reduced vocabulary, with a head that starts as the target's and is trained), the
  optimiser and its budget, and no noise on the states.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle import manifest
from eagle.config import Config
from eagle.decode.medusa import save_medusa
from eagle.draft.attention import PrefixAttention
from eagle.draft.model import DraftModel
from eagle.errors import DataError
from eagle.progress import say
from eagle.steps import StepContext
from eagle.target.load import TargetDims, ensure_target, pick_device, setup_torch, target_dims
from eagle.train import distill
from eagle.train.batches import Batch
from eagle.train.checkpoint import STATE
from eagle.train.features import ensure_features
from eagle.train.medusa import MedusaSettings, train_medusa
from eagle.train.supervised import token_loss

MEDUSA, EAGLE2 = "medusa", "eagle2"
ABOUT = "rivals.json"
_METHODS = {
    MEDUSA: {"method": "Medusa-1 heads, our implementation", "paper": "Cai et al. 2024, arXiv 2401.10774"},
    EAGLE2: {
        "method": "one-layer draft in the manner of EAGLE-2, our implementation",
        "paper": "Li et al. 2024, arXiv 2406.16858; its training: arXiv 2401.15077",
    },
}
Part = Callable[[Path], dict[str, Any]]  # fills a folder; returns settings, metrics and seconds of training


def run(context: StepContext) -> dict[str, Any]:
    """Train both rivals: `context.out`/medusa for `load_medusa`, `context.out`/eagle2/draft for `load_draft`, rivals.json.

    rivals.json says of each method, paper, settings and minutes of training, and the content hash of the data set. A finished
    rival in `context.work` is not trained again; the EAGLE-2 draft goes on from its checkpoint, the heads start again.
    Returns for medusa top1_by_head (held-out), parameters, steps, train_tokens, seconds; for eagle2 what distill returns, and
    seconds. Raises DataError for a data set without manifest, and what `train_medusa` and distill raise.
    """
    found = manifest.read_manifest(context.inputs["dataset"])
    if found is None:
        raise DataError(f"{context.inputs['dataset']}: no readable manifest.json; make the data set with: eagle step dataset")
    setup_torch(context.config.runtime.threads, context.config.runtime.seed)
    target = ensure_target(context.config.target, context.root, context.cache)
    dims = target_dims(target)
    made = {
        MEDUSA: _part(context, MEDUSA, lambda folder: _medusa(context, target, dims, folder)),
        EAGLE2: _part(context, EAGLE2, lambda folder: _eagle2(context, dims, folder)),
    }
    about = {
        name: {**_METHODS[name], "settings": part["settings"], "minutes": round(part["seconds"] / 60, 2)}
        for name, part in made.items()
    }
    manifest.write_json(context.out / ABOUT, {"data": found["content_hash"], "rivals": about})
    return {name: {**part["metrics"], "seconds": round(part["seconds"], 1)} for name, part in made.items()}


def _part(context: StepContext, name: str, make: Part) -> dict[str, Any]:
    """Make one rival in `context.work`/<name>, unless a run before finished it, and copy it to `context.out`."""
    kept, done = context.work / name, context.work / f"{name}.json"
    if done.is_file():
        say(f"{name}: finished by the interrupted run")
    else:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        manifest.write_json(done, make(kept))
    shutil.copytree(kept, context.out / name)
    part: dict[str, Any] = manifest.read_json(done)
    return part


def _medusa(context: StepContext, target: Path, dims: TargetDims, folder: Path) -> dict[str, Any]:
    config = context.config
    device = pick_device(config.runtime.device)
    store = ensure_features(  # the store that distill uses for the EAGLE-2 draft: the states are computed once
        context.inputs["dataset"], target, (dims.num_layers,), config.distill.top_k, context.cache, config.target.dtype,
        device=device, trust_remote_code=config.target.trust_remote_code,
    )
    settings = medusa_settings(config, dims)
    began = time.monotonic()
    trained = train_medusa(store, target, settings, device)
    seconds = time.monotonic() - began
    save_medusa(folder, trained.heads)
    metrics = {
        "top1_by_head": [ranks[0] for ranks in trained.heads.accuracies],
        "parameters": sum(p.numel() for p in trained.heads.parameters()),
        "steps": len(trained.losses),
        "train_tokens": trained.tokens,
    }
    return {"settings": asdict(settings), "metrics": metrics, "seconds": seconds}


def medusa_settings(config: Config, dims: TargetDims) -> MedusaSettings:
    """Return the settings of the heads: the rivals section's, the draft's vocabulary size, the rest as distill has it."""
    rivals, shared = config.rivals, config.distill
    return MedusaSettings(
        heads=rivals.medusa_heads, nodes=rivals.medusa_nodes, steps=rivals.medusa_steps, max_minutes=rivals.medusa_minutes,
        learning_rate=rivals.medusa_learning_rate, vocab_size=min(config.draft.vocab_size or dims.vocab_size, dims.vocab_size),
        tokens_per_step=shared.tokens_per_step, min_learning_rate_ratio=shared.min_learning_rate_ratio,
        warmup_steps=shared.warmup_steps, weight_decay=shared.weight_decay, clip_norm=shared.clip_norm,
        eval_sequences=shared.eval_sequences, autocast=shared.autocast, seed=config.runtime.seed,
    )


def _eagle2(context: StepContext, dims: TargetDims, folder: Path) -> dict[str, Any]:
    config = eagle2_config(context.config, dims)
    work = context.work / f"{EAGLE2}.work"
    work.mkdir(exist_ok=True)
    weight = config.rivals.eagle2_feature_weight
    metrics = distill.run(replace(context, config=config, out=folder, work=work), partial(Eagle2Trainer, feature_weight=weight))
    seconds = manifest.read_json(work / STATE)["extra"]["pace"]["elapsed"]  # of all processes, validation included
    settings = config.model_dump(mode="json", include={"draft", "distill"})
    return {"settings": {**settings, "feature_weight": weight}, "metrics": metrics, "seconds": seconds}


def eagle2_config(config: Config, dims: TargetDims) -> Config:
    """Return `config` with the draft, the tapped state and the schedule of the EAGLE-2 draft; everything else is the same.

    One layer with the target's heads and widths, the state of its last layer, and teacher forcing only.
    """
    content = config.model_dump(by_alias=True)
    content["target"]["aux_layers"] = [dims.num_layers]
    content["draft"] = {
        "layers": 1, "heads": dims.num_heads, "kv_heads": dims.num_kv_heads, "head_dim": dims.head_dim,
        "hidden_size": dims.hidden_size, "intermediate_size": dims.intermediate_size, "vocab_size": config.draft.vocab_size,
        "fc_norm": False, "norm_output": False, "norm_before_residual": True,  # states have the scale that a norm gives them
    }
    content["distill"] |= {
        "stages": [{"depth": 1, "steps": config.rivals.eagle2_steps}], "max_minutes": config.rivals.eagle2_minutes,
        "step_decay": 1.0, "objective": "soft_cross_entropy", "warm_start": None,
    }
    return Config.model_validate(content)


class Eagle2Trainer(distill.Trainer):
    """Distill's loop with EAGLE's loss; fc stays the identity, since EAGLE's layer reads the state itself."""

    name: ClassVar[str] = EAGLE2
    budget_key: ClassVar[str] = "rivals.eagle2_minutes"

    def __init__(self, model: DraftModel, *given: Any, feature_weight: float) -> None:
        torch.nn.init.eye_(model.fc.weight)
        model.fc.requires_grad_(False)
        super().__init__(model, *given)
        self.feature_weight = feature_weight

    def loss(self, batch: Batch) -> tuple[Tensor, list[float]]:
        """See `eagle2_loss`."""
        return eagle2_loss(self.model, batch, self.feature_weight, self.draft_of)


def eagle2_loss(model: DraftModel, batch: Batch, feature_weight: float, draft_of: Tensor) -> tuple[Tensor, list[float]]:
    """Return (cross-entropy + `feature_weight` times feature loss, [share of right argmax tokens]) of one batch.

    EAGLE, arXiv 2401.15077: at position t the draft's state stands in for the target's of position t+1, so their smooth L1
    distance is the feature loss. The target's is divided by its root mean square (the papers' states are those after the
    final norm; ours are normed by the layer that reads them). The papers' ratio is `feature_weight` = 10. draft_of [V]: see
    `distillation_loss`.
    """
    rows, cols = batch.anchors()
    positions = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device).expand(len(batch.tokens), -1)
    states = model.fuse(batch.aux)
    normed, feedback = model.step(batch.tokens[:, 1:], states[:, :-1], positions, PrefixAttention())
    loss, right = token_loss(model, batch, normed[rows, cols], rows, cols + 2, draft_of)
    following = states[rows, cols + 1].detach()
    goal = F.rms_norm(following, following.shape[-1:], eps=model.spec.rms_norm_eps)
    return loss + feature_weight * F.smooth_l1_loss(feedback[rows, cols], goal), [right]
