"""`eagle ablate`: arms, statistics, the evaluation against enumeration, and the command with a kill in between."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from scipy import stats
from typer.testing import CliRunner

from eagle import manifest
from eagle.ablate import arms, evaluate, report
from eagle.ablate.evaluate import expected_accepted, sampled_rows
from eagle.ablate.run import Ablation, ablate
from eagle.ablate.statistics import estimate, paired
from eagle.cli import app
from eagle.config import Config
from eagle.errors import BusyError, ConfigError, StepFailed
from eagle.target.load import load_target
from eagle.target.vllm import Counters, VllmJob, VllmResult
from eagle.train import rollout
from eagle.train.batches import collate
from eagle.train.rollout import DraftPass, Stretch, TreeVerifier
from tests.training.builders import Toy, make_draft, make_toy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"), train=8, heldout=3, tokens=10)


@pytest.fixture(scope="module")
def base(toy: Toy) -> Path:
    """A run folder whose dataset step is done."""
    manifest.write_manifest(toy.dataset, "dataset", {})
    return toy.dataset.parent


def settings(toy: Toy, **about: Any) -> Config:
    return Config.model_validate({
        "paths": {"cache": str(toy.cache)}, "runtime": {"threads": 1, "device": "cpu"},
        "target": {"model": str(toy.target), "dtype": "float32"},
        "draft": {"layers": 1, "heads": 4, "kv_heads": 2, "vocab_size": 128, "intermediate_size": 96},
        "distill": {
            "stages": [{"depth": 1, "steps": 4}, {"depth": 2, "steps": 2}], "tokens_per_step": 100, "top_k": 8, "autocast": False,
            "eval_every": 50, "warmup_steps": 1, "eval_sequences": 3, "checkpoint_every": 1,
        },
        "policy": {"sequences_per_step": 2, "anchors_per_sequence": 4, "warmup_steps": 1, "checkpoint_every": 1, "group_size": 2},
        "ablate": {"seeds": [0, 1], "minutes": 0.01, "draft_tokens": 2, "sequences": 3} | about,
    })  # fmt: skip


def test_intervals_are_students_and_differences_are_paired() -> None:
    found = estimate([1.0, 2.0, 4.0])
    low, high = stats.ttest_1samp([1.0, 2.0, 4.0], 0.0).confidence_interval(0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((7 / 3, low, high))
    assert estimate([3.0]).low is None
    with pytest.raises(ValueError, match="needs a value"):
        estimate([])
    against = paired({0: 1.0, 1: 2.0, 5: 9.0}, {1: 1.5, 0: 0.4, 7: 0.0})
    assert against is not None
    assert against.n == 2
    assert against.mean == pytest.approx(0.55)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_arms_differ_from_the_reference_in_one_thing() -> None:
    config = Config()
    reference = arms.arm_config(arms.ARMS[arms.REFERENCE], config, 7)
    assert reference.runtime.seed == 7
    assert reference.distill.max_minutes == config.ablate.minutes
    lk = arms.arm_config(arms.ARMS["lk"], config, 7)
    assert lk == reference.model_copy(update={"distill": reference.distill.model_copy(update={"objective": "lk_hybrid"})})
    for name in ("exact", "group", "naive"):
        made = arms.arm_config(arms.ARMS[name], config, 7)
        assert made.policy.method == name
        assert made.policy.max_minutes == config.ablate.minutes
        assert made.policy.learning_rate == reference.distill.learning_rate
    old = arms.arm_config(arms.ARMS["eagle30"], config, 7)
    assert (old.draft.fc_norm, old.draft.norm_output) == (False, False)
    assert arms.same_as_reference(arms.ARMS["depth4"], config)
    assert not arms.same_as_reference(arms.ARMS["depth2"], config)
    order = [arm.name for arm in arms.needed(arms.parse_arms(["depth2", "exact"]))]
    assert order == ["depth2-stage1", "depth2", "stage1", "exact"]
    with pytest.raises(ConfigError, match=r"no arm 'exakt' \(closest: 'exact'\); arms: stage1, continued"):
        arms.parse_arms(["exakt"])


def test_evaluation_at_temperature_one_equals_enumeration(toy: Toy) -> None:
    """The estimate's mean over many seeds against E[L] enumerated at the same rounds; the rounds fixed by a spy."""
    vocab = list(range(3, 9))
    model = make_draft(toy.target, ids=torch.tensor(vocab).numpy(), vocab_size=6)
    verifier = TreeVerifier(load_target(toy.target, "float32"), model.draft_ids())
    row = sampled_rows(toy.store, 1)
    batch = collate(toy.store, row)
    begin = batch.loss_mask.long().argmax(1)
    start = DraftPass(model, batch)
    span = int((batch.lengths - 1 - begin).max())
    rows, anchors = rollout.walk_rounds(start, Stretch(batch, begin, begin, span), span, 2, 1.0, torch.Generator().manual_seed(0))
    chains = torch.tensor(list(itertools.product(range(6), repeat=2)))
    total = 0.0
    with torch.no_grad():
        for at in anchors.tolist():
            n, here = torch.zeros(36, dtype=torch.long), torch.full((36,), at)
            dense, _ = verifier.probabilities(batch.tokens, n, here, start.ids[chains][:, :1], 1.0)
            chain = start.chain(n, here)
            first = torch.minimum(dense[:, 0], chain.logits().softmax(1)).gather(1, chains[:, :1]).squeeze(1)
            chain.advance(start.ids[chains[:, 0]])
            second = torch.minimum(dense[:, 1], chain.logits().softmax(1)).gather(1, chains[:, 1:]).squeeze(1)
            total += float(first.sum() / 6 + (first * second).sum())
    exact = total / len(anchors)
    found = []
    original = rollout.walk_rounds
    try:
        rollout.walk_rounds = lambda *_: (rows, anchors)  # type: ignore[assignment]
        for seed in range(60):
            found.append(expected_accepted(model, toy.store, row, verifier, 2, autocast=False, seed=seed)[0])
    finally:
        rollout.walk_rounds = original
    error = float(torch.tensor(found).std()) / len(found) ** 0.5
    assert abs(sum(found) / len(found) - exact) < 4.5 * error + 1e-6
    one = expected_accepted(model, toy.store, row, verifier, 2, autocast=False, seed=3)
    assert one == expected_accepted(model, toy.store, row, verifier, 2, autocast=False, seed=3)


def test_one_table_with_every_kind_of_arm_and_nothing_made_twice(toy: Toy, base: Path, tmp_path: Path) -> None:
    what = Ablation(settings(toy), toy.target.parent, base, tmp_path / "out", ("eagle", "--profile", "tiny"))
    chosen = arms.parse_arms(["stage1", "continued", "exact", "group", "naive", "lk", "eagle30", "depth1"])
    text = ablate(what, chosen)
    found = manifest.read_json(tmp_path / "out" / report.JSON)
    rows = {row["arm"]: row for row in found["rows"]}
    assert list(rows) == [arm.name for arm in chosen]
    for name, row in rows.items():
        assert row["seeds"] == [0, 1]
        assert 0.0 <= row["expected_accepted_t1"]["mean"] <= 2.0
        assert 0.0 <= row["accepted_t0"]["mean"] <= 2.0
        difference = row["accepted_t0"]["difference"]
        assert (difference is None) == (name == "continued")
        words = shlex.split(row["command"])
        assert words[:4] == ["eagle", "--profile", "tiny", "ablate"]
        assert words[words.index("--arms") + 1].split(",")[-1] == name
    assert rows["depth1"]["accepted_t0"]["by_seed"] == rows["continued"]["accepted_t0"]["by_seed"], "draft.layers is 1 here"
    assert not (tmp_path / "out" / "depth1").exists()
    assert text == (tmp_path / "out" / report.MARKDOWN).read_text()
    assert re.search(r"^\| exact \| stage 2, exact gradient \| 2 \|", text, re.MULTILINE)

    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("manifest.json")}
    assert len(times) == 2 * (2 * 8 - 1)  # 7 arms and eagle30-stage1 trained; all but the latter measured
    again = ablate(what, chosen)
    assert again == text
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("manifest.json")}
    more = Ablation(settings(toy, sequences=2), what.root, base, what.out)
    ablate(more, arms.parse_arms(["stage1"]))
    changed = {path for path, at in times.items() if path.stat().st_mtime_ns != at}
    assert changed == {tmp_path / "out" / "stage1" / f"seed-{seed}" / "eval" / "manifest.json" for seed in (0, 1)}


def test_a_killed_ablation_goes_on_where_it_was(toy: Toy, base: Path, tmp_path: Path) -> None:
    """kill -9 while the second phase of the second arm trains: the same call keeps what is complete and the time spent."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom tests.training.test_ablate import *\n"
        "config = Config.model_validate_json(Path(sys.argv[1]).read_text())\n"
        "root, base, out = map(Path, sys.argv[2:])\n"
        "ablate(Ablation(config, root, base, out), arms.parse_arms(['continued', 'exact']))\n"
    )
    config, out = settings(toy, seeds=[0], minutes=0.2), tmp_path / "out"
    (tmp_path / "config.json").write_text(config.model_dump_json(by_alias=True))
    call = [sys.executable, "-c", script, str(tmp_path / "config.json"), str(toy.target.parent), str(base), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(call, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    state = out / "exact" / "seed-0" / "train.work" / "state.json"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not state.is_file():
        assert process.poll() is None, "the ablation ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = out / "continued" / "seed-0" / "train" / "manifest.json"
    at, steps = kept.stat().st_mtime_ns, json.loads(state.read_text())["step"]
    assert steps >= 1
    second = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert second.returncode == 0, second.stderr
    assert re.search(r"policy: goes on from step \d+", second.stderr)
    assert kept.stat().st_mtime_ns == at
    row = next(row for row in manifest.read_json(out / report.JSON)["rows"] if row["arm"] == "exact")
    assert row["steps"][0] > steps
    assert row["seconds"][0] >= 12.0


def test_all_arms_may_go_on_from_one_given_stage_1(toy: Toy, base: Path, tmp_path: Path) -> None:
    root, seeds = toy.target.parent, [0, 1]
    ablate(Ablation(settings(toy, seeds=[0]), root, base, tmp_path / "own"), arms.parse_arms(["stage1"]))
    start = tmp_path / "own" / "stage1" / "seed-0" / "train"
    what = Ablation(settings(toy, seeds=seeds), root, base, tmp_path / "out", start=start)
    text = ablate(what, arms.parse_arms(["stage1", "continued", "exact"]))
    rows = {row["arm"]: row for row in manifest.read_json(tmp_path / "out" / report.JSON)["rows"]}
    assert rows["stage1"]["accepted_t0"]["by_seed"]["0"] == rows["stage1"]["accepted_t0"]["by_seed"]["1"]
    assert not (tmp_path / "out" / "stage1" / "seed-0" / "train").exists()
    assert len(rows["exact"]["seeds"]) == 2
    assert "one given stage 1, the same for all seeds" in text
    assert rows["exact"]["command"].endswith(f"--from {start}")
    with pytest.raises(ConfigError, match="depth2 cannot go on from a draft of another shape"):
        ablate(what, arms.parse_arms(["continued", "depth2"]))
    with pytest.raises(StepFailed, match="no finished stage 1"):
        ablate(Ablation(settings(toy), root, base, tmp_path / "out", start=tmp_path), arms.parse_arms(["exact"]))


def test_vllms_count_is_a_column_of_its_own(toy: Toy, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is a stand-in: what is asked of it, and what becomes of its counters."""
    jobs: list[VllmJob] = []

    def fake(job: VllmJob, *_: object, **__: object) -> VllmResult:
        jobs.append(job)
        return VllmResult([], 1.0, 1.0, "9.9", Counters(4, 8, 6, [4, 2]))

    monkeypatch.setattr(evaluate, "run_vllm", fake)
    monkeypatch.setattr("eagle.ablate.run.require_vllm", lambda *_: Path(sys.executable))
    what = Ablation(settings(toy, seeds=[0], prompts=2), toy.target.parent, base, tmp_path / "out", vllm=True)
    text = ablate(what, arms.parse_arms(["stage1"]))
    (job,) = jobs
    assert len(job.requests) == 2
    assert job.speculative is not None
    assert job.speculative["num_speculative_tokens"] == 2
    assert job.speculative["model"] == str(tmp_path / "out" / "stage1" / "seed-0" / "train" / "draft")
    assert "accepted in vLLM, T=0" in text
    (row,) = manifest.read_json(tmp_path / "out" / report.JSON)["rows"]
    assert row["vllm_accepted_t0"]["mean"] == 1.5
    assert "--vllm" in row["command"]


def test_what_cannot_be_is_one_line(toy: Toy, base: Path, tmp_path: Path) -> None:
    chosen = arms.parse_arms(["stage1"])
    with pytest.raises(ConfigError, match="names a seed twice"):
        ablate(Ablation(settings(toy, seeds=[1, 1]), tmp_path, base, tmp_path / "out"), chosen)
    with pytest.raises(StepFailed, match="run: eagle step dataset --dir"):
        ablate(Ablation(settings(toy), tmp_path, tmp_path, tmp_path / "out"), chosen)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        ablate(Ablation(settings(toy), tmp_path, base, tmp_path / "file"), chosen)
    (tmp_path / "busy").mkdir()
    with FileLock(tmp_path / "busy" / "ablate.lock"), pytest.raises(BusyError, match="another ablation"):
        ablate(Ablation(settings(toy), tmp_path, base, tmp_path / "busy"), chosen)


def test_the_command_says_what_is_wrong_before_anything_starts(tmp_path: Path) -> None:
    for options, error in (
        (["--arms", "exact,nave"], "closest: 'naive'"), (["--seeds", "a"], "ablate.seeds"), (["--minutes", "0"], "ablate.minutes"),
    ):
        with pytest.raises(ConfigError, match=error):
            CliRunner().invoke(app, ["--root", str(ROOT), "ablate", "--dir", str(tmp_path), *options], catch_exceptions=False)
    with pytest.raises(StepFailed, match="no finished data set"):
        CliRunner().invoke(app, ["--root", str(ROOT), "ablate", "--dir", str(tmp_path)], catch_exceptions=False)
    assert not list(tmp_path.iterdir())
