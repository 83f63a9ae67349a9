"""`eagle bench` on a tiny run: every method in one table, the load suite, and what is said when something is missing."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from typer.testing import CliRunner

from eagle import manifest, progress
from eagle.bench.compare import available_methods, check_sources, compare, find_sources
from eagle.bench.methods import Sources
from eagle.bench.outputs import ABOUT, replacing, result_folder
from eagle.cli import app
from eagle.config import Config, Method
from eagle.decode.medusa import MedusaHeads, save_medusa
from eagle.decode.replay import load_trace
from eagle.draft.io import save_draft
from eagle.errors import BusyError, ConfigError, PreflightError, StepFailed
from eagle.target.resolve import target_fingerprint
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
    values = {**short.model_dump(by_alias=True), "bench": {**short.bench.model_dump(), "max_new_tokens": 2, "max_draft_tokens": 16}}
    (base / "tune" / "tuned.json").write_text('{"threads": 1, "dtype": "float32", "draft_step": "eager"}')
    with pytest.raises(ConfigError, match=r"bench\.max_new_tokens"):
        compare(Config.model_validate(values), tmp_path, base, "prompts.jsonl", 1, tmp_path / "new2")
    assert not (tmp_path / "new2").exists()
    values["bench"]["max_new_tokens"] = 3
    assert compare(Config.model_validate(values), tmp_path, base, "prompts.jsonl", 1, tmp_path / "new2").is_dir()


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
    for bad, wanted in {
        ("--methods", "medua"): r"--methods: there is no method 'medua' \(closest: 'medusa'\)",
        ("--methods", ","): "--methods: it names none",
        ("--batch", "1,x"): "--batch: '1,x'",
        ("--batch", "0"): "--batch: '0'",
        ("--batch", ""): "--batch: ''",
        ("--set", "bench.methods=[medua]"): r"bench\.methods.*closest: 'medusa'",
        ("--suite", "lod"): "closest: 'load'.*robustness",
        ("--suite", "x" * 300): "no suite and no file",
        ("--suite", "load"): "--methods: the suite 'load' compares none and eagle31-pid only",
    }.items():
        with pytest.raises(ConfigError, match=wanted):
            CliRunner().invoke(
                app, ["--root", str(tmp_path), "bench", "--dir", str(base), "--methods", "none", *bad], catch_exceptions=False
            )
    assert not list(base.glob("bench-x*")), "what cannot be measured leaves nothing, not even a lock"
    assert not list(base.glob("bench-lod*"))


def test_every_part_is_named_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 1e9)  # only what begins
    config, base = make_run(tmp_path, rivals=False)
    compare(with_methods(config, "none", "eagle31", "eagle31-pid"), tmp_path, base, "prompts.jsonl", 3, tmp_path / "out")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bench: ")]
    assert f"bench: suite 'prompts.jsonl' -> {tmp_path / 'out'}" in told
    phases = "phases: speed, acceptance, replay, equality"
    assert f"bench: 3 prompts; methods none, eagle31, eagle31-pid; batches 1, 3; {phases}" in told
    named = [line.rsplit("  ", 1) for line in told if "  " in line]
    parts = [(before.split("  ")[0], part) for before, part in named]
    arms = ("none", "Eagle 3.1, K=2", "Eagle 3.1 + PID, K<=4")
    for at, batch in enumerate((1, 3)):
        place = f"batch {batch}, T=0"
        assert parts.index((f"bench: speed: {6 * at}/12 runs", f"{place}: {arms[2]}, warm-up and costs")) >= 0
        first = [(f"bench: speed: {6 * at + n}/12 runs", f"{place}: {arm}, turn 1 of 2") for n, arm in enumerate(arms)]
        second = [(f"bench: speed: {6 * at + 3 + n}/12 runs", f"{place}: {arms[(n + 1) % 3]}, turn 2 of 2") for n in range(3)]
        begins = parts.index(first[0])
        assert parts[begins : begins + 6] == first + second
    assert any("ETA 0:" in before for before, _ in named)
    assert any(line.startswith("bench: acceptance: 0/3 answers  ETA -  batch 3, T=0: Eagle 3.1, K=2") for line in told)
    assert any(line.startswith("bench: acceptance: 3/3 answers") and "done in" in line for line in told)
    assert sum("recording acceptance with K=4" in line for line in told) == 2
    assert ("bench: equality: 0/10 answers", "the target's own text") in parts
    assert ("bench: equality: 8/10 answers", "batch 2: Eagle 3.1 + PID, K<=4") in parts


def test_altered_drafts_and_other_targets_are_refused(tmp_path: Path) -> None:
    config, base = make_run(tmp_path, rivals=True)
    config = with_methods(config, "eagle31")
    values = config.model_dump(by_alias=True)
    write = partial(manifest.write_manifest, base / "policy", "policy")
    write({"extra": {"target": target_fingerprint(config.target, tmp_path, tmp_path)}})
    tiny_target(tmp_path / "other", seed=5)
    other = Config.model_validate({**values, "target": {"model": str(tmp_path / "other")}})
    with pytest.raises(ConfigError, match=r"target\.model: '.*other' is not the target that .*policy was made for"):
        compare(other, tmp_path, base, "prompts.jsonl", 2, None)
    for folder, method in (("rivals", "medusa"), ("distill", "eagle31-distilled"), ("policy", "eagle31")):
        weights = sorted((base / folder).rglob("*.safetensors"))[-1]
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(StepFailed, match=f"{weights.name}: it is not what the step '{folder}' wrote; run: eagle step {folder}"):
            compare(with_methods(config, method), tmp_path, base, "prompts.jsonl", 2, None)
        if folder != "policy":  # what is not measured does not matter
            check_sources(find_sources(base), ["eagle31"], config, tmp_path)
            weights.write_bytes(whole)
    assert not list(base.glob("bench-*"))


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PreflightError, match=r"out: the results cannot be written: .*file\); make room"):
        replacing(tmp_path / "file" / "out").__enter__()
    with pytest.raises(ConfigError, match="File name too long"):
        result_folder(tmp_path / ("x" * 300))
    kept = tmp_path / "out"
    kept.mkdir()
    (kept / ABOUT).write_text("{}")

    def fails(code: int) -> None:
        with replacing(kept) as fresh:
            (fresh / "half").write_text("x")
            raise OSError(code, os.strerror(code))

    with pytest.raises(StepFailed, match="No space left on device; make room"):
        fails(errno.ENOSPC)
    assert [path.name for path in kept.iterdir()] == [ABOUT]
    with pytest.raises(ConnectionError):
        fails(errno.ECONNRESET)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "out", "out.lock"}


def test_a_batch_that_no_memory_holds(tmp_path: Path) -> None:
    config, base = make_run(tmp_path, rivals=False)
    values = config.model_dump(by_alias=True)
    huge = Config.model_validate({**values, "bench": {**values["bench"], "methods": ["eagle31"], "batch_sizes": [10**9]}})
    with pytest.raises(PreflightError, match=r"bench\.batch_sizes: no memory for 1000000000 requests"):
        compare(huge, tmp_path, base, "prompts.jsonl", 2, None)
    assert not [path for path in base.iterdir() if path.name.startswith((".", "bench")) and path.is_dir()]


def test_prompts_leave_room_for_answers_in_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, base = make_run(tmp_path, rivals=False)
    about = tmp_path / "target" / "config.json"
    numbers = json.loads(about.read_text())
    with (tmp_path / "prompts.jsonl").open("a") as stream:
        stream.write(json.dumps({"prompt": "long " * 16}) + "\n")
    about.write_text(json.dumps({**numbers, "max_position_embeddings": 100}))
    done = compare(with_methods(config, "eagle31"), tmp_path, base, "prompts.jsonl", None, None)
    assert json.loads((done / "suite.json").read_text())["dropped"] == {"prompt too long": 1}
    assert "prompts.jsonl, row 6, left out: prompt too long" in capsys.readouterr().err
    about.write_text(json.dumps({**numbers, "max_position_embeddings": 10}))
    with pytest.raises(ConfigError, match=r"bench\.max_new_tokens: 10 tokens leave no room"):
        compare(with_methods(config, "eagle31"), tmp_path, base, "prompts.jsonl", None, None)
