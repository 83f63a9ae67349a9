"""Predicted speed, and the advice on depth, width and K that comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eagle import manifest
from eagle.bench import advise as advice
from eagle.bench import plots, table
from eagle.bench.advise import Advice, Option, advise, cost_factor, step_weights
from eagle.bench.advise_report import render
from eagle.bench.evidence import read_evidence
from eagle.bench.predict import add_predictions, speedup, survival_to, tuned_costs
from eagle.bench.session import write_outputs
from eagle.cli import app
from eagle.config import Config
from eagle.decode.cost import CostTable
from eagle.draft.io import read_spec, save_draft
from eagle.errors import StepFailed
from tests.toys import tiny_target
from tests.training.builders import make_draft


def test_survival_goes_on_with_the_last_rate() -> None:
    assert survival_to([0.8, 0.4, 0.1], 2) == [0.8, 0.4]
    assert survival_to([0.8, 0.4], 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert survival_to([0.5], 3) == [0.5, 0.25, 0.125]
    assert survival_to([0.5, 0.0], 4) == [0.5, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="empty"):
        survival_to([], 1)


def test_the_formula_is_leviathans_where_acceptance_is_the_same_everywhere() -> None:
    """(1 - a^(K+1)) / ((1 - a) (K c + 1)) with c = 0.1 and a verification that costs one step."""
    a, c = 0.7, 0.1
    costs = CostTable({(1, width): 1.0 for width in (1, 9)}, {(1, k): c * k for k in (1, 8)})
    for length in range(1, 9):
        wanted = (1 - a ** (length + 1)) / ((1 - a) * (length * c + 1))
        assert speedup(costs, survival_to([a], length), 1, length) == pytest.approx(wanted)
    best = max(range(1, 9), key=lambda k: speedup(costs, survival_to([a], k), 1, k))
    assert best == 4, "methods.md 3.1: a = .7, c = .1 gives K* = 4 and 1.98x"
    assert speedup(costs, survival_to([a], 4), 1, 4) == pytest.approx(1.98, abs=0.005)


def tuned_rows(**chosen: Any) -> dict[str, Any]:
    about = {"threads": 1, "dtype": "float32", "draft_step": "eager"} | chosen
    rows = [
        {"what": what, "batch": batch, "median_ms": ms * batch, **about, **other}
        for batch in (1, 4)
        for what, ms in (("target_step", 20.0), ("verify", 30.0), ("draft_step", 2.0))
        for other in ({}, {"threads": 2, "median_ms": 1e9})
    ]
    return {**about, "draft_tokens": 3, "rows": rows}


def test_costs_of_the_tune_step_are_those_of_its_choice() -> None:
    costs = tuned_costs(tuned_rows(), "float32")
    assert costs is not None
    assert costs.target_seconds(1, 1) == pytest.approx(0.020)
    assert costs.target_seconds(4, 4) == pytest.approx(0.120)
    assert [costs.draft_seconds(1, k) for k in (1, 2, 3)] == pytest.approx([0.002, 0.004, 0.006])
    assert tuned_costs(tuned_rows(), "bfloat16") is None, "timed in another dtype"
    assert tuned_costs({"threads": 1, "dtype": "float32", "draft_step": "eager"}, "float32") is None


def test_rows_get_predictions_within_what_was_measured() -> None:
    rows = [
        {"method": method, "batch": batch, "temperature": 0.0, "draft_tokens": k}
        for batch in (1, 4, 8)
        for method, k in (("none", 0), ("eagle31", 3), ("eagle31", 2), ("ngram", 3))
    ]
    acceptance = [
        {"method": "eagle31", "temperature": 0.0, "draft_tokens": 3, "acceptance_by_position": [0.5, 0.3, 0.2]},
        {"method": "ngram", "temperature": 0.0, "draft_tokens": 3, "acceptance_by_position": [0.9, 0.9, 0.9]},
    ]
    add_predictions(rows, acceptance, tuned_costs(tuned_rows(), "float32"))
    found = {(r["method"], r["batch"], r["draft_tokens"]): r["predicted_speedup"] for r in rows}
    assert found["eagle31", 1, 3] == found["eagle31", 4, 3] == pytest.approx(2.0 * 20 / 36, abs=1e-4)
    assert {key for key, value in found.items() if value is not None} == {("eagle31", 1, 3), ("eagle31", 4, 3)}
    add_predictions(rows, acceptance, None)
    assert all(row["predicted_speedup"] is None for row in rows)


def bench_json(by_position: list[float], *, target: float = 20.0, verify: float = 22.0, step: float = 2.0) -> dict[str, Any]:
    def spread(value: float) -> dict[str, Any]:
        return {"median": value, "min": value, "max": value, "runs": [value]}

    k = len(by_position)
    rows = []
    for batch in (1, 4):
        plain = {"method": "none", "batch": batch, "temperature": 0.0, "draft_tokens": 0, "target_step_ms": spread(target * batch)}
        rows.append({**plain, "speedup": None, "draft_step_ms": None})
        rows.append({
            **plain, "method": "eagle31", "draft_tokens": k, "target_step_ms": spread(verify * batch),
            "draft_step_ms": spread(step * batch), "speedup": spread(1.25),
        })  # fmt: skip
    accepted = {
        "method": "eagle31", "temperature": 0.0, "draft_tokens": k, "acceptance_by_position": by_position, "drafts": 200,
        "acceptance_length": 1 + sum(by_position),
    }  # fmt: skip
    return {"rows": rows, "acceptance": [accepted], "dtype": "float32", "costs": {}}


def make_run(folder: Path, target: Path, bench: dict[str, Any] | None, data: str = "d", **draft: object) -> Path:
    save_draft(folder / "policy" / "draft", make_draft(target, **draft))
    manifest.write_manifest(folder / "policy", "policy", {"inputs": {"dataset": data}})
    if bench is not None:
        (folder / "bench").mkdir()
        manifest.write_json(folder / "bench" / "bench.json", bench)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("toy") / "target", hidden=128)


def option(found: Advice, layers: int, hidden: int) -> Option:
    return next(o for o in found.options if (o.layers, o.hidden_size) == (layers, hidden))


def test_an_expensive_draft_should_be_shallower(target: Path, tmp_path: Path) -> None:
    base = make_run(tmp_path / "r", target, bench_json([0.5, 0.25, 0.12], step=8.0), layers=4)
    found = advise(base, "default")
    assert {(o.layers, o.hidden_size) for o in found.options} == {(d, h) for d in (1, 2, 4) for h in (128, 64)}
    mine, shallow = option(found, 4, 128), option(found, 1, 128)
    assert mine.current
    assert mine.best[1].draft_tokens == 1, "20 ms for one draft token and its verification of 8"
    plain, verify_two = 20.0, 20.0 + 2.0 / 3
    assert mine.best[1].speedup == pytest.approx(1.5 * plain / (verify_two + 8.0))
    gain, factor = 1.0 / 1.06, cost_factor(read_spec(base / "policy" / "draft"), read_spec(base / "policy" / "draft"))
    assert factor == 1.0
    choice = shallow.best[1]
    accepted = sum(gain * share for share in [0.5, 0.25, 0.12][: choice.draft_tokens])
    verify = 20.0 + choice.draft_tokens * 2.0 / 3
    seconds = verify + choice.draft_tokens * 8.0 * shallow.cost_factor
    assert choice.speedup == pytest.approx((1 + accepted) * plain / seconds)
    assert choice.tokens_per_second == pytest.approx(choice.speedup / 0.020)
    assert found.command == (
        f"make run ARGS='--run-id r-1x128 --set draft.layers=1 --set bench.draft_tokens=[{choice.draft_tokens}] "
        f"--set bundle.draft_tokens={choice.draft_tokens}'"
    )
    assert any(f"{100 * shallow.cost_factor:.0f} % of the present one's time" in line for line in found.reasons)
    narrow = option(found, 1, 64)
    assert (narrow.acceptance_from, narrow.backed) == ("assumed, no source", False)
    assert any("an experiment" in line for line in found.reasons), "a narrow network is named, never advised"


def test_the_break_even_is_where_both_are_equally_fast(target: Path, tmp_path: Path) -> None:
    base = make_run(tmp_path / "r", target, bench_json([0.5, 0.25, 0.12], step=8.0), layers=4)
    own = read_evidence(base)
    options = list(advice._options(own, [], 1.0))
    best, current = (next(o for o in options if (o.layers, o.hidden_size) == (n, 128)) for n in (1, 4))
    share = advice._needed_gain(own, best, current)
    scaled = advice._scaled(own.costs, best.cost_factor)
    shares = [share * s for s in own.by_position]
    equal = [advice._best(scaled, shares, b).speedup for b in (1, 4)]
    assert (equal[0] * equal[1]) ** 0.5 == pytest.approx(current.score, rel=1e-6)


def test_a_cheap_draft_is_kept(target: Path, tmp_path: Path) -> None:
    base = make_run(tmp_path / "r", target, bench_json([0.8, 0.6, 0.5], step=0.02), layers=4)
    found = advise(base, "full")
    tokens = option(found, 4, 128).best[1].draft_tokens
    assert tokens == 8, "tokens that cost next to nothing and are accepted"
    assert found.command == f"eagle --profile full --set bundle.draft_tokens=8 step bundle --dir {base}"
    assert any("keep this one" in line for line in found.reasons)
    assert any(line.startswith("batch 4, K=3: predicted ") and "measured 1.25x" in line for line in found.measured)


def test_where_nothing_pays_that_is_said(target: Path, tmp_path: Path) -> None:
    base = make_run(tmp_path / "r", target, bench_json([0.05, 0.0], verify=60.0), layers=4)
    found = advise(base, "default")
    assert all(choice.draft_tokens == 0 for o in found.options for choice in o.best.values())
    assert any("no K pays at any of these batch sizes" in line for line in found.reasons)
    assert found.command == "make run PROFILE=full"


def test_another_run_on_the_same_data_is_measured_not_assumed(target: Path, tmp_path: Path) -> None:
    base = make_run(tmp_path / "r", target, bench_json([0.5, 0.25, 0.12], step=8.0), layers=4)
    make_run(tmp_path / "one", target, bench_json([0.1, 0.01, 0.0]), layers=1)
    make_run(tmp_path / "elsewhere", target, bench_json([0.9, 0.9, 0.9]), data="other", layers=2)
    make_run(tmp_path / "unfinished", target, None, layers=2)
    found = advise(base, "default")
    assert option(found, 1, 128).acceptance_from == "measured (one)"
    assert option(found, 2, 128).acceptance_from == "assumed"
    assert option(found, 1, 128).best[1].draft_tokens == 0, "it accepts too little, whatever was assumed"
    assert "draft.layers=2" in found.command
    assert any("one, trained on the same data" in line for line in found.measured)
    text = render(found)
    assert "measured (one)" in text
    assert text.rstrip().endswith(f"next: {found.command}")


def test_the_controllers_table_comes_before_rows_and_the_tune_step_fills_in(target: Path, tmp_path: Path) -> None:
    bench = bench_json([0.5, 0.25])
    bench["rows"] = [row for row in bench["rows"] if row["batch"] == 4]
    table = CostTable({(1, 1): 0.010, (1, 3): 0.011}, {(1, 0): 0.0, (1, 1): 0.003, (1, 2): 0.004})
    bench["costs"] = {"eagle31, batch 1": json.loads(table.to_json()), "medusa, batch 2": json.loads(table.to_json())}
    base = make_run(tmp_path / "r", target, bench)
    (base / "tune").mkdir()
    tuned = tuned_rows()
    for row in tuned["rows"]:
        row["batch"] = {1: 1, 4: 8}[row["batch"]]
    manifest.write_json(base / "tune" / "tuned.json", tuned)
    found = read_evidence(base)
    assert found.batches == [1, 4, 8]
    assert found.costs.draft_seconds(1, 1) == 0.003
    assert found.costs.target_seconds(4, 1) == pytest.approx(0.080)
    assert found.costs.target_seconds(8, 1) == pytest.approx(0.080)
    said = "\n".join(found.notes)
    assert "batch 1: the controller's cost table in bench" in said
    assert "batch 4: timed rows of bench" in said
    assert "batch 8: the tune step" in said


def test_weights_are_those_of_layers_and_head(target: Path, tmp_path: Path) -> None:
    model = make_draft(target, layers=3)
    layers = sum(p.numel() for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2)
    assert step_weights(model.spec) == layers + model.lm_head.weight.numel()


def test_what_is_missing_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="eagle step policy"):
        advise(tmp_path, "default")
    base = make_run(tmp_path / "r", target, None)
    with pytest.raises(StepFailed, match="no measured acceptance .*run: eagle step bench"):
        advise(base, "default")
    (base / "bench").mkdir()
    (base / "bench" / "bench.json").write_text("{")
    with pytest.raises(StepFailed, match="cannot be read"):
        advise(base, "default")
    manifest.write_json(base / "bench" / "bench.json", {**bench_json([0.5]), "rows": []})
    with pytest.raises(StepFailed, match="no measured speed"):
        advise(base, "default")


def test_the_command_writes_nothing(target: Path, tmp_path: Path) -> None:
    base = make_run(tmp_path / "runs" / "r", target, bench_json([0.5, 0.25, 0.12], step=8.0), layers=4)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(Config().model_dump(mode="json", by_alias=True)))
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["--root", str(tmp_path), "plan", "--advise", "--dir", str(base)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "assumed:" in done.output
    assert "next: make run ARGS=" in done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_the_table_shows_predicted_beside_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw_all", lambda *_: None)
    full = bench_json([0.5])
    for row in full["rows"]:
        speed = {"median": 30.0, "min": 30.0, "max": 30.0, "runs": [30.0]}
        row |= {"tokens_per_second": speed, "ttft_ms": speed, "itl_ms": {"p50": 1.0, "p95": 1.0}, "mean_draft_tokens": None}
        row |= {"acceptance_length": None, "predicted_speedup": 1.37 if row["method"] == "eagle31" else None}
    full |= {
        "turns": 2, "threads": 1, "device": "cpu", "max_new_tokens": 4, "prompts": 1,
        "replay": [], "recommended": [], "memory": None,
        "equality": {"equal_tokens": 1.0, "tokens": 1, "runs": [], "mismatches": []}, "cost_ratio": {"median": None},
    }  # fmt: skip
    write_outputs(tmp_path, full, {})
    assert "predicted" in (tmp_path / "table.txt").read_text()
    assert "1.37x" in table.render(full)
    assert "predicted_speedup" in (tmp_path / "bench.csv").read_text()
