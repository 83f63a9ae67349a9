"""The champion's acceptance length on the challenger's prompts, counted by vLLM anew, when the recorded one does not compare.

Needed after the data set, the draft length or the target changed. One vLLM start.
"""

from __future__ import annotations

import shutil

from mlflow.entities.model_registry import ModelVersion

from eagle.bundle.acceptance import pick_prompts
from eagle.bundle.validate import check_bundle
from eagle.errors import BundleError, StepFailed
from eagle.progress import say
from eagle.registry.client import Store
from eagle.registry.gate import Candidate
from eagle.registry.pull import pull
from eagle.serve.command import speculative_config
from eagle.steps import StepContext
from eagle.target.generate import Request
from eagle.target.load import ensure_target, target_dims
from eagle.target.vllm import VllmJob, run_vllm


def remeasure(
    store: Store, champion: ModelVersion, recorded: Candidate, context: StepContext, measured_on: str
) -> Candidate | None:
    """Return the champion's figures with its acceptance length on the prompts of this run, greedy, float32.

    None when its bundle does not fit the present target at all (other widths or vocabulary): then there is nothing to
    compare with. Raises StepFailed when its files cannot be fetched or vLLM fails, BundleError when they are not the
    registered ones.
    """
    config = context.config
    say(f"register: champion version {champion.version} was measured on other prompts or settings; measuring it again in vLLM")
    target = ensure_target(config.target, context.root, context.cache)
    folder = context.work / "champion"
    shutil.rmtree(folder, ignore_errors=True)
    bundle = folder / "bundle"
    pull(store, champion, bundle)
    try:
        check_bundle(bundle, target)
    except BundleError as error:
        say(f"register: champion version {champion.version} does not fit this target ({error}); only the floors count")
        return None
    rows = pick_prompts(context.inputs["dataset"], config.bundle.prompts)
    stop = target_dims(target).eos_token_ids
    requests = [Request(row.prompt, config.bundle.max_new_tokens, 0.0, 0, tuple(stop)) for row in rows]
    speculative = speculative_config(bundle, config.bundle.draft_tokens)
    job = VllmJob(target, requests, "float32", speculative=speculative)
    counters = run_vllm(job, config, context.root, title="register: vLLM with the champion", work=folder).counters
    if counters is None or not counters.drafts:
        raise StepFailed(f"register: vLLM counted no drafts of champion version {champion.version}; see {folder / 'vllm.log'}")
    return Candidate(
        round(counters.acceptance_length, 4), recorded.equal_tokens, recorded.memory_overhead, recorded.validated, measured_on
    )
