"""Replay of a former run's training rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from eagle import manifest
from eagle.config import Config
from eagle.dataset.prompts import Prompt, split_prompts
from eagle.dataset.read import Row, write_shards
from eagle.dataset.replay import replay_rows
from eagle.errors import ConfigError, DataError
from eagle.steps import STEPS, key_parts, run_step
from tests.toys import tiny_target

FRACTION = 0.3


def row(text: str, source: str = "shipped:chat") -> Row:
    return Row(hashlib.sha256(text.encode()).hexdigest(), source, "chat", 0.0, [5, 6, 7], [0, 1, 1], 1, "length")


def rows_of(split: str, start: int, count: int) -> list[Row]:
    """Rows whose texts belong to `split` by their hash."""
    found: list[Row] = []
    number = start
    while len(found) < count:
        prompt = Prompt("file:x", "chat", f"text {number}", None, "x", 1)
        other = Prompt("file:x", "chat", "text 1" if split == "train" else "text 3", None, "x", 1)
        if split_prompts([prompt, other, *(Prompt("", "", f"f{n}", None, "", 1) for n in range(40))], FRACTION)[prompt.id] == split:
            found.append(row(f"text {number}"))
        number += 1
    return found


def make_old(folder: Path, rows: list[Row], target: str = "toy") -> Path:
    folder.mkdir(parents=True)
    write_shards(folder, "train", rows, 100)
    write_shards(folder, "heldout", [], 100)
    manifest.write_manifest(folder, "dataset", {"extra": {"target": target}})
    return folder


def config(**dataset: object) -> Config:
    return Config.model_validate({"dataset": {"heldout_fraction": FRACTION, "replay_from": "old/dataset", **dataset}})


def test_the_share_and_what_is_left_out(tmp_path: Path) -> None:
    old, fresh = rows_of("train", 0, 40), rows_of("train", 1000, 30)
    wrong_side = rows_of("heldout", 5000, 10)
    make_old(tmp_path / "old" / "dataset", [*old, *wrong_side, *fresh[:5]])
    own = tmp_path / "new" / "dataset"
    found = replay_rows(config(replay_fraction=0.25), tmp_path, own, "toy", fresh, [old[0]])
    assert len(found.rows) == 10, "a quarter of 40"
    ids = {r.id for r in found.rows}
    assert ids <= {r.id for r in old[1:]}, "no held-out prompt, no prompt that is new, none that the hash holds out"
    assert {r.source for r in found.rows} == {"replay:shipped:chat"}
    assert found.about is not None
    assert (found.about["rows"], found.about["offered"]) == (10, 39)
    again = replay_rows(config(replay_fraction=0.25), tmp_path, own, "toy", fresh, [old[0]])
    assert again == found
    more = replay_rows(config(replay_fraction=0.9), tmp_path, own, "toy", fresh, [])
    assert len(more.rows) == 40, "all there are"
    assert ids <= {r.id for r in more.rows}
    for nothing in (config(replay_fraction=0.0), config(replay_from=None)):
        assert replay_rows(nothing, tmp_path, own, "toy", fresh, []).about is None


def test_rows_that_were_replayed_before_keep_their_source(tmp_path: Path) -> None:
    old = [Row(**{**r.__dict__, "source": "replay:self"}) for r in rows_of("train", 0, 6)]
    make_old(tmp_path / "old" / "dataset", old)
    found = replay_rows(config(), tmp_path, tmp_path / "new", "toy", rows_of("train", 1000, 10), [])
    assert {r.source for r in found.rows} == {"replay:self"}


def test_what_is_refused(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old" / "dataset", rows_of("train", 0, 3))
    with pytest.raises(ConfigError, match="the answers in old/dataset are another target's"):
        replay_rows(config(), tmp_path, tmp_path / "new", "other", [], [])
    with pytest.raises(ConfigError, match="is the folder that this run writes"):
        replay_rows(config(), tmp_path, old, "toy", [], [])
    with pytest.raises(DataError, match="no finished data set in .*gone"):
        replay_rows(config(replay_from="gone"), tmp_path, tmp_path / "new", "toy", [], [])


def test_the_step_mixes_and_its_key_follows_the_old_data_set(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, scale=1.0)
    base = {"backend": "transformers", "shipped_prompts": 0, "self_prompts": 0, "max_new_tokens": 6, "min_new_tokens": 1}
    prompts = {}
    for name in ("old", "new"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f'{{"prompt": "{name} question number {n} of some"}}\n' for n in range(12)))
        prompts[name] = str(path)

    def settings(name: str, **more: object) -> Config:
        dataset = {**base, "heldout_fraction": FRACTION, "prompt_files": [prompts[name]], **more}
        return Config.model_validate(
            {"runtime": {"threads": 1, "device": "cpu"}, "target": {"model": str(target), "dtype": "float32"}, "dataset": dataset}
        )

    run_step("dataset", settings("old"), tmp_path, tmp_path / "old")
    new = settings("new", replay_from="old/dataset", replay_fraction=0.4)
    assert run_step("dataset", new, tmp_path, tmp_path / "new")
    about = manifest.read_json(tmp_path / "new" / "dataset" / "dataset.json")
    stats = manifest.read_json(tmp_path / "new" / "dataset" / "stats.json")
    assert stats["splits"]["train"]["by_source"]["replay"] == about["replay"]["rows"] > 0
    assert "replay" not in stats["splits"]["heldout"]["by_source"]
    assert not run_step("dataset", new, tmp_path, tmp_path / "new")
    before = key_parts(STEPS["dataset"], new, tmp_path, tmp_path / "new")["extra"]["replay_from"]
    run_step("dataset", settings("old", max_new_tokens=5), tmp_path, tmp_path / "old")
    assert key_parts(STEPS["dataset"], new, tmp_path, tmp_path / "new")["extra"]["replay_from"] != before
