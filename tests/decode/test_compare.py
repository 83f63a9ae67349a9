"""`eagle bench` on a tiny run: every method in one table, the load suite, and what is said when something is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from typer.testing import CliRunner

from eagle import manifest
from eagle.bench.compare import available_methods, compare, find_sources
from eagle.bench.methods import Sources
from eagle.cli import app
from eagle.config import Config, Method
from eagle.decode.medusa import MedusaHeads, save_medusa
from eagle.decode.replay import load_trace
from eagle.draft.io import save_draft
from eagle.errors import BusyError, ConfigError, StepFailed
from tests.decode.test_bench import _process_settings  # noqa: F401 -- the fixture
from tests.toys import tiny_target
from tests.training.builders import make_draft, write_dataset

BENCH = {
    "max_new_tokens": 10,
    "batch_sizes": [1, 3],
    "draft_tokens": [2],
    "rounds": 2,
    "temperatures": [0.0],
    "dtype": "float32",
    "equality_prompts": 2,
    "max_draft_tokens": 4,
    "load_rates": [20.0, 50.0],
    "load_requests": 4,
}


def make_run(folder: Path, rivals: bool) -> tuple[Config, Path]:
    """A project folder with a finished run in it."""
    model = tiny_target(folder / "target")
    base = folder / "runs" / "toy"
    write_dataset(base / "dataset", model, train=1, heldout=6, tokens=8)
    for name, seed in (("distill", 1), ("policy", 2)):
        save_draft(base / name / "draft", make_draft(model, seed=seed))
        manifest.write_manifest(base / name, name, {})
    (base / "tune").mkdir()
    manifest.write_json(base / "tune" / "tuned.json", {"threads": 1, "dtype": "float32", "draft_step": "eager"})
    if rivals:
        save_draft(base / "rivals" / "eagle2" / "draft", make_draft(model, layers=1, fc_norm=False, norm_output=False))
        ids = torch.from_numpy(np.arange(3, 103))
        heads = MedusaHeads(3, torch.ones(64), 1e-5, ids, 4)
        heads.accuracies = [[0.5, 0.2]] * 3
        save_medusa(base / "rivals" / "medusa", heads)
        manifest.write_manifest(base / "rivals", "rivals", {})
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {i}", "kind": "toy"}) + "\n" for i in range(5)))
    values = {"target": {"model": str(model)}, "runtime": {"device": "cpu"}, "bench": BENCH}
    return Config.model_validate(values), base


def with_methods(config: Config, *methods: str) -> Config:
    return Config.model_validate(
        {**config.model_dump(by_alias=True), "bench": {**config.bench.model_dump(), "methods": list(methods)}}
    )


def test_every_method_in_one_table(tmp_path: Path) -> None:
    config, base = make_run(tmp_path, rivals=True)
    methods = available_methods(find_sources(base), base)
    assert methods == list(get_args(Method))
    done = compare(with_methods(config, *methods), tmp_path, base, "prompts.jsonl", None, None)
    assert done.parent == base
    assert done.name.startswith("bench-prompts-")
    bench = json.loads((done / "bench.json").read_text())
    for batch in (1, 3):
        rows = {row["method"]: row for row in bench["rows"] if row["batch"] == batch}
        assert set(rows) == set(methods)
        assert all(row["speedup"]["min"] > 0 for name, row in rows.items() if name != "none")
        assert all(1 <= row["acceptance_length"] <= 1 + row["draft_tokens"] for name, row in rows.items() if name != "none")
        assert len(rows["eagle31-pid"]["chosen"]) > 0
    assert bench["equality"]["equal_tokens"] == 1.0
    assert {(run["method"], run["batch"]) for run in bench["equality"]["runs"]} == {
        (m, b) for m in methods if m != "none" for b in (1, 2)
    }
    assert [entry["batch"] for entry in bench["replay"]] == [1, 3]
    assert all(entry["regret_to_oracle"] >= entry["regret_to_best_fixed"] for entry in bench["replay"])
    assert len(load_trace(done / "trace-b3.jsonl")) == bench["replay"][1]["rounds"]
    assert set(bench["memory_by_method"]) == set(methods) - {"none"}
    text = (done / "table.txt").read_text()
    for label in ("Medusa, depth=3", "EAGLE-2, depth=4", "Lookahead, depth=3", "(distilled), K=2", "Eagle 3.1 + PID, K<=4"):
        assert label in text
    assert (done / "draft_length.png").exists()
    assert json.loads((done / "suite.json").read_text())["prompts"] == 5
    assert {path.name for path in base.iterdir() if path.name.startswith((".", "bench"))} == {done.name, f"{done.name}.lock"}


def test_load(tmp_path: Path) -> None:
    config, base = make_run(tmp_path, rivals=False)
    (tmp_path / "data").symlink_to(Path(__file__).parents[2] / "data")
    done = compare(config, tmp_path, base, "load", 6, None)
    result = json.loads((done / "load.json").read_text())
    assert [(row["arm"], row["rate"]) for row in result["rows"]] == [
        (arm, rate) for rate in (20.0, 50.0) for arm in ("none", "Eagle 3.1 + PID, K<=4")
    ]
    assert all(row["requests"] == 4 and row["tokens_per_second"] > 0 for row in result["rows"])
    assert "good/s" in (done / "load.txt").read_text()


def test_nothing_but_former_results_is_replaced(tmp_path: Path) -> None:
    config, base = make_run(tmp_path, rivals=False)
    config = with_methods(config, "eagle31")
    kept = tmp_path / "mine"
    kept.mkdir()
    (kept / "a.txt").write_text("x")
    link = tmp_path / "link"
    link.symlink_to(kept)
    for out in (kept, tmp_path, base, kept / "a.txt", link):
        with pytest.raises(ConfigError, match="name a new folder"):
            compare(config, tmp_path, base, "prompts.jsonl", 2, out)
    assert (kept / "a.txt").read_text() == "x"
    with FileLock(tmp_path / "new.lock"), pytest.raises(BusyError, match="another bench"):
        compare(config, tmp_path, base, "prompts.jsonl", 2, tmp_path / "new")
    for _ in range(2):
        assert compare(config, tmp_path, base, "prompts.jsonl", 2, tmp_path / "new") == tmp_path / "new"
    for damaged in ("3", '{"threads": 1', '{"threads": "x", "dtype": "float32", "draft_step": "eager"}'):
        (base / "tune" / "tuned.json").write_text(damaged)
        with pytest.raises(StepFailed, match=r"tuned\.json"):
            compare(config, tmp_path, base, "prompts.jsonl", 2, tmp_path / "new")
    short = with_methods(Config.model_validate({**config.model_dump(by_alias=True)}), "eagle31-pid")
    values = {**short.model_dump(by_alias=True), "bench": {**short.bench.model_dump(), "max_new_tokens": 1, "max_draft_tokens": 16}}
    (base / "tune" / "tuned.json").write_text('{"threads": 1, "dtype": "float32", "draft_step": "eager"}')
    with pytest.raises(ConfigError, match=r"bench\.max_new_tokens"):
        compare(Config.model_validate(values), tmp_path, base, "prompts.jsonl", 1, tmp_path / "new2")
    assert not (tmp_path / "new2").exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    config, base = make_run(tmp_path, rivals=False)
    assert set(get_args(Method)) - set(available_methods(find_sources(base), base)) == {"medusa", "eagle2"}
    with pytest.raises(StepFailed, match="eagle step rivals"):
        compare(with_methods(config, "medusa"), tmp_path, base, "prompts.jsonl", None, None)
    with pytest.raises(StepFailed, match="step policy"):
        find_sources(tmp_path)
    with pytest.raises(ConfigError, match="closest: 'heldout'"):
        compare(with_methods(config, "eagle31"), tmp_path, base, "heldut", None, None)
    assert not Sources(None, base / "policy").available("eagle31-distilled")
    assert [path.name for path in sorted(base.iterdir()) if path.suffix != ".lock"] == ["dataset", "distill", "policy", "tune"]


def test_the_command(tmp_path: Path) -> None:
    config, base = make_run(tmp_path, rivals=False)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", by_alias=True)))
    options = ["--suite", "prompts.jsonl", "--methods", "none,eagle31-pid", "--batch", "2", "--rounds", "2", "--prompts", "3"]
    done = CliRunner().invoke(app, ["--root", str(tmp_path), "bench", "--dir", str(base), *options])
    assert done.exit_code == 0, done.output
    bench = json.loads((next(base.glob("bench-prompts-*/bench.json"))).read_text())
    assert [(row["method"], row["batch"]) for row in bench["rows"]] == [("none", 2), ("eagle31-pid", 2)]
    with pytest.raises(ConfigError, match=r"bench\.methods.*medua"):
        CliRunner().invoke(app, ["--root", str(tmp_path), "bench", "--methods", "medua"], catch_exceptions=False)
