"""`eagle registry` on a real store: list, show, diff, history, promote, rollback, gc, pull, and what each refuses."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from click.testing import Result
from typer.testing import CliRunner

from eagle import manifest
from eagle.cli import app
from eagle.errors import BundleError, ConfigError, GateRejected, StepFailed
from eagle.locks import owner_of
from eagle.registry import pull as pulling
from eagle.registry.client import by_alias
from eagle.registry.collect import collect, garbage
from eagle.registry.promote import moves
from tests.flows.fakes import make_project
from tests.unit.test_registry import MODEL, aliased, registered, store_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and locks of POSIX")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 passed, 2 rejected, 3 passed and champion, 4 and 5 rejected (5: another setting)."""
    folder = make_project(tmp_path_factory.mktemp("mein Prøjekt") / "p")
    for acceptance in (2.0, 1.5, 2.1, 1.4):
        registered(folder, acceptance=acceptance)
    params = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(params + "policy: {steps: 7}\n")
    registered(folder, acceptance=1.3)
    (folder / "params.yaml").write_text(params)
    return folder


def eagle(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--root", str(root), "registry", *arguments])


def said(root: Path, *arguments: str) -> str:
    done = eagle(root, *arguments)
    assert done.exception is None, done.exception
    return done.stdout


def test_list_shows_every_version_with_aliases_and_figures(root: Path) -> None:
    lines = said(root, "list").splitlines()
    row = next(line for line in lines if "champion" in line)
    assert all(word in row for word in ("3", "passed", "2.100", "b1 1.10x", datetime.now(UTC).strftime("%Y-")))
    found = {entry["version"]: entry for entry in json.loads(said(root, "list", "--json"))}
    assert {v: e["aliases"] for v, e in found.items()} == {
        "1": ["previous"], "2": [], "3": ["champion"], "4": [], "5": ["challenger"],
    }  # fmt: skip
    assert [e["acceptance_length"] for e in found.values()] == [2.0, 1.5, 2.1, 1.4, 1.3]
    assert [e["verdict"] for e in found.values()] == ["passed", "rejected", "passed", "rejected", "rejected"]


def test_an_empty_registry_says_what_is_next(tmp_path: Path) -> None:
    assert "next: make run" in said(make_project(tmp_path / "p"), "list")


def test_show_by_number_or_alias_with_reasons_lineage_and_hashes(root: Path) -> None:
    found = json.loads(said(root, "show", "champion", "--json"))
    assert found == json.loads(said(root, "show", "3", "--json"))
    assert (found["version"], found["aliases"], found["verdict"], found["previous_champion"]) == ("3", ["champion"], "passed", "1")
    assert set(found["inputs"]) == {"dataset", "distill", "policy", "bench", "bundle"}
    assert found["lineage"]["vllm"] == "0.0-fake"
    assert set(found["files"]) == {"MLmodel", "README.md", "config.json", "model.safetensors", "serve.sh"}
    text = said(root, "show", "4")
    assert "acceptance_over_champion 0.6667 >= 0.98  FAILED" in text
    assert found["files"]["config.json"] in text


def test_diff_names_settings_data_and_figures(root: Path) -> None:
    found = json.loads(said(root, "diff", "champion", "challenger", "--json"))
    rows = {(row["kind"], row["name"]): (row["one"], row["other"]) for row in found}
    assert rows["setting", "policy.steps"][1] == "7"
    assert rows["figure", "bundle.acceptance_length"] == (2.1, 1.3)
    assert ("input", "bundle") in rows
    assert ("input", "dataset") not in rows
    assert "policy.steps" in said(root, "diff", "3", "5")
    assert "do not differ" in said(root, "diff", "3", "champion")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("show", "champoin"), ConfigError, "closest: 'champion'"),
        (("show", "99"), ConfigError, "no version '99'"),
        (("promote", "4"), GateRejected, "--force --why"),
        (("promote", "4", "--force"), ConfigError, "needs --why"),
        (("promote", "champion"), ConfigError, "champion already"),
        (("gc",), ConfigError, "--older-than DAYS"),
    ],
)
def test_what_is_refused_is_one_line_and_moves_nothing(root: Path, arguments: Any, error: type, message: str) -> None:
    done = eagle(root, *arguments)
    assert isinstance(done.exception, error)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
    assert aliased(store_of(root), "champion", "previous") == ["3", "1"]


def test_a_forced_promotion_is_kept_in_the_history_and_one_command_undoes_it(root: Path) -> None:
    assert "forced  a trial  by " in said(root, "promote", "4", "--force", "--why", "a trial")
    assert aliased(store_of(root), "champion", "previous") == ["4", "3"]
    assert "rollback  it was slow" in said(root, "rollback", "--why", "it was slow")
    assert aliased(store_of(root), "champion", "previous") == ["3", "1"]
    history = said(root, "history")
    assert history.count("  champion  version ") == len(moves(store_of(root), MODEL)) == 4
    assert "version 4  rejected  acceptance_over_champion" in history


def test_pull_is_hash_checked_and_keeps_one_copy(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(said(root, "pull", "champion").strip())
    assert folder == root / ".cache" / "bundles" / MODEL / "3"
    files = json.loads(said(root, "show", "3", "--json"))["files"]
    assert {f["path"]: f["sha256"] for f in manifest.list_files(folder)} == files
    before = (folder / "model.safetensors").stat().st_ino
    assert Path(said(root, "pull", "3").strip()) == folder
    assert (folder / "model.safetensors").stat().st_ino == before
    assert [p.name for p in folder.parent.iterdir() if p.name != "3"] == [".3.lock"]
    assert owner_of(folder.parent / ".3.lock") is None
    (folder / "config.json").write_text("{}")
    done = eagle(root, "pull", "3")
    assert isinstance(done.exception, ConfigError)
    assert "config.json is altered" in str(done.exception)


@pytest.mark.parametrize("damage", ["alter", "drop", "add"])
def test_a_damaged_artifact_is_not_pulled(root: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pulling.fetch_version

    def damaged(*arguments: Any) -> Path:
        folder = real(*arguments)
        if damage == "alter":
            (folder / "model.safetensors").write_bytes(b"\xff")
        elif damage == "drop":
            (folder / "serve.sh").unlink()
        else:
            (folder / "model-2.safetensors").write_bytes(b"x")
        return folder

    monkeypatch.setattr(pulling, "fetch_version", damaged)
    done = eagle(root, "pull", "champion", "--to", str(tmp_path / "a b"))
    assert isinstance(done.exception, BundleError)
    assert {"alter": "is altered", "drop": "is missing", "add": "is not part of it"}[damage] in str(done.exception)
    assert [p.name for p in tmp_path.iterdir()] == [".a b.lock"]


def test_a_version_without_hashes_is_not_pulled_and_one_hash_of_old_is_enough(root: Path, tmp_path: Path) -> None:
    version = store_of(root).client.get_model_version(MODEL, "3")
    del version.tags["eagle.files"]
    assert pulling.pull(store_of(root), version, tmp_path / "old")
    assert not pulling.pull(store_of(root), version, tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="another hash"):
        pulling.pull(store_of(root), version, tmp_path / "old")
    del version.tags["eagle.bundle"]
    with pytest.raises(StepFailed, match="records no hashes"):
        pulling.pull(store_of(root), version, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_gc_picks_rejected_ones_by_age_or_number_and_never_what_is_reachable(root: Path) -> None:
    store, later = store_of(root), datetime.now(UTC) + timedelta(days=10)
    assert [e.version for e in garbage(store, MODEL, 9, None, later)] == ["2", "4"]  # 5 is challenger
    assert garbage(store, MODEL, 11, None, later) == []
    assert [e.version for e in garbage(store, MODEL, None, 2)] == ["2"]
    assert garbage(store, MODEL, None, 3) == []
    store.client.set_registered_model_alias(MODEL, "keep", "2")
    assert [e.version for e in garbage(store, MODEL, 9, None, later)] == ["4"]
    store.client.delete_registered_model_alias(MODEL, "keep")


def test_gc_deletes_versions_and_files_only_when_told(root: Path) -> None:
    store = store_of(root)
    source = Path(unquote(urlparse(store.client.get_model_version(MODEL, "2").source).path))
    assert (source / "model.safetensors").is_file()
    run = store.client.get_model_version(MODEL, "2").run_id
    assert "version 2  rejected" in said(root, "gc", "--keep", "2")
    assert (source / "model.safetensors").is_file()
    assert "deleted" in said(root, "gc", "--keep", "2", "--yes")
    assert not source.exists()
    assert store.client.get_run(run).data.metrics["bundle.acceptance_length"] == 1.5
    assert [entry["version"] for entry in json.loads(said(root, "list", "--json"))] == ["1", "3", "4", "5"]
    assert "nothing of" in said(root, "gc", "--keep", "2", "--yes")
    champion = by_alias(store, MODEL, "champion")
    assert champion is not None
    assert str(champion.version) == "3"
    assert registered(root, acceptance=1.2)["version"] == "6", "a number is never given twice"


def test_gc_leaves_files_that_were_not_uploaded_by_us(root: Path, tmp_path: Path) -> None:
    store = store_of(root)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    made = store.client.create_model_version(MODEL, (tmp_path / "mine").as_uri(), tags={"eagle.verdict": "abandoned"})
    later = datetime.now(UTC) + timedelta(days=10)
    assert str(made.version) in [entry.version for entry in collect(store, MODEL, 9, None, later)]
    assert (tmp_path / "mine" / "thesis.txt").is_file()
