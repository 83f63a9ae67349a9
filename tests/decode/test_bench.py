"""The bench step on a tiny target, and the arithmetic of its figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle import manifest
from eagle.bench import measure, table
from eagle.bench.step import run
from eagle.bench.workload import Arm, Workload, load_workload, speed_arms, window_size
from eagle.config import Config
from eagle.decode.stats import DecodeStats
from eagle.draft.io import save_draft
from eagle.errors import DataError, StepFailed
from eagle.steps import StepContext
from tests.decode.models import prompts, target
from tests.toys import tiny_target
from tests.training.builders import make_draft, write_dataset

BENCH = {
    "prompts": 5,
    "max_new_tokens": 9,
    "batch_sizes": [2, 1],
    "draft_tokens": [1, 3],
    "rounds": 2,
    "dtype": "float32",
    "equality_prompts": 3,
}


def make_context(folder: Path, tuned: dict, **bench: object) -> StepContext:
    model = tiny_target(folder / "target")
    write_dataset(folder / "dataset", model, train=1, heldout=6, tokens=8)
    save_draft(folder / "policy" / "draft", make_draft(model))
    for name in ("tune", "out", "work"):
        (folder / name).mkdir()
    manifest.write_json(folder / "tune" / "tuned.json", tuned)
    config = Config.model_validate({"target": {"model": str(model)}, "runtime": {"device": "cpu"}, "bench": {**BENCH, **bench}})
    inputs = {name: folder / name for name in ("dataset", "policy", "tune")}
    return StepContext(config, folder, inputs, folder / "out", folder / "work")


@pytest.fixture(autouse=True)
def _process_settings() -> Iterator[None]:
    """The step sets thread count, denormals and determinism of the process: other tests must not see that."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)


def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = make_context(tmp_path, {"threads": 1, "dtype": "bfloat16", "draft_step": "eager"})
    metrics = run(context)
    manifest.canonical(metrics)
    names = {path.name for path in context.out.iterdir()}
    assert names == {"bench.json", "bench.csv", "table.txt", "acceptance_by_position.png", "speed_by_batch.png"}
    bench = json.loads((context.out / "bench.json").read_text())
    found = [(row["batch"], row["temperature"], row["draft_tokens"]) for row in bench["rows"]]
    assert found == [(1, 0, 0), (1, 0, 1), (1, 0, 3), (2, 0, 0), (2, 0, 1), (2, 0, 3), (1, 1, 0), (1, 1, 3)]
    for row in bench["rows"]:
        assert row["tokens_per_second"]["min"] > 0
        assert len(row["tokens_per_second"]["runs"]) == 2
        assert (row["speedup"] is None) == (row["draft_tokens"] == 0)
    same_budget = {row["tokens"] for row in bench["rows"] if row["batch"] == 1 and row["temperature"] == 0}
    assert same_budget == {2 * 3 * 9}
    assert bench["equality"]["equal_tokens"] == metrics["equal_tokens"] == 1.0
    assert [(r["method"], r["batch"]) for r in bench["equality"]["runs"]] == [("eagle31", 1), ("eagle31", 3)]
    assert bench["equality"]["mismatches"] == []
    assert [(a["temperature"], a["draft_tokens"]) for a in bench["acceptance"]] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert metrics["acceptance_length"] == bench["acceptance"][1]["acceptance_length"] >= 1
    assert bench["dtype"] == "float32", "a dtype that was asked for is obeyed"
    memory = bench["memory"]
    assert memory["draft_kv_bytes"] == 2 * 2 * 2 * memory["max_length"] * 2 * 32 * 4
    assert bench["memory_by_method"] == {"eagle31": memory["overhead"]}
    assert memory["overhead"] == metrics["memory_overhead"] > 0
    assert {r["batch"] for r in bench["recommended"]} == {1, 2}
    assert {"speedup_b1", "speedup_b2", "cost_ratio", "ttft_ratio_b1", "acceptance_length_t1"} <= metrics.keys()
    text = (context.out / "table.txt").read_text()
    assert "greedy equality, float32, batch 1 and batch 3: 100.00 %" in text
    assert text.startswith("median [min..max] of 2 interleaved turns; float32")
    assert text in capsys.readouterr().err
    assert len(list(csv.DictReader((context.out / "bench.csv").open()))) == 8
    assert all((context.out / name).read_bytes().startswith(b"\x89PNG") for name in names if name.endswith(".png"))


def test_one_token_and_tuned_without_a_key(tmp_path: Path) -> None:
    context = make_context(
        tmp_path, {"threads": 1, "dtype": "float32", "draft_step": "eager"}, max_new_tokens=1, temperatures=[0.0], batch_sizes=[8]
    )
    metrics = run(context)
    assert "cost_ratio" not in metrics, "nothing was decoded after the prefill"
    assert metrics["acceptance_length"] == 1.0
    manifest.write_json(tmp_path / "tune" / "tuned.json", {"threads": 1})
    with pytest.raises(StepFailed, match="'dtype'"):
        run(context)


def test_workload(tmp_path: Path) -> None:
    model = tiny_target(tmp_path / "target")
    write_dataset(tmp_path / "some", model, train=1, heldout=6, tokens=3)
    write_dataset(tmp_path / "none", model, train=1, heldout=0, tokens=3)
    assert len(load_workload(tmp_path / "some", 4).prompts) == 4
    assert len(set(load_workload(tmp_path / "some", 99).ids)) == 6
    with pytest.raises(DataError, match="no held-out rows"):
        load_workload(tmp_path / "none", 4)
    work = Workload([[i] for i in range(5)], list("abcde"), ["x"] * 5)
    assert [work.window(turn, 2) for turn in range(3)] == [[[0], [1]], [[2], [3]], [[4], [0]]]
    assert len(work.window(0, 8)) == 8
    assert [window_size(16, b, 3) for b in (1, 8, 32)] == [6, 8, 32]


def test_arms_and_recommendation() -> None:
    groups = speed_arms([1, 8], [0.0, 1.0], ["eagle31", "eagle31-pid"], lambda m: [2, 3] if m == "eagle31" else [8])
    assert [[(a.batch, a.temperature, a.draft_tokens) for a in g] for g in groups] == [
        [(1, 0, 0), (1, 0, 2), (1, 0, 3), (1, 0, 8)],
        [(8, 0, 0), (8, 0, 2), (8, 0, 3), (8, 0, 8)],
        [(1, 1, 0), (1, 1, 3), (1, 1, 8)],
    ]  # fmt: skip
    assert [arm.name for arm in groups[0]] == ["none", "Eagle 3.1, K=2", "Eagle 3.1, K=3", "Eagle 3.1 + PID, K<=8"]
    rows = [
        {
            "method": "eagle31" if k else "none",
            "batch": b,
            "temperature": 0.0,
            "draft_tokens": k,
            "speedup": k and measure.spread(ratios),
        }
        for b, k, ratios in (
            (1, 0, ()), (1, 2, (1.2, 1.3, 1.1)), (1, 3, (1.4, 0.9, 1.3)),
            (8, 0, ()), (8, 2, (0.9, 0.8, 0.99)), (8, 3, (0.5, 0.5, 0.5)),
        )
    ]  # fmt: skip
    assert measure.recommend(rows, 0.0) == [
        {"batch": 1, "draft_tokens": 3, "speedup": 1.3, "sure": False},
        {"batch": 8, "draft_tokens": 0, "speedup": 1.0, "sure": True},
    ]


def test_rows_are_ratios_within_a_turn() -> None:
    base = measure.Timed(Arm(1, 0.0, 0, "none"), [DecodeStats(tokens=10, seconds=s, ttft_seconds=0.1) for s in (1.0, 4.0)])
    counters = {"rounds": 4, "accepted": 2, "token_seconds": [0.1, 0.3], "ttft_seconds": 0.2, "tokens": 10}
    mine = measure.Timed(Arm(1, 0.0, 3), [DecodeStats(**counters, seconds=s) for s in (0.5, 4.0)])
    row = mine.row(base)
    assert row["speedup"] == {"median": 1.5, "min": 1.0, "max": 2.0, "runs": [2.0, 1.0]}
    assert row["ttft_ratio"]["median"] == 2.0
    assert row["acceptance_length"] == 1.5
    assert row["itl_ms"] == {"mean": 200.0, "p50": 300.0, "p95": 300.0}
    assert base.row(base)["speedup"] is None
    assert measure.quantile([], 0.5) == 0.0


def test_a_difference_is_reported_with_its_gap() -> None:
    model = target()
    questions = prompts([4, 6])
    answers = [[5, 6, 7, 8], [9, 9]]

    def generate(given: list, *, draft_tokens: int, **_: object) -> SimpleNamespace:
        changed = [[5, 6, 7, 1], [9, 9]] if draft_tokens else answers
        return SimpleNamespace(tokens=changed, stats=DecodeStats())

    engine = SimpleNamespace(generate=generate, batch=2, target=model)
    players = SimpleNamespace(engine=lambda _: engine, policy=lambda arm: arm.draft_tokens)
    arms = [Arm(1, 0.0, 3), Arm(2, 0.0, 3)]
    found = measure.equality(players, arms, questions, max_new_tokens=4, stop=frozenset())  # type: ignore[arg-type]
    assert found["equal_tokens"] == 5 / 6
    assert [(m["batch"], m["prompt"], m["position"], m["wanted"], m["got"]) for m in found["mismatches"]] == [
        (1, 0, 3, [8], [1]), (2, 0, 3, [8], [1]),
    ]  # fmt: skip
    gap = measure.logit_gap(model, questions[0] + [5, 6, 7])
    assert found["mismatches"][0]["logit_gap"] == gap > 0
    assert measure.common_prefix([1, 2], [1, 2, 3]) == 2
    assert "runs" not in table.to_csv({"rows": [{"batch": 1, "speedup": measure.spread([1.0])}]})
