"""Stage 1: its loss against a reading with explicit masks, the loop, and what a kill costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle import manifest
from eagle.config import Config
from eagle.dataset.read import Row, load_rows, write_shards
from eagle.draft.io import load_draft
from eagle.draft.model import DraftModel
from eagle.errors import StepFailed
from eagle.steps import StepContext
from eagle.train import distill
from eagle.train.batches import Batch, collate
from eagle.train.validate import heldout_rows, replay_acceptance
from tests.training.builders import EOS, Toy, make_draft, make_toy, write_dataset

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"), train=24, heldout=6)


def settings(toy: Toy, **changes: object) -> dict[str, object]:
    distilling: dict[str, object] = {
        "stages": [{"depth": 1, "steps": 20}, {"depth": 3, "steps": 12}], "tokens_per_step": 200, "eval_every": 8,
        "warmup_steps": 3,
        "checkpoint_every": 4, "eval_sequences": 6, "top_k": 8, "max_minutes": 5.0, "learning_rate": 3e-3,
    }
    return {
        "paths": {"cache": str(toy.cache)}, "runtime": {"threads": 1, "seed": 3, "device": "cpu"},
        "target": {"model": str(toy.target), "dtype": "float32"},
        "draft": {"layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 200, "intermediate_size": 96},
        "distill": distilling | changes,
    }


def context(toy: Toy, base: Path, **changes: object) -> StepContext:
    out, work = base / "out", base / "work"
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    return StepContext(Config.model_validate(settings(toy, **changes)), toy.target.parent, {"dataset": toy.dataset}, out, work)


class Masked:
    """Training-time test with the keys of all steps side by side and a [T, (k+1) T] mask: causal, then diagonals."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.keys.setdefault(layer, []), self.values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        length, groups = q.shape[2], q.shape[1] // k.shape[1]
        seen = torch.cat([torch.ones(length, length).tril(), *(torch.eye(length) for _ in keys[1:])], dim=1).bool()
        wide_k, wide_v = (torch.cat(x, 2).repeat_interleave(groups, 1) for x in (keys, values))
        scores = (q @ wide_k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ wide_v


def plain_loss(model: DraftModel, batch: Batch, depth: int, decay: float) -> Tensor:
    """The same loss row by row, position by position."""
    draft_of = {int(t): i for i, t in enumerate(model.draft_ids())}
    sums, counts = [torch.zeros(()) for _ in range(depth)], [0] * depth
    for at in range(len(batch.tokens)):
        length = int(batch.lengths[at])
        tokens, attend = batch.tokens[at, :length], Masked()
        hidden = model.fuse(batch.aux[at : at + 1, : length - 1])
        for k in range(depth):
            later = torch.cat([tokens[1 + k :], tokens.new_zeros(k)])[None]  # teacher forcing, k positions on
            normed, hidden = model.step(later, hidden, torch.arange(length - 1)[None] + k, attend)
            log_q = model.logits(normed)[0].log_softmax(-1)
            for t in range(length - 2 - k):
                if not (batch.loss_mask[at, t + 2] and batch.loss_mask[at, t + 2 + k]):
                    continue
                pairs = zip(batch.topk_index[at, t + 1 + k].tolist(), batch.topk_prob[at, t + 1 + k], strict=True)
                sums[k] = sums[k] - sum(p * log_q[t, draft_of[i]] for i, p in pairs if i in draft_of)
                counts[k] += 1
    weights = [decay**k for k in range(depth)]
    return sum(w * s / n for w, s, n in zip(weights, sums, counts, strict=True)) / sum(weights)


@pytest.mark.parametrize(("depth", "changes"), [(1, {}), (4, {}), (3, {"layers": 1, "vocab_size": None, "norm_output": False})])
def test_loss_and_gradients_equal_explicit_masks(toy: Toy, depth: int, changes: dict) -> None:
    model = make_draft(toy.target, **changes)
    batch = collate(toy.store, [0, 5, 7])
    loss, right = distill.distillation_loss(model, batch, depth, 0.8, model.target_to_draft())
    plain = plain_loss(model, batch, depth, 0.8)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    assert len(right) == depth
    ours, theirs = (torch.autograd.grad(value, list(model.parameters())) for value in (loss, plain))
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs, strict=True):
        assert b.abs().sum() > 0, name
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5 * float(b.abs().max()) + 1e-7)


def test_the_step_trains_a_draft_and_keeps_the_best(toy: Toy, tmp_path: Path) -> None:
    at = context(toy, tmp_path)
    metrics = distill.run(at)
    model = load_draft(at.out / "draft", toy.target)
    assert {p.name for p in (at.out / "draft").iterdir()} == {"config.json", "model.safetensors"}
    curves = manifest.read_json(at.out / "curves.json")
    losses = [row["loss"] for row in curves if "loss" in row and row["depth"] == 1]
    assert losses[-1] < 0.8 * losses[0]
    validations = [row for row in curves if "acceptance_length" in row]
    assert [row["step"] for row in validations] == [8, 16, 24, 32]
    best = max(validations, key=lambda row: row["acceptance_length"])
    assert metrics["acceptance_length"] == best["acceptance_length"]
    assert metrics["best_step"] == best["step"]
    found = replay_acceptance(model, toy.store, heldout_rows(toy.store, 6), 3, autocast=True)
    assert found.length == pytest.approx(metrics["acceptance_length"])
    assert list(found.by_position) == pytest.approx(metrics["acceptance_by_position"])
    assert metrics["steps"] == 32
    assert metrics["parameters"] == sum(p.numel() for p in model.parameters())
    assert EOS in model.draft_ids()
    answers = np.concatenate([toy.store.tokens(i)[toy.store.loss_mask(i)] for i in toy.store.select("heldout")])
    assert metrics["draft_vocab_coverage"] == pytest.approx(np.isin(answers, model.draft_ids()).mean(), abs=1e-4)


SCRIPT = """
import json, sys
from pathlib import Path
from eagle.config import Config
from eagle.dataset.read import Row, load_rows, write_shards
from eagle.steps import StepContext
from eagle.train import distill
given = json.loads(Path(sys.argv[1]).read_text())
config = Config.model_validate(given["config"])
base = Path(given["base"])
metrics = distill.run(StepContext(config, base, {"dataset": Path(given["dataset"])}, base / "out", base / "work"))
(base / "metrics.json").write_text(json.dumps(metrics))
"""


def start(toy: Toy, base: Path) -> subprocess.Popen[bytes]:
    for name in ("out", "work"):
        (base / name).mkdir(parents=True, exist_ok=True)
    (base / "given.json").write_text(manifest.canonical({"config": settings(toy), "base": str(base), "dataset": str(toy.dataset)}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(base / "given.json")], env=environment, stderr=subprocess.DEVNULL)


def test_killed_and_resumed_ends_with_the_same_bits(toy: Toy, tmp_path: Path) -> None:
    whole = distill.run(context(toy, tmp_path / "whole"))
    base = tmp_path / "killed"
    process = start(toy, base)
    state = base / "work" / "state.json"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (state.is_file() and manifest.read_json(state)["step"] >= 8):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    at = manifest.read_json(state)["step"]
    assert 8 <= at < 32
    second = start(toy, base)
    assert second.wait(timeout=120) == 0
    assert manifest.read_json(base / "metrics.json") == whole
    paths = [folder / "out" / "draft" / "model.safetensors" for folder in (tmp_path / "whole", base)]
    first, resumed = (load_file(path) for path in paths)
    assert first.keys() == resumed.keys()
    assert all(torch.equal(first[name], resumed[name]) for name in first)
    curves = [manifest.read_json(folder / "out" / "curves.json") for folder in (tmp_path / "whole", base)]
    assert curves[0] == curves[1]


def test_the_budget_ends_the_run_with_the_schedule(toy: Toy, tmp_path: Path) -> None:
    stages = [{"depth": 1, "steps": 4000}, {"depth": 2, "steps": 2000}]
    at = context(toy, tmp_path, max_minutes=0.06, stages=stages, eval_every=1000)
    metrics = distill.run(at)
    curves = manifest.read_json(at.out / "curves.json")
    assert metrics["steps"] < 2000
    assert {row["depth"] for row in curves if "depth" in row} == {1, 2}
    assert curves[-1]["acceptance_length"] >= 1.0
    rates = [row["learning_rate"] for row in curves if "learning_rate" in row]
    assert rates[-1] < 0.35 * max(rates)


def test_a_flat_acceptance_ends_the_stage(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"depth": 1, "steps": 60}, {"depth": 2, "steps": 60}]
    changes = {"stages": stages, "eval_every": 3, "patience": 2, "flat_gain": 1.0}  # nothing gains a whole token
    at = context(toy, tmp_path / "flat", **changes)
    metrics = distill.run(at)
    told = [line for line in capsys.readouterr().err.splitlines() if "is flat" in line]
    assert [line.split(": ")[1] for line in told] == ["step 9", "step 18"]  # the third validation of each stage
    assert told[0].endswith("depth 2 begins")
    assert told[1].endswith("training ends")
    assert metrics["steps"] == 18
    curves = manifest.read_json(at.out / "curves.json")
    trained = [(row["depth"], row["step"], len(row["top1_by_step"])) for row in curves if "depth" in row]
    assert trained == [(1, 9, 1), (2, 18, 2)]
    rates = [row["learning_rate"] for row in curves if "depth" in row]
    assert rates[1] < rates[0], "the schedule goes on from where the stage would have ended"
    for name, more in {"null": {"patience": None}, "few": {"patience": 40}}.items():
        whole = distill.run(context(toy, tmp_path / name, **(changes | {"stages": [{"depth": 1, "steps": 15}]} | more)))
        assert whole["steps"] == 15


def test_a_loss_that_is_not_finite_names_step_and_rows(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = distill.distillation_loss
    calls = []

    def poisoned(*args: object) -> tuple[Tensor, list[float]]:
        loss, right = real(*args)  # type: ignore[arg-type]
        calls.append(1)
        return (loss * float("nan") if len(calls) == 3 else loss), right

    monkeypatch.setattr(distill, "distillation_loss", poisoned)
    with pytest.raises(StepFailed, match=r"loss nan, gradient norm nan at step 2 \(rows [0-9a-f]{12}"):
        distill.run(context(toy, tmp_path))


def test_rows_and_vocabulary_that_cannot_be_used_are_told_and_counted(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row without an answer token to learn is skipped; a map larger than the distinct tokens shrinks."""
    dataset = write_dataset(tmp_path / "dataset", toy.target, train=6, heldout=4, tokens=3)
    rows = load_rows(dataset, "train")
    dead = Row("f" * 64, "file:toy", "toy", 0.0, [1, 5, 6, 7], [0, 0, 0, 0], 4, "length")
    write_shards(dataset, "train", [*rows, dead], 1000)
    at = context(toy, tmp_path, stages=[{"depth": 1, "steps": 3}])
    metrics = distill.run(replace(at, inputs={"dataset": dataset}))
    assert metrics["rows_skipped"] == 1
    assert metrics["rows_dropped"] == 0
    assert metrics["draft_vocab_size"] == 64
    assert load_draft(at.out / "draft", toy.target).spec.draft_vocab_size == 64
    said = capsys.readouterr().err
    assert "1 training rows without an answer token to learn are skipped" in said
    assert "draft vocabulary: 64, not 200: the training answers hold" in said
