"""One arm with one seed: trains it into a folder, going on from a checkpoint. The last weights of the second phase are kept."""

from __future__ import annotations

from typing import Any

from eagle import manifest
from eagle.ablate.arms import Arm
from eagle.draft.io import load_draft, save_draft
from eagle.steps import StepContext
from eagle.target.load import ensure_target, pick_device, setup_torch
from eagle.train import distill, policy
from eagle.train.features import ensure_features


def train(arm: Arm, context: StepContext) -> dict[str, Any]:
    """Write draft/ and curves.json of `arm` into `context.out`; `context.inputs` holds dataset and, for a second phase, distill.

    Returns steps and, for a second phase, seconds (training time of all processes, one validation at the end included) and
    validation_acceptance_length (T = 0, bonus counted, on the rows that training validates on).
    """
    if arm.phase == "scratch":
        return distill.run(context)
    return _distill(context) if arm.phase == "distill" else _policy(context)


def _distill(context: StepContext) -> dict[str, Any]:
    config = context.config
    setup_torch(config.runtime.threads, config.runtime.seed)
    device = pick_device(config.runtime.device)
    target = ensure_target(config.target, context.root, context.cache)
    model = load_draft(context.inputs["distill"] / "draft", target, device, "float32")
    store = ensure_features(
        context.inputs["dataset"], target, model.spec.aux_layers, config.distill.top_k, context.cache, config.target.dtype,
        device=device, trust_remote_code=config.target.trust_remote_code,
    )
    trainer = distill.Trainer(model, store, config.distill, config.runtime.seed, context.work)
    trainer.train()
    save_draft(context.out / "draft", model)
    manifest.write_json(context.out / "curves.json", trainer.state.curves)
    last = trainer.state.curves[-1]["acceptance_length"]
    return {"steps": trainer.pace.step, "seconds": round(trainer.pace.elapsed, 1), "validation_acceptance_length": last}


def _policy(context: StepContext) -> dict[str, Any]:
    stage = policy.Stage(context)
    stage.train()
    now = stage.progress
    save_draft(context.out / "draft", stage.model)
    manifest.write_json(context.out / "curves.json", now.curves)
    last = now.curves[-1]["acceptance_length"]
    return {"steps": now.pace.step, "seconds": round(now.pace.elapsed, 1), "validation_acceptance_length": last}
