"""A registered bundle is fetched once, checked by hash, and mended when its copy was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle import manifest
from eagle.errors import BundleError, ConfigError
from eagle.profiles import load_config
from eagle.registry.client import BUNDLE, Store, create_version, open_store, set_alias
from eagle.registry.fetch import cached, champion_address
from tests.flows.fakes import make_project

MODEL = "eagle31-x"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("Ordnér #1") / "project")


@pytest.fixture(scope="module")
def store(root: Path) -> Store:
    return open_store(load_config(root), root)


def register(store: Store, folder: Path, content: str, *, tagged: bool = True) -> str:
    """Register a bundle of two files; return the version."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(content)
    (folder / "model.safetensors").write_bytes(b"\0weights")
    run_id = store.client.create_run(store.experiment_id).info.run_id
    store.client.log_artifacts(run_id, str(folder), BUNDLE)
    source = f"{store.client.get_run(run_id).info.artifact_uri}/{BUNDLE}"
    hashes = {f["path"]: f["sha256"] for f in manifest.list_files(folder)}
    tags = {"eagle.bundle": manifest.hash_json(sorted(hashes.items()))} if tagged else {}
    return create_version(store, MODEL, source, run_id, tags)


def files(store: Store, version: str) -> Path:
    """The version's own files in the store."""
    from urllib.parse import urlparse
    from urllib.request import url2pathname

    return Path(url2pathname(urlparse(store.client.get_model_version(MODEL, version).source).path))


def test_one_copy_by_content_and_a_changed_copy_is_replaced(store: Store, tmp_path: Path) -> None:
    version = register(store, tmp_path / "b", '{"a": 1}')
    set_alias(store, MODEL, "champion", version)
    first = cached(store, champion_address(MODEL), tmp_path / "cache")
    assert (first.model, first.version) == (MODEL, version)
    assert (first.folder / "config.json").read_text() == '{"a": 1}'
    marked = (first.folder / "config.json").stat().st_ino
    assert cached(store, f"models:/{MODEL}/{version}", tmp_path / "cache").folder == first.folder
    assert (first.folder / "config.json").stat().st_ino == marked
    (first.folder / "config.json").write_text('{"a": 2}')
    (first.folder / "more.safetensors").write_bytes(b"x")
    again = cached(store, champion_address(MODEL), tmp_path / "cache")
    assert sorted(p.name for p in again.folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (again.folder / "config.json").read_text() == '{"a": 1}'
    assert [p.name for p in (tmp_path / "cache" / "bundles").iterdir() if p.is_dir()] == [again.folder.name]


def test_files_that_were_altered_in_the_store_are_refused_and_not_kept(store: Store, tmp_path: Path) -> None:
    version = register(store, tmp_path / "b", '{"b": 1}')
    (files(store, version) / "config.json").write_text('{"b": 2}')
    with pytest.raises(BundleError, match=f"{MODEL} version {version} is damaged in the artifact store"):
        cached(store, f"models:/{MODEL}/{version}", tmp_path / "cache")
    assert [p for p in (tmp_path / "cache" / "bundles").iterdir() if p.is_dir()] == []


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("models:/nothing@champion", "nothing at models:/nothing@champion"),
        (f"models:/{MODEL}x@champion", f"(closest: '{MODEL}'); models here: {MODEL}"),
        (f"models:/{MODEL}@nobody", "has no alias 'nobody'; aliases: champion"),
        (f"models:/{MODEL}@champions", "(closest: 'champion')"),
        (f"models:/{MODEL}/999", "no version '999'"),
        ("models:/x/99999999999999999999999", "no address"),
        ("models:/x/y/z", "no address"),
        ("models:/x@", "no address"),
    ],
)
def test_an_address_that_names_nothing_is_one_line(store: Store, tmp_path: Path, address: str, word: str) -> None:
    set_alias(store, MODEL, "champion", register(store, tmp_path / "b", "{}"))
    with pytest.raises(ConfigError) as raised:
        cached(store, address, tmp_path / "cache")
    assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_version_that_somebody_else_registered_is_refused(store: Store, tmp_path: Path) -> None:
    version = register(store, tmp_path / "b", '{"c": 1}', tagged=False)
    with pytest.raises(ConfigError, match="was not registered by this product"):
        cached(store, f"models:/{MODEL}/{version}", tmp_path / "cache")
