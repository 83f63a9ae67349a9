"""The tags of runs and model versions: what a draft was made from, by which code, and what it was measured at.

Their names are public: `eagle registry list|show|diff` and whoever queries MLflow read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.errors import StepFailed
from eagle.registry.gate import Candidate
from eagle.steps import StepContext
from eagle.target.resolve import target_fingerprint

KEY, PLACE = "eagle.key", "eagle.place"
TARGET, DATASET, INPUTS, BUNDLE, FILES = "eagle.target", "eagle.dataset", "eagle.inputs", "eagle.bundle", "eagle.files"
GIT, GIT_DIRTY, VERSIONS, VLLM = "eagle.git", "eagle.git_dirty", "eagle.versions", "eagle.vllm"
CANDIDATE, ACCEPTANCE, SPEEDUP = "eagle.candidate", "eagle.acceptance_length", "eagle.speedup"
VERDICT, REASONS, DECIDED = "eagle.verdict", "eagle.reasons", "eagle.decided_at"
PENDING, ABANDONED = "pending", "abandoned"  # verdicts beside the gate's own: not judged yet, and never will be
SPEEDUP_PREFIX = "speedup_b"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a finished step; StepFailed when there is none."""
    found = manifest.read_manifest(folder)
    if found is None:
        raise StepFailed(f"register: no readable manifest in {folder}; run: eagle step {folder.name} --dir {folder.parent}")
    return found


def run_tags(context: StepContext, key: str, at: str) -> dict[str, str]:
    """Return the tags of the MLflow run: the step's key and place, target, data digest, every input's hash, git and packages."""
    git = manifest.git_state(context.root)
    inputs = {name: read_manifest(folder)["content_hash"] for name, folder in context.inputs.items()}
    tags = {
        KEY: key,
        PLACE: at,
        TARGET: target_fingerprint(context.config.target, context.root, context.cache),
        DATASET: inputs["dataset"],
        INPUTS: manifest.canonical(inputs),
        VERSIONS: manifest.canonical(manifest.versions()),
    }
    if git["sha"]:
        tags |= {GIT: git["sha"], GIT_DIRTY: str(git["dirty"]).lower(), "mlflow.source.git.commit": git["sha"]}
    return tags


def version_tags(
    tags: dict[str, str], candidate: Candidate, bench: dict[str, Any], validation: dict[str, Any], bundle: dict[str, str],
    files: dict[str, str],
) -> dict[str, str]:  # fmt: skip
    """Return a new version's tags: its run's lineage, figures, vLLM's version, the hashes of its files, verdict pending.

    bench: the bench step's metrics. bundle, files: {path: sha256} of the draft's own files, and of all that is registered.
    """
    names = (TARGET, DATASET, INPUTS, VERSIONS, GIT, GIT_DIRTY)
    found = {name: tags[name] for name in names if name in tags} | {
        VERDICT: PENDING,
        CANDIDATE: manifest.canonical(candidate.to_dict()),
        BUNDLE: manifest.hash_json(sorted(bundle.items())),
        FILES: manifest.canonical(files),
        SPEEDUP: manifest.canonical(
            {name.removeprefix("speedup_"): value for name, value in bench.items() if name.startswith(SPEEDUP_PREFIX)}
        ),
    }
    if candidate.acceptance_length is not None:
        found[ACCEPTANCE] = f"{candidate.acceptance_length:g}"
    if validation.get("vllm_version"):
        found[VLLM] = str(validation["vllm_version"])
    return found
