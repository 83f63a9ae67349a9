"""`eagle reproduce` on a real store and git repository, with a "pipeline" that copies files: equal, different, refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file
from typer.testing import CliRunner

from eagle import manifest
from eagle.cli import app
from eagle.errors import ConfigError, StepFailed
from eagle.profiles import load_config
from eagle.registry.client import by_alias
from eagle.registry.settings import recorded
from eagle.reproduce.run import STEPS, map_hash
from eagle.steps import STEPS as TABLE
from eagle.steps import key_parts, run_step
from tests.flows.fakes import make_project
from tests.unit.test_registry import MODEL, make_inputs, store_of

CODE = '''
import shutil, sys
from pathlib import Path
name, base = sys.argv[sys.argv.index("step") + 1], Path(sys.argv[sys.argv.index("--dir") + 1])
root = Path(sys.argv[sys.argv.index("--root") + 1])
settings = Path(sys.argv[sys.argv.index("--profile") + 1]).read_text()
assert (root / "target model" / "config.json").is_file() and "validate_in_vllm: false" in settings, settings
if name == "policy" and (root / "broken").exists():
    sys.exit(7)
shutil.copytree(root / "outputs" / name, base / name)
'''


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def make(folder: Path) -> Path:
    """A project in a git repository that holds its outputs and code to copy them; version 1 is registered from them."""
    root = make_project(folder, dataset={"prompt_files": ["mine.jsonl"]}, target={"model": "target model"})
    (root / "mine.jsonl").write_text('{"prompt": "a"}\n')
    base = make_inputs(root)
    config = load_config(root)
    save_file({"d2t": np.arange(8), "fc.weight": np.ones((2, 2), np.float32)}, base / "bundle" / "bundle" / "model.safetensors")
    for name in STEPS:
        manifest.write_manifest(base / name, name, key_parts(TABLE[name], config, root, base))
        shutil.copytree(base / name, root / "outputs" / name)
    (root / "eagle").mkdir()
    (root / "eagle" / "__init__.py").touch()
    (root / "eagle" / "steps.py").touch()
    (root / "eagle" / "__main__.py").write_text(CODE)
    (root / ".gitignore").write_text("/runs/\n/.state/\n/.cache/\n/target model/\n/mine.jsonl\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "the commit of the version")
    run_step("register", config, root, base)
    return root


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("mein Prøjekt") / "p")


@pytest.fixture
def root(template: Path) -> Path:
    """The project at the version's commit, as each test finds it."""
    git(template, "reset", "-q", "--hard", "HEAD")
    git(template, "clean", "-qfd")
    (template / "mine.jsonl").write_text('{"prompt": "a"}\n')
    return template


def reproduce(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--root", str(root), "reproduce", *arguments])


def test_settings_are_kept_whole_with_the_run(root: Path) -> None:
    store = store_of(root)
    champion = by_alias(store, MODEL, "champion")
    assert champion is not None
    found = recorded(store, champion)
    assert found.config == load_config(root).model_dump(mode="json", by_alias=True)
    assert (found.commit, found.dirty) == (git(root, "rev-parse", "HEAD"), False)
    assert found.outside["dataset"]["prompts:mine.jsonl"] == manifest.hash_file(root / "mine.jsonl")


def test_the_same_again_is_equal_and_leaves_nothing(root: Path, tmp_path: Path) -> None:
    (root / "eagle" / "__main__.py").write_text("raise SystemExit('the code of today')")
    done = reproduce(root, f"models:/{MODEL}/1", "--keep", str(tmp_path / "kept"))
    assert done.exit_code == 0, (done.output, done.exception)
    rows = [line for line in done.stdout.splitlines() if "equal" in line]
    assert [row.split()[1] for row in rows] == ["data", "stage", "stage", "draft-vocabulary", "draft", "bundle"]
    assert "different" not in done.stdout
    assert (tmp_path / "kept" / "bundle" / "manifest.json").is_file()
    assert len(git(root, "worktree", "list").splitlines()) == 1
    done = reproduce(root, f"models:/{MODEL}@champion", "--keep", str(tmp_path / "kept"))
    assert isinstance(done.exception, ConfigError)


def test_one_other_byte_is_different_and_exits_1(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = git(root, "rev-parse", "HEAD")
    weights = root / "outputs" / "bundle" / "bundle" / "model.safetensors"
    save_file({"d2t": np.arange(8), "fc.weight": np.full((2, 2), 2.0, np.float32)}, weights)
    git(root, "commit", "-qam", "other weights")
    with_commit(root, git(root, "rev-parse", "HEAD"))
    try:
        done = reproduce(root, f"models:/{MODEL}/1")
    finally:
        git(root, "reset", "-q", "--hard", other)
        with_commit(root, other)
    assert done.exit_code == 1
    assert [line.split()[1] for line in done.stdout.splitlines() if "different" in line] == ["draft"]


def with_commit(root: Path, commit: str) -> None:
    store_of(root).client.set_model_version_tag(MODEL, "1", "eagle.git", commit)


@pytest.mark.parametrize("case", ["dirty", "no commit", "unknown commit", "no prompts", "other prompts", "no target", "no address"])
def test_what_cannot_be_made_again_is_one_line(root: Path, case: str) -> None:
    client, commit = store_of(root).client, git(root, "rev-parse", "HEAD")
    address, words = f"models:/{MODEL}/1", ""
    target = root / "target model"
    try:
        if case == "dirty":
            client.set_model_version_tag(MODEL, "1", "eagle.git_dirty", "true")
            words = "made with uncommitted changes"
        elif case == "no commit":
            client.delete_model_version_tag(MODEL, "1", "eagle.git")
            words = "records no commit"
        elif case == "unknown commit":
            with_commit(root, "0123456789" * 4)
            words = "git fetch origin 0123456789"
        elif case == "no prompts":
            (root / "mine.jsonl").unlink()
            words = "mine.jsonl is not there any more"
        elif case == "other prompts":
            (root / "mine.jsonl").write_text('{"prompt": "b"}\n')
            words = "mine.jsonl is not what the version was made with"
        elif case == "no target":
            target.rename(root / ".cache-target")
            words = "target.model: target model is not what"
        else:
            address, words = f"models:/{MODEL}", "is no address"
        done = reproduce(root, address)
    finally:
        client.set_model_version_tag(MODEL, "1", "eagle.git_dirty", "false")
        with_commit(root, commit)
        if not target.exists():
            (root / ".cache-target").rename(target)
    assert isinstance(done.exception, ConfigError), done.output
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)
    assert len(git(root, "worktree", "list").splitlines()) == 1


def test_a_version_without_settings_is_one_line(root: Path) -> None:
    store = store_of(root)
    made = store.client.create_model_version(MODEL, (root / "outputs").as_uri())
    done = reproduce(root, f"models:/{MODEL}/{made.version}")
    assert isinstance(done.exception, ConfigError)
    assert "settings.json" in str(done.exception)
    store.client.delete_model_version(MODEL, str(made.version))


def test_a_step_that_fails_there_is_told(root: Path) -> None:
    other = git(root, "rev-parse", "HEAD")
    (root / "broken").touch()
    git(root, "add", "-A")
    git(root, "commit", "-qm", "broken")
    with_commit(root, git(root, "rev-parse", "HEAD"))
    try:
        done = reproduce(root, f"models:/{MODEL}/1")
    finally:
        git(root, "reset", "-q", "--hard", other)
        with_commit(root, other)
    assert isinstance(done.exception, StepFailed)
    assert "step policy ended with exit code 7" in str(done.exception)


def test_a_draft_without_a_map_has_no_hash_of_one(tmp_path: Path) -> None:
    save_file({"fc.weight": np.ones((2, 2), np.float32)}, tmp_path / "a.safetensors")
    save_file({"d2t": np.arange(4)}, tmp_path / "b.safetensors")
    save_file({"d2t": np.arange(4) + 1}, tmp_path / "c.safetensors")
    hashes: list[Any] = [map_hash(tmp_path / f"{name}.safetensors") for name in "abc"]
    assert hashes[0] is None
    assert len(set(hashes)) == 3
