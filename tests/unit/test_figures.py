"""The figures: complete rows, verdict computed from the value; issue 3's measurements end to end on a tiny run."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    decoding,
    decoding_equality,
    decoding_run,
    decoding_speed,
    figures,
    kernels,
    operations,
    quality,
    robustness,
    serving,
    soak,
    spine,
)
from benchmarks.decoding_enumeration import _deterministic, _masses
from benchmarks.decoding_equality import _compared, options
from benchmarks.decoding_run import Effort, Run, find_run
from benchmarks.decoding_samples import ENOUGH, cell, cells
from benchmarks.decoding_speed import _transformers, in_turns
from benchmarks.figures import Figure, Measured
from eagle import manifest
from eagle.config import Config
from eagle.decode.engine import DecodeResult
from eagle.decode.sampling import SamplingParams
from eagle.decode.stats import DecodeStats
from eagle.target.load import load_target
from tests.decode import exact
from tests.decode.test_bench import _process_settings  # noqa: F401 -- the fixture
from tests.decode.test_compare import make_run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KEYS = {"id", "what", "value", "unit", "bound", "holds", "runs", "command", "machine", "versions", "commit", "date"}
PARTS = (spine, quality, decoding, kernels, operations, robustness, serving, soak)
ALL = tuple(figure for part in PARTS for figure in part.FIGURES)
TINY = Effort(
    pairs=2, turn_prompts=1, new_tokens=8, batch_tokens=5, batches=(1, 3), equality_prompts=8, equality_tokens=6, option_prompts=4,
    single_prompts=2, samples=200, sample_tokens=3, traces=(("heldout", 1, 2), ("heldout", 3, 6)), kind_prompts=2, trace_tokens=12,
)  # fmt: skip


@pytest.mark.parametrize("figure", ALL, ids=lambda f: f.id)
def test_a_committed_figure_is_complete_and_its_verdict_follows_from_its_value(figure: Figure) -> None:
    path = RESULTS / f"{figure.id}.json"
    if not path.is_file():
        pytest.skip(f"not measured yet: make figures ID={figure.id}")
    row = json.loads(path.read_text(encoding="utf-8"))
    assert set(row) >= KEYS
    assert row["holds"] == (figure.holds(row["value"]) and not row.get("broken", False) if row["value"] is not None else None)
    assert row["value"] is not None or row["why"]
    assert row["holds"] is not False or row.get("why"), "a figure that falls short says what was tried"


def test_holds_compares() -> None:
    figure = Figure("F0", "x", "s", "<=", 2.0, lambda: Measured(1.0))
    assert [figure.holds(v) for v in (1.0, 2.0, 2.1, None)] == [True, True, False, None]


def test_a_figure_can_be_named_by_its_number_without_its_part() -> None:
    known = {figure.id: figure for figure in ALL}
    assert len(known) == len(ALL)
    assert {f"F3.{n}" for n in range(1, 13)} == {name.rstrip("ab") for name in known if name.startswith("F3")}
    assert set(decoding.ON_RUN) | {"F3.2"} == {figure.id for figure in decoding.FIGURES}
    assert figures._named("F3.4", known) == ["F3.4a", "F3.4b"]
    assert figures._named("F3.4b", known) == ["F3.4b"]
    assert figures._named("F3.1", known) == ["F3.1"]
    with pytest.raises(SystemExit, match="no figure 'F3.13'"):
        figures._named("F3.13", known)


def test_a_result_names_its_draft_s_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    row = figures.measure(Figure("F0", "x", "s", "<=", 2.0, lambda: Measured(3.0, why="noted", profile="default"), "tried this"))
    assert (row["profile"], row["why"], row["holds"]) == ("default", "noted; tried this", False)
    assert row["command"] == "make figures ID=F0 PROFILE=default"
    assert json.loads((tmp_path / "F0.json").read_text()) == row
    assert "profile" not in figures.measure(Figure("F0", "x", "s", "<=", 2.0, lambda: Measured(1.0), "tried this"))


@pytest.mark.parametrize(("said", "profile"), [((), "full"), (("PROFILE=default",), "default"), (("PROFILE=smoke",), "smoke")])
def test_make_hands_the_profile_on(said: tuple[str, ...], profile: str) -> None:
    root = Path(__file__).parents[2]
    command, bare = ["make", "-n", "figures", *said], {"PATH": "/usr/local/bin:/usr/bin:/bin"}  # no PROFILE of this process
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, env=bare)
    assert f'FIGURES_PROFILE="{profile}"' in shown.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with all drafts, and a file in MT-bench's form."""
    folder = tmp_path_factory.mktemp("run")
    config, base = make_run(folder, rivals=True)
    values = {**config.model_dump(by_alias=True), "dataset": {**config.dataset.model_dump(), "max_prompt_tokens": 400}}
    questions = folder / "question.jsonl"
    questions.write_text("".join(json.dumps({"question_id": i, "turns": [f"what is {i}?", "and now?"]}) + "\n" for i in range(3)))
    return Run(figures.ROOT, base, "toy", Config.model_validate(values), TINY, questions)


@pytest.mark.parametrize("name", [name for name in decoding.ON_RUN if name != "F3.1"])  # that one: below
def test_a_figure_is_measured_end_to_end(name: str, run: Run) -> None:
    measured = decoding.ON_RUN[name](run)
    assert measured.value is not None
    assert math.isfinite(measured.value)
    assert measured.profile == "toy"
    assert "the draft is that of the profile 'toy', not 'full'" in (measured.why or "")
    setting, *rows = measured.runs
    assert {"dtype", "threads", "draft_step", "busy_percent"} <= set(setting)
    assert rows
    assert str(run.base.parent.parent) not in json.dumps(measured.runs)


def test_equality_covers_all_methods_and_options_and_is_complete(run: Run) -> None:
    measured = decoding_equality.greedy_equality(run)
    assert (measured.value, measured.profile) == (100.0, "toy")
    json.dumps(measured.runs)
    arms = measured.runs[1:-1]
    assert {(row["method"], row["batch"]) for row in arms} == set(product(run.methods, (1, 3)))
    assert [row["prompts"] for row in arms if row["method"] == "eagle31" and not row["variant"]] == [8, 8]
    lengths = {row["variant"]: row["lengths"] for row in arms if row["method"] == "eagle31"}
    assert len(lengths["K in turns 0..8"]) > 2
    assert all(any(int(k) > 0 for k in row["lengths"]) for row in arms if row["method"] != "none"), "every arm speculates"
    assert len({option.variant for option in options(run)}) == 7


def test_a_wrong_token_is_a_difference_unless_rounding_decides(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    target, work = load_target(run.target, "float32"), run.suite("heldout", 2)
    right = [[5, 6, 7], [8, 9]]
    result = DecodeResult([[5, 6, 7], [8, 4]], ["length", "stop"], [[], []], DecodeStats())
    row, differences = _compared(target, work, right, result)
    assert (row["tokens"], row["equal_tokens"], row["differences"]) == (5, 4, 1)
    assert (differences[0]["position"], differences[0]["wanted"], differences[0]["got"]) == (1, [9], [4])
    assert differences[0]["counts_as_equal"] is False
    monkeypatch.setattr(decoding_equality, "GAP", 1e9)
    row, differences = _compared(target, work, right, result)
    assert row["equal_tokens"] == row["tokens"] == 5
    assert differences[0]["counts_as_equal"] is True


def test_mt_bench_that_is_not_at_hand_is_said(run: Run) -> None:
    measured = decoding_speed.pid_gain_mt_bench(replace(run, mt_bench=Path("/nowhere/question.jsonl")))
    assert measured.value is None
    assert "question.jsonl is not at hand" in (measured.why or "")


@pytest.mark.parametrize("params", [SamplingParams(0.8, top_k=3), SamplingParams(0.0)], ids=["coupled", "greedy"])
def test_deterministic_drafts_are_enumerated(params: SamplingParams) -> None:
    p = exact.tables(3, 4, 4, params)
    found = _deterministic(exact, p, 0, greedy=params.temperature == 0)
    assert len(found) == 4
    assert all(exact.distance(exact.continued(masses, used), exact.target_joint(used)) <= 1e-12 for _, masses, used in found)


def test_the_enumeration_sees_a_wrong_verifier() -> None:
    p = exact.tables(3, 4, 2, SamplingParams(1.0))

    def emit(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The right first token, then always the same one, as if the draft were never verified."""
        cuts = p[0][0].cumsum(0)
        first = torch.bucketize(u[:, 0].contiguous(), cuts, right=True).clamp(max=3)
        return torch.stack([first, torch.full_like(first, 2)], 1), torch.full_like(first, 2)

    masses = _masses(exact, emit, 2, 4)
    assert float(masses[1].sum()) == pytest.approx(1.0)
    assert exact.distance(masses[1].view(4, 4).sum(1), p[0][0]) <= 1e-12
    assert exact.distance(exact.continued(masses, p), exact.target_joint(p)) > 0.2


def test_cells_hold_what_the_target_gives_them(run: Run) -> None:
    """Expected counts against the sum over every pair of tokens."""
    target, prompt, samples = load_target(run.target, "float32"), [1, 40, 50], 4000
    numbers, expected = cells(target, prompt, 2, samples)
    assert sum(expected.values()) == pytest.approx(samples)
    assert len(expected) > 20
    assert min(expected.values()) >= ENOUGH
    with torch.inference_mode():
        first = target(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        second = target(torch.tensor([[*prompt, token] for token in range(len(first))])).logits[:, -1].double().softmax(-1)
    joint = (samples * first[:, None] * second).tolist()
    found = dict.fromkeys(expected, 0.0)
    for one, row in enumerate(joint):
        for other, count in enumerate(row):
            found[cell([one, other], numbers)] += count
    assert found == pytest.approx(expected, rel=1e-4)


def test_players_take_turns() -> None:
    seen = list[str]()

    def player(name: str) -> Any:
        return lambda turn: seen.append(f"{name}{turn}") or float(turn)

    found = in_turns({"a": player("a"), "b": player("b")}, 3)
    assert seen == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert found == {"a": [0.0, 1.0, 2.0], "b": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize("rival", [{}, {"prompt_lookup_num_tokens": 3}])
def test_timed_transformers_runs_past_stop_tokens(run: Run, rival: dict[str, int]) -> None:
    target = load_target(run.target, "float32")
    prompt = torch.tensor([[1, 40, 50]])
    stop = int(target(prompt).logits[0, -1].argmax())
    target.generation_config.eos_token_id = target.config.eos_token_id = stop
    assert _transformers(target, prompt.tolist(), 6, **rival) > 0
    assert target.generation_config.eos_token_id == stop


def test_a_given_run_is_measured_under_its_own_settings(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "night-1"
    shutil.copytree(run.base, base)
    monkeypatch.setenv("FIGURES_RUN", str(base))
    with pytest.raises(SystemExit, match="no finished step dataset, tune there"):
        find_run()
    for step in ("dataset", "tune"):
        manifest.write_manifest(base / step, step, {})
    said = ["--set", f"target.model={run.target}", "--set", "paths.cache=/elsewhere"]
    argv = ["eagle", "--profile", "smoke", *said, "step", "policy"]
    manifest.write_json(base / "policy.provenance.json", {"argv": argv})
    found = find_run()
    assert (found.profile, found.base, found.target) == ("smoke", base, run.target)
    assert found.config.paths.cache == ".cache"
    assert found.draft_layers == 2


def test_a_run_that_is_not_there_is_made_by_the_public_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("params.yaml", "profiles"):
        (tmp_path / name).symlink_to(figures.ROOT / name)
    monkeypatch.setattr(decoding_run, "ROOT", tmp_path)
    monkeypatch.delenv("FIGURES_RUN", raising=False)
    monkeypatch.delenv("FIGURES_PROFILE", raising=False)
    asked = list[list[str]]()

    def make(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=len(asked) - 1)

    monkeypatch.setattr(decoding_run.subprocess, "run", make)
    found = find_run()
    assert (found.profile, found.base) == ("full", tmp_path / "build" / "figures-full" / "runs" / "full")
    assert asked[0][:3] == ["make", "run", "PROFILE=full"]
    assert "--set paths.runs=build/figures-full/runs" in asked[0][3]
    with pytest.raises(SystemExit, match="make run ended with 1"):
        find_run()
    (found.base / "register").mkdir(parents=True)
    (found.base / "register" / manifest.MANIFEST).touch()
    assert find_run().base == found.base
    assert len(asked) == 2
