"""The champion's files come back from the store and are measured on the challenger's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle.bundle.export import export_draft
from eagle.config import Config
from eagle.draft.io import save_draft
from eagle.errors import BundleError, StepFailed
from eagle.registry import client, remeasure
from eagle.registry.gate import Candidate
from eagle.registry.lineage import FILES
from eagle.registry.mlmodel import write_mlmodel
from eagle.steps import StepContext
from eagle.target.vllm import Counters, VllmJob, VllmResult
from tests.toys import tiny_target
from tests.training.builders import make_draft, write_dataset

RECORDED = Candidate(1.5, 1.0, 0.2, True, "old prompts")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[StepContext, client.Store, Any]:
    """A target, its held-out rows, and a champion in a store."""
    root = tmp_path_factory.mktemp("project")
    target = tiny_target(root / "target")
    config = Config(target={"model": str(target)}, bundle={"draft_tokens": 2, "prompts": 3, "max_new_tokens": 8})
    write_dataset(root / "dataset", target, train=1, heldout=4, tokens=4)
    save_draft(root / "draft", make_draft(target))
    export_draft(root / "draft", root / "bundle", "float32")
    store = client.open_store(config, root)
    with client.tracked_run(store, "champion", {}) as run_id:
        expected = {f["path"]: f["sha256"] for f in client.manifest.list_files(root / "bundle")}
        (root / "more").mkdir()
        mlmodel = write_mlmodel(root / "more", expected, str(target), 2)
        files = expected | {mlmodel.name: client.manifest.hash_file(mlmodel)}
        source = client.upload_bundle(store, run_id, root / "bundle", mlmodel, files, root / "scratch")
        version = client.create_version(store, "m", source, run_id, {FILES: client.manifest.canonical(files)})
    client.set_alias(store, "m", "champion", version)
    context = StepContext(config, root, {"dataset": root / "dataset"}, root / "out", root / "work")
    return context, store, client.by_alias(store, "m", "champion")


def answer(monkeypatch: pytest.MonkeyPatch, counters: Counters | None) -> list[VllmJob]:
    jobs: list[VllmJob] = []

    def run(job: VllmJob, _config: Config, _root: Path, **_more: Any) -> VllmResult:
        jobs.append(job)
        return VllmResult([], 1.0, 1.0, "0", counters)

    monkeypatch.setattr(remeasure, "run_vllm", run)
    return jobs


def test_the_stored_bundle_is_measured_on_the_new_prompts(
    made: tuple[StepContext, client.Store, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, store, champion = made
    jobs = answer(monkeypatch, Counters(100, 200, 45, [30, 15]))
    got = remeasure.remeasure(store, champion, RECORDED, context, "new prompts")
    assert got == Candidate(1.45, 1.0, 0.2, True, "new prompts")
    (job,) = jobs
    assert (job.dtype, len(job.requests), job.requests[0].max_tokens, job.requests[0].temperature) == ("float32", 3, 8, 0.0)
    assert job.speculative is not None
    assert job.speculative["num_speculative_tokens"] == 2
    assert (Path(str(job.speculative["model"])) / "model.safetensors").is_relative_to(context.work)


def test_a_champion_for_another_target_is_no_yardstick(
    made: tuple[StepContext, client.Store, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context, store, champion = made
    other = tiny_target(tmp_path / "other", hidden=96)
    jobs = answer(monkeypatch, None)
    config = context.config.model_copy(update={"target": context.config.target.model_copy(update={"model": str(other)})})
    moved = StepContext(config, context.root, context.inputs, context.out, context.work)
    assert remeasure.remeasure(store, champion, RECORDED, moved, "new prompts") is None
    assert jobs == []


def test_no_counters_is_a_failure_not_a_figure(
    made: tuple[StepContext, client.Store, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, store, champion = made
    answer(monkeypatch, Counters(0, 0, 0, []))
    with pytest.raises(StepFailed, match="no drafts"):
        remeasure.remeasure(store, champion, RECORDED, context, "new prompts")


def test_a_champion_whose_files_were_altered_in_the_store_is_not_loaded(
    made: tuple[StepContext, client.Store, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, store, champion = made
    jobs = answer(monkeypatch, None)
    stored = next((context.root / ".state" / "mlartifacts").rglob("model.safetensors"))
    whole = stored.read_bytes()
    stored.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(BundleError, match=r"damaged in the artifact store \(model.safetensors is altered\)"):
        remeasure.remeasure(store, champion, RECORDED, context, "new prompts")
    stored.write_bytes(whole)
    assert jobs == []
