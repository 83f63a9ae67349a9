"""The register step: figures and bundle into MLflow, alias `challenger`, the gate, alias `champion` when it passed.

A rejected challenger stays registered with its reasons, and the step still completes: being rejected is a result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from mlflow.entities import RunTag

from eagle import manifest
from eagle.config import Config
from eagle.errors import StepFailed
from eagle.progress import say
from eagle.registry import promote
from eagle.registry.client import (
    Store,
    by_alias,
    close_stale_runs,
    create_version,
    log_curves,
    log_dataset,
    log_metrics,
    log_params,
    open_store,
    place,
    set_alias,
    tracked_run,
    upload_bundle,
)
from eagle.registry.gate import Candidate, Verdict
from eagle.registry.lineage import VERDICT, read_manifest, run_tags, version_tags
from eagle.registry.mlmodel import write_mlmodel
from eagle.registry.settings import log_settings
from eagle.serve.command import serve_command, serve_line
from eagle.steps import StepContext, get_step, key_parts
from eagle.target.resolve import DEMO_NAME, local_target
from eagle.target.vllm import find_vllm

REGISTRATION = "registration.json"
CURVES = "curves.json"
ATTEMPTS = 3
EVIDENCE = {
    "distill": (CURVES,),
    "policy": (CURVES,),
    "bench": ("bench.json", "table.txt", "*.png"),
    "bundle": ("validation.json",),
}


def run(context: StepContext) -> dict[str, Any]:
    """Register the bundle and judge it. Writes registration.json `{model, version, alias, run_id, uri, verdict, ...}`.

    Returns `{version, passed, acceptance_length, failed_checks}`. Raises PreflightError when the store cannot be used,
    StepFailed when the bundle or its upload is not what the manifest says, BusyError when the registry is locked.
    """
    config = context.config
    bundle = context.inputs["bundle"] / "bundle"
    expected = _bundle_hashes(context.inputs["bundle"])
    validation = _read(context.inputs["bundle"] / "validation.json")
    candidate = read_candidate(context.inputs, validation)
    store, model = open_store(config, context.root), model_name(config)
    key = manifest.hash_json(key_parts(get_step("register"), config, context.root, context.out.parent))
    at = place(context.out.parent.resolve())
    for stale in close_stale_runs(store, key, at):
        say(f"register: closed run {stale}, which an earlier attempt had left open")
    bench = _read(context.inputs["bench"] / manifest.METRICS)
    tags = run_tags(context, key, at)
    with tracked_run(store, f"{model} {key[:8]}", tags) as run_id:
        _log_figures(store, run_id, context)
        log_settings(store, run_id, context)
        mlmodel = write_mlmodel(context.work, expected, _served_target(context), config.bundle.draft_tokens)
        files = expected | {mlmodel.name: manifest.hash_file(mlmodel)}
        source = upload_bundle(store, run_id, bundle, mlmodel, files, context.work / "verify")
        described = version_tags(tags, candidate, bench, validation, expected, files)
        version = create_version(store, model, source, run_id, described)
        set_alias(store, model, promote.CHALLENGER, version)
        verdict = _decide(store, model, version, candidate, context)
        store.client.log_batch(
            run_id, tags=[RunTag(VERDICT, verdict.word), RunTag("eagle.model", model), RunTag("eagle.version", version)]
        )
    _report(context, store, model, version, run_id, source, verdict)
    return {
        "version": int(version),
        "passed": verdict.passed,
        "acceptance_length": candidate.acceptance_length,
        "failed_checks": [reason.name for reason in verdict.failures()],
    }


def model_name(config: Config) -> str:
    """Return the registered model's name: `register.model_name`, else `eagle31-` and the target's own name."""
    if config.register_.model_name:
        return config.register_.model_name
    target = DEMO_NAME if config.target.model == "demo" else Path(config.target.model).name
    return "eagle31-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", target).strip("-") or "target")


def read_candidate(inputs: dict[str, Path], validation: dict[str, Any]) -> Candidate:
    """Gather the gate's figures from the bundle step's validation.json and the bench step's metrics.json."""
    bench = _read(inputs["bench"] / manifest.METRICS)
    validated = bool(_field(validation, "validated", "validation.json"))
    equal = float(_field(bench, "equal_tokens", "bench/metrics.json"))
    return Candidate(
        acceptance_length=float(_field(validation, "acceptance_length", "validation.json")) if validated else None,
        equal_tokens=min(equal, float(_field(validation, "equal_tokens", "validation.json"))) if validated else equal,
        memory_overhead=float(_field(bench, "memory_overhead", "bench/metrics.json")),
        validated=validated,
        measured_on=_measured_on(inputs["bundle"], validation) if validated else "",
    )


def _measured_on(folder: Path, validation: dict[str, Any]) -> str:
    """Return the digest of the prompts, the decoding settings and the target behind the acceptance length."""
    settings = [_field(validation, name, "validation.json") for name in ("prompt_ids", "draft_tokens", "max_new_tokens")]
    return manifest.hash_json([*settings, read_manifest(folder)["parts"]["extra"]["target"]])


def _decide(store: Store, model: str, version: str, candidate: Candidate, context: StepContext) -> Verdict:
    """Judge the candidate; when another run's model becomes champion meanwhile, judge it against that one."""
    for _ in range(ATTEMPTS - 1):
        champion = _comparable_champion(store, model, candidate, context)
        try:
            return promote.decide(store, model, version, candidate, context.config.register_.gate, champion)
        except promote.ChampionMoved as moved:
            say(f"register: {moved}")
    champion = _comparable_champion(store, model, candidate, context)
    return promote.decide(store, model, version, candidate, context.config.register_.gate, champion)


def _comparable_champion(store: Store, model: str, candidate: Candidate, context: StepContext) -> promote.Champion | None:
    """Return the champion with figures on the candidate's prompts, measured anew where the recorded ones are of others."""
    version = by_alias(store, model, promote.CHAMPION)
    if version is None:
        return None
    recorded = promote.recorded_candidate(version)
    if not candidate.validated or recorded.measured_on == candidate.measured_on:
        return promote.Champion(str(version.version), recorded)
    from eagle.registry.remeasure import remeasure  # torch and the bundle's checks, seldom needed

    return promote.Champion(str(version.version), remeasure(store, version, recorded, context, candidate.measured_on))


def _bundle_hashes(folder: Path) -> dict[str, str]:
    """Return {path below bundle/: sha256} from the bundle step's manifest; StepFailed when the files are not those."""
    found = read_manifest(folder)
    altered = manifest.altered_file(folder, found)
    if altered:
        raise StepFailed(f"register: {folder / altered} is not the file that the bundle step wrote; run: eagle step bundle --force")
    prefix = "bundle/"
    hashes = {f["path"].removeprefix(prefix): f["sha256"] for f in found["files"] if f["path"].startswith(prefix)}
    if not hashes:
        raise StepFailed(f"register: {folder} holds no bundle/ folder; run: eagle step bundle --force")
    return hashes


def _log_figures(store: Store, run_id: str, context: StepContext) -> None:
    log_params(store, run_id, context.config.model_dump(mode="json", by_alias=True))
    log_dataset(store, run_id, context.inputs["dataset"], read_manifest(context.inputs["dataset"])["content_hash"])
    for name, folder in context.inputs.items():
        log_metrics(store, run_id, _read(folder / manifest.METRICS), f"{name}.")
        if (folder / CURVES).is_file():
            for prefix, rows in curves(_read(folder / CURVES), name):
                log_curves(store, run_id, rows, prefix)
    for name, patterns in EVIDENCE.items():
        for path in sorted(p for pattern in patterns for p in context.inputs[name].glob(pattern)):
            store.client.log_artifact(run_id, str(path), f"evidence/{name}")


def curves(value: Any, prefix: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (metric prefix, rows) for every list of rows in a curves.json, whether it is a list or lists by name.

    Columns (`{"step": [...], "loss": [...]}`) are turned into rows.
    """
    if isinstance(value, list):
        if value and all(isinstance(row, dict) for row in value):
            yield prefix, value
    elif isinstance(value, dict):
        steps = value.get("step")
        if isinstance(steps, list):
            columns = {name: column for name, column in value.items() if isinstance(column, list) and len(column) == len(steps)}
            yield prefix, [{name: column[i] for name, column in columns.items()} for i in range(len(steps))]
            return
        for name, part in value.items():
            yield from curves(part, f"{prefix}.{name}")


def _report(
    context: StepContext, store: Store, model: str, version: str, run_id: str, source: str, verdict: Verdict
) -> None:
    alias = promote.CHAMPION if verdict.passed else promote.CHALLENGER
    manifest.write_json(
        context.out / REGISTRATION,
        {
            "model": model,
            "version": version,
            "alias": alias,
            "run_id": run_id,
            "uri": f"models:/{model}@{alias}",
            "tracking_uri": store.uri,
            "verdict": verdict.word,
            "reasons": [asdict(reason) for reason in verdict.reasons],
            "lines": [reason.line() for reason in verdict.reasons],
            "serve": _serve_line(context, source),
        },
    )
    say(f"register: {model} version {version}: the gate says {verdict.word}, alias {alias}")
    for reason in verdict.reasons:
        say(f"  {reason.line()}")


def _serve_line(context: StepContext, source: str) -> str:
    """Return the serve command, as a line for a shell, of the registered files where they lie on this disk, else of the step's."""
    parsed = urlparse(source)
    bundle = Path(url2pathname(parsed.path)) if parsed.scheme == "file" else context.inputs["bundle"].resolve() / "bundle"
    config, target = context.config, _served_target(context)
    return serve_line(serve_command(bundle, target, find_vllm(config.vllm, context.root), config, config.bundle.draft_tokens))


def _served_target(context: StepContext) -> str:
    """Return the target's folder on this machine, or its hub name."""
    target = local_target(context.config.target, context.root, context.cache)
    return str(target.resolve()) if target else context.config.target.model


def _read(path: Path) -> dict[str, Any]:
    try:
        return manifest.read_json(path)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StepFailed(f"register: cannot read {path}: {error}; run: eagle step {path.parent.name} --force") from None


def _field(values: dict[str, Any], key: str, where: str) -> Any:
    if values.get(key) is None:
        raise StepFailed(f"register: {where} has no '{key}'; run the step that writes it again")
    return values[key]
