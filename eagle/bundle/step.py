"""The bundle step: pack the draft for vLLM, check the pack, and let vLLM itself load and run it.

Output: bundle/ (config.json, model.safetensors, target.json, serving.json, kernels.json with the tuned launches of the device that
the run had, serve.sh, README.md, and acceptance.json when
validated) and validation.json: `validated`, `reason` when it is false, and otherwise the figures of `acceptance.validate_in_vllm`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.bundle.acceptance import pick_prompts, validate_in_vllm
from eagle.bundle.card import write_card
from eagle.bundle.export import export_draft
from eagle.bundle.record import make_record, write_record
from eagle.bundle.reference import write_reference
from eagle.bundle.validate import check_bundle
from eagle.errors import StepFailed
from eagle.progress import say
from eagle.serve.command import serve_script
from eagle.steps import StepContext
from eagle.target.identity import IDENTITY, target_identity
from eagle.target.load import ensure_target, load_tokenizer
from eagle.target.vllm import find_vllm, require_vllm
from kernels.tuned import TABLE

FOLDER = "bundle"
VALIDATION = "validation.json"


def run(context: StepContext) -> dict[str, Any]:
    """The step. Returns parameters, weight_bytes, validated and, if so, acceptance_length, equal_tokens, relative_gap.

    Raises PreflightError when vLLM is to be asked and is not found, BundleError when the draft does not fulfil vLLM's
    contract, StepFailed when vLLM fails or accepts the draft's tokens more or less often than the reference engine.
    """
    config, root = context.config, context.root
    interpreter = require_vllm(config.vllm, root) if config.bundle.validate_in_vllm else find_vllm(config.vllm, root)
    target = ensure_target(config.target, root, context.cache)
    folder = context.out / FOLDER
    export_draft(context.inputs["policy"] / "draft", folder, config.bundle.dtype)
    table = context.inputs["tune"] / TABLE
    if table.is_file():
        manifest.write_text(folder / TABLE, table.read_text(encoding="utf-8"))
    report = check_bundle(folder, target)
    say(str(report))
    manifest.write_json(folder / IDENTITY, target_identity(config.target, target, root, context.cache))
    script = folder / "serve.sh"
    manifest.write_text(script, serve_script(target.resolve(), interpreter, config, config.bundle.draft_tokens))
    script.chmod(0o755)
    validation = _validate(context, folder, target)
    manifest.write_json(context.out / VALIDATION, validation)
    if validation["validated"]:
        write_reference(folder, validation)
    bench = manifest.read_json(context.inputs["bench"] / "bench.json")
    tokenizer = load_tokenizer(target, trust_remote_code=config.target.trust_remote_code)
    write_record(folder, make_record(tokenizer, bench, validation))
    write_card(context, folder, report, validation)
    metrics: dict[str, Any] = {"parameters": report.parameters, "weight_bytes": report.bytes, "validated": validation["validated"]}
    return metrics | {key: validation[key] for key in ("acceptance_length", "equal_tokens", "relative_gap") if key in validation}


def _validate(context: StepContext, folder: Path, target: Path) -> dict[str, Any]:
    config = context.config
    if not config.bundle.validate_in_vllm:
        say("bundle: not validated in vLLM (bundle.validate_in_vllm is false): it will not become champion")
        return {"validated": False, "reason": "not validated: bundle.validate_in_vllm is false"}
    rows = pick_prompts(context.inputs["dataset"], config.bundle.prompts)
    found = validate_in_vllm(folder, target, rows, config, context.root, context.work)
    reference = found["reference"]
    say(f"bundle: acceptance length {found['acceptance_length']} in vLLM, {reference['acceptance_length']} in the reference engine")
    say(f"bundle: by position {found['acceptance_by_position']} and {reference['acceptance_by_position']}")
    say(f"bundle: {100 * found['equal_tokens']:.2f} % of {found['tokens']} greedy tokens equal to vLLM's own without speculation")
    for miss in found["mismatches"]:
        say(f"bundle: prompt {miss['prompt'][:12]} differs from token {miss['position']} on (logit gap {miss['logit_gap']:g})")
    if found["relative_gap"] > config.bundle.max_acceptance_gap:
        raise StepFailed(
            f"bundle: vLLM's acceptance length {found['acceptance_length']} {found['acceptance_by_position']} is "
            f"{100 * found['relative_gap']:.1f} % off the reference engine's {reference['acceptance_length']} "
            f"{reference['acceptance_by_position']} (bundle.max_acceptance_gap {config.bundle.max_acceptance_gap:g}): "
            "vLLM does not compute the draft that was trained"
        )
    return {"validated": True, **found}
