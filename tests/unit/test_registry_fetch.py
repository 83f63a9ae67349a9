"""Registered drafts by address: found, fetched and verified, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle import manifest
from eagle.errors import BundleError, ConfigError
from eagle.profiles import load_config
from eagle.registry.client import by_alias
from eagle.registry.fetch import fetch_model, model_hash
from eagle.registry.mlmodel import FILE
from eagle.train.warm_source import source_hash
from tests.unit.test_registry import MODEL, registered, root, store_of, template  # noqa: F401 -- the fixtures

CHAMPION = f"models:/{MODEL}@champion"


def test_by_alias_and_by_version(root: Path, tmp_path: Path) -> None:  # noqa: F811
    registered(root)
    config = load_config(root)
    folder = fetch_model(CHAMPION, config, root, tmp_path / "down")
    own = [entry for entry in manifest.list_files(folder) if entry["path"] != FILE]  # registering adds MLflow's file
    assert own == manifest.list_files(root / "runs" / "r" / "bundle" / "bundle")
    warm = load_config(root, overrides=[f"distill.warm_start={CHAMPION}"])
    assert source_hash(warm, root) == model_hash(f"models:/{MODEL}/1", config, root) == model_hash(CHAMPION, config, root)


def test_altered_files_are_not_loaded(root: Path, tmp_path: Path) -> None:  # noqa: F811
    registered(root)
    champion = by_alias(store_of(root), MODEL, "champion")
    assert champion is not None
    stored = next((root / ".state" / "mlartifacts").rglob("bundle/config.json"))
    stored.write_text("{}")
    with pytest.raises(BundleError, match="damaged in the artifact store"):
        fetch_model(CHAMPION, load_config(root), root, tmp_path / "down")


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("models:/nobody@champion", "nothing at models:/nobody@champion"),
        (f"models:/{MODEL}@champoin", "has no alias 'champoin' (closest: 'champion')"),
        (f"models:/{MODEL}/7", "no version '7'"),
        (f"models:/{MODEL}", "is no address of a registered model"),
        (f"models:/{MODEL}/latest", "is no address of a registered model"),
    ],
)
def test_what_is_not_there_is_told(root: Path, uri: str, words: str) -> None:  # noqa: F811
    registered(root)
    with pytest.raises(ConfigError) as caught:
        model_hash(uri, load_config(root), root)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_version_of_other_origin_is_refused(root: Path) -> None:  # noqa: F811
    registered(root)
    store_of(root).client.delete_model_version_tag(MODEL, "1", "eagle.bundle")
    with pytest.raises(ConfigError, match="was not registered by this product"):
        model_hash(CHAMPION, load_config(root), root)
