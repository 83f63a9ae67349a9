"""Validation in vLLM itself: the text is the target's own, and the draft is accepted as often as in the reference engine.

Both are done greedily in float32 on held-out prompts. A draft that vLLM reads differently from how it was trained
(lost flag, shifted ids, wrong map) still gives the right text; only its acceptance tells.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from eagle.bench.measure import common_prefix, logit_gap
from eagle.bundle.reference import prompt_counts
from eagle.config import Config
from eagle.dataset.read import Row, load_rows
from eagle.decode.engine import DecodeResult, Engine
from eagle.draft.io import load_draft
from eagle.errors import DataError
from eagle.progress import say
from eagle.serve.command import speculative_config
from eagle.target.generate import Request
from eagle.target.layout import lay_out
from eagle.target.load import load_target, pick_device, setup_torch, target_dims
from eagle.target.vllm import Counters, VllmJob, VllmResult, run_vllm
from kernels.dispatch import using
from kernels.tuned import TABLE, read_table

REFERENCE_BATCH = 8


def pick_prompts(dataset: Path, count: int) -> list[Row]:
    """Return up to `count` held-out rows, taken in turn from each kind of prompt, kinds in alphabetical order.

    Raises DataError when the data set has no held-out rows.
    """
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in load_rows(dataset, "heldout"):
        kinds[row.kind].append(row)
    if not kinds:
        raise DataError("bundle: the data set has no held-out rows; raise dataset.heldout_fraction or the number of prompts")
    queues = [kinds[kind] for kind in sorted(kinds)]
    turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    if len(turns) < count:
        say(f"bundle: {len(turns)} held-out prompts for the {count} asked for")
    return turns[:count]


def validate_in_vllm(bundle: Path, target: Path, rows: list[Row], config: Config, root: Path, work: Path) -> dict[str, Any]:
    """Run the prompts in vLLM without and with the draft, and in the reference engine; return all figures.

    `equal_tokens` is the share of vLLM's own tokens without speculation that the run with it repeats: a token counts
    if it and all before it in its answer are the same. `relative_gap` is |vLLM - reference| / reference of the
    acceptance lengths. Raises StepFailed when vLLM fails.
    """
    section, stop = config.bundle, target_dims(target).eos_token_ids
    requests = [Request(row.prompt, section.max_new_tokens, 0.0, 0, stop) for row in rows]
    speculative = speculative_config(bundle, section.draft_tokens)
    plain = _vllm(VllmJob(target, requests, "float32"), config, root, "bundle: vLLM without speculation", work / "plain")
    drafted = _vllm(
        VllmJob(target, requests, "float32", speculative=speculative), config, root, "bundle: vLLM with the draft", work / "drafted"
    )
    answered, mismatches = _reference(bundle, target, rows, stop, config, plain, drafted)
    reference = answered.stats
    total = sum(len(tokens) for tokens in plain.tokens)
    equal = sum(common_prefix(one, other) for one, other in zip(plain.tokens, drafted.tokens, strict=True))
    counted = drafted.counters or Counters(0, 0, 0, [])
    ours = reference.acceptance_length
    return {
        "acceptance_length": round(counted.acceptance_length, 4),
        "acceptance_by_position": [round(share, 4) for share in counted.acceptance_by_position],
        "drafts": counted.drafts,
        "accepted": counted.accepted,
        "reference": {
            "acceptance_length": round(ours, 4),
            "acceptance_by_position": [round(share, 4) for share in reference.acceptance_by_position],
            "drafts": reference.rounds,
            "accepted": reference.accepted,
            "batch": REFERENCE_BATCH,
            "by_prompt": prompt_counts([row.kind for row in rows], answered.accepted, section.draft_tokens),
        },
        "relative_gap": round(abs(counted.acceptance_length - ours) / ours, 4),
        "equal_tokens": equal / total if total else 1.0,
        "tokens": total,
        "mismatches": mismatches,
        "kinds": {kind: sum(row.kind == kind for row in rows) for kind in sorted({row.kind for row in rows})},
        "prompt_ids": [row.id for row in rows],
        "prompts": len(rows),
        "max_new_tokens": section.max_new_tokens,
        "draft_tokens": section.draft_tokens,
        "temperature": 0.0,
        "dtype": "float32",
        "vllm_version": drafted.version,
    }


def _vllm(job: VllmJob, config: Config, root: Path, title: str, work: Path) -> VllmResult:
    work.mkdir(parents=True, exist_ok=True)
    return run_vllm(job, config, root, title=title, work=work)


def _reference(
    bundle: Path, target: Path, rows: list[Row], stop: tuple[int, ...], config: Config, plain: VllmResult, drafted: VllmResult
) -> tuple[DecodeResult, list[dict[str, Any]]]:
    """Return what the reference engine did, and each first difference between vLLM's two runs.

    A difference comes with the gap between the target's two highest logits there: at the level of rounding (about 1e-4
    and below) either token is right.
    """
    setup_torch(config.runtime.threads, config.runtime.seed)
    device = pick_device(config.runtime.device)
    model = lay_out(load_target(target, "float32", device, trust_remote_code=config.target.trust_remote_code))
    draft = load_draft(bundle, target, device=device, dtype="float32").eval()
    section = config.bundle
    # vLLM drafts also where one token is lacking, this engine does not: with one more to come, both count the same rounds.
    tokens = section.max_new_tokens + 1
    room = max(len(row.prompt) for row in rows) + tokens
    say("bundle: the same prompts in the reference engine")
    with using(tuned=read_table(bundle / TABLE, device)):
        engine = Engine(model, draft, max_length=room, batch=REFERENCE_BATCH)
        answered = engine.generate(
            [row.prompt for row in rows], max_new_tokens=tokens, draft_tokens=section.draft_tokens, stop=frozenset(stop)
        )
    mismatches = []
    for row, wanted, got in zip(rows, plain.tokens, drafted.tokens, strict=True):
        same = common_prefix(wanted, got)
        if same < max(len(wanted), len(got)):
            gap = round(logit_gap(model, row.prompt + wanted[:same]), 6)
            place = {"prompt": row.id, "position": same, "logit_gap": gap}
            mismatches.append({**place, "wanted": wanted[same : same + 1], "got": got[same : same + 1]})
    return answered, mismatches
