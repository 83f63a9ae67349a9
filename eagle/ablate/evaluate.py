"""What a draft is worth on held-out rounds: expected accepted tokens at T = 1, replayed ones at T = 0, and vLLM's own count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle.bundle.acceptance import pick_prompts
from eagle.config import Config, PolicyConfig
from eagle.draft.io import load_draft
from eagle.draft.model import DraftModel
from eagle.errors import DataError
from eagle.serve.command import speculative_config
from eagle.steps import StepContext
from eagle.target.generate import Request
from eagle.target.load import ensure_target, load_target, pick_device, setup_torch, target_dims
from eagle.target.vllm import VllmJob, run_vllm
from eagle.train import reward, rollout
from eagle.train.batches import collate
from eagle.train.features import FeatureStore, ensure_features
from eagle.train.rollout import DraftPass, Stretch, TreeVerifier
from eagle.train.validate import heldout_rows, length_batches, replay_acceptance

BATCH_TOKENS = 1024
TEMPERATURE = 1.0


def evaluate(context: StepContext) -> dict[str, Any]:
    """Measure the draft in `context.inputs`["draft"] on the held-out rows, K = ablate.draft_tokens.

    Returns expected_accepted_t1 and accepted_t0, tokens a round without the bonus token, rounds_t1, rounds_t0 and
    acceptance_by_position_t0.
    """
    config, about = context.config, context.config.ablate
    setup_torch(config.runtime.threads, config.runtime.seed)
    device = pick_device(config.runtime.device)
    target_folder = ensure_target(config.target, context.root, context.cache)
    model = load_draft(context.inputs["draft"], target_folder, device, "float32").eval()
    store = ensure_features(
        context.inputs["dataset"], target_folder, model.spec.aux_layers, config.distill.top_k, context.cache, config.target.dtype,
        device=device, trust_remote_code=config.target.trust_remote_code,
    )
    half = config.distill.autocast
    cold = replay_acceptance(model, store, heldout_rows(store, about.sequences), about.draft_tokens, autocast=half)
    target = load_target(target_folder, config.target.dtype, device, trust_remote_code=config.target.trust_remote_code)
    verifier = TreeVerifier(target, model.draft_ids())
    rows = sampled_rows(store, about.sequences)
    value, rounds = expected_accepted(model, store, rows, verifier, about.draft_tokens, autocast=half, seed=config.runtime.seed)
    return {
        "expected_accepted_t1": value, "rounds_t1": rounds, "accepted_t0": cold.length - 1.0, "rounds_t0": cold.rounds,
        "acceptance_by_position_t0": list(cold.by_position),
    }


def sampled_rows(store: FeatureStore, limit: int) -> list[int]:
    """Return up to `limit` held-out rows with two answer tokens, those answered at T > 0 if there are any, spread evenly."""
    usable = [i for i in store.select("heldout") if int(store.loss_mask(i).sum()) >= 2]
    rows = [i for i in usable if store.rows[i].temperature > 0] or usable
    if not rows:
        raise DataError("no held-out row has an answer of two tokens; raise dataset.heldout_fraction or the number of prompts")
    return rows if len(rows) <= limit else [rows[i * len(rows) // limit] for i in range(limit)]


@torch.no_grad()
def expected_accepted(
    model: DraftModel, store: FeatureStore, rows: Sequence[int], verifier: TreeVerifier, k: int, *, autocast: bool, seed: int
) -> tuple[float, int]:
    """Return (expected accepted tokens a round at T = 1, number of rounds) over the rounds that serving would run in `rows`.

    The rounds: the draft's own walk from the answer's first token on (`rollout.accepted_along_rows`). In each, K tokens are
    drawn from q and judged with the target's full softmax: alpha_1 + a_1 (alpha_2 + a_2 (...)), exact overlaps alpha on the
    draft's own prefix, an unbiased estimate of E[L] (`objectives.policy_terms`). The same seed draws the same for all.
    """
    device = model.lm_head.weight.device
    ends = torch.tensor(model.spec.eos_token_id, dtype=torch.long, device=device)
    generator = torch.Generator().manual_seed(seed)
    total, count = 0.0, 0
    for part in length_batches(store, rows, BATCH_TOKENS):
        batch = collate(store, part, str(device))
        begin = batch.loss_mask.long().argmax(1).cpu()
        span = int((batch.lengths.cpu() - 1 - begin).max())
        with model.half_precision(autocast):
            start = DraftPass(model, batch)
            whole = Stretch(batch, begin, begin, span)
            at, anchors = rollout.walk_rounds(start, whole, span, k, TEMPERATURE, generator)
            rounds = rollout.sampled_rounds(start, at, anchors, k, ends, verifier, TEMPERATURE, generator)
        goal = reward.objective(rounds, PolicyConfig(), generator)
        total += goal.expected * len(at)
        count += len(at)
    return total / count, count


def count_in_vllm(draft: Path, dataset: Path, config: Config, root: Path, work: Path) -> dict[str, Any]:
    """Return vLLM's own counters for the draft on held-out prompts at T = 0: accepted tokens a round, rounds, version.

    Raises PreflightError without vLLM, StepFailed when it fails.
    """
    target = ensure_target(config.target, root, root / config.paths.cache)
    rows, stop = pick_prompts(dataset, config.ablate.prompts), target_dims(target).eos_token_ids
    requests = [Request(row.prompt, config.bundle.max_new_tokens, 0.0, 0, stop) for row in rows]
    job = VllmJob(target, requests, "float32", speculative=speculative_config(draft, config.ablate.draft_tokens))
    found = run_vllm(job, config, root, title="ablate: vLLM", work=work)
    counters = found.counters
    accepted = counters.acceptance_length - 1.0 if counters else 0.0
    return {"vllm_accepted_t0": accepted, "vllm_rounds": counters.drafts if counters else 0, "vllm_version": found.version}
