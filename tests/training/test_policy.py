"""The policy step on a tiny target: schedule, objective, exact improvement, guard, resume, output."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import manifest
from eagle.config import Config, PolicyConfig, TemperatureShare
from eagle.dataset.read import Row, load_rows, write_shards
from eagle.draft.io import load_draft
from eagle.errors import DataError
from eagle.steps import StepContext
from eagle.target.load import load_target
from eagle.train import distill, objectives, policy, reward, visits
from eagle.train.batches import collate
from eagle.train.rollout import DraftPass, Rounds, TreeVerifier
from tests.toys import tiny_target

PROMPT, ANSWER = 5, 14


def write_dataset(folder: Path, target_folder: Path, temperatures: list[float], rows: int = 12) -> None:
    """Random prompts answered by the target itself, cut at ANSWER tokens; the last third is held out at temperature 0."""
    target = load_target(target_folder, "float32")
    g = torch.Generator().manual_seed(7)
    made: dict[str, list[Row]] = {"train": [], "heldout": []}
    for number in range(rows):
        split = "heldout" if number >= rows * 2 // 3 else "train"
        temperature = 0.0 if split == "heldout" else temperatures[number % len(temperatures)]
        ids = torch.randint(3, 40, (1, PROMPT), generator=g)
        for _ in range(ANSWER - number % 3):
            logits = target(input_ids=ids).logits[0, -1]
            token = torch.multinomial((logits / temperature).softmax(0), 1, generator=g)[0] if temperature else logits.argmax()
            ids = torch.cat([ids, token.view(1, 1)], 1)
        tokens = ids[0].tolist()
        mask = [int(at >= PROMPT) for at in range(len(tokens))]
        made[split].append(Row(f"{number:064x}", "self", "chat", temperature, tokens, mask, PROMPT, "length"))
    folder.mkdir(parents=True)
    for split, answered in made.items():
        write_shards(folder, split, answered, 2048)  # type: ignore[arg-type]


def make_config(target: Path, base: Path, **overrides: Any) -> Config:
    """A tiny profile; `overrides` are policy keys."""
    keys = {
        "steps": 6, "sequences_per_step": 4, "anchors_per_sequence": 6, "draft_tokens": 2, "eval_every": 3, "checkpoint_every": 2,
        "learning_rate": 5e-3, "warmup_steps": 1, "max_minutes": 60.0, "max_drop": 1.0,
    } | overrides
    return Config.model_validate({
        "paths": {"cache": str(base / "cache")},
        "runtime": {"threads": 1, "device": "cpu"},
        "target": {"model": str(target), "dtype": "float32"},
        "draft": {"layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 32, "vocab_size": 48},
        "distill": {
            "stages": [{"depth": 1, "steps": 12}], "max_minutes": 60.0, "tokens_per_step": 80, "top_k": 8, "autocast": False,
            "warmup_steps": 1, "eval_every": 100, "checkpoint_every": 100, "eval_tokens": 2,
        },
        "policy": keys,
    })


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a mixed data set and a distilled draft, shared by the module: base/{target,dataset,distill,cache}."""
    base = tmp_path_factory.mktemp("policy")
    target = tiny_target(base / "target", layers=4, scale=6.0)
    write_dataset(base / "dataset", target, [0.0, 1.0])
    out = base / "distill"
    out.mkdir()
    (base / "work").mkdir()
    distill.run(StepContext(make_config(target, base), base, {"dataset": base / "dataset"}, out, base / "work"))
    return base


def context_at(base: Path, folder: Path, **overrides: Any) -> StepContext:
    for name in ("out", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    inputs = {"dataset": base / "dataset", "distill": base / "distill"}
    return StepContext(make_config(base / "target", base, **overrides), base, inputs, folder / "out", folder / "work")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "draft" / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_temperature_schedule_keeps_the_shares_at_every_prefix() -> None:
    shares = [TemperatureShare(temperature=t, weight=w) for t, w in ((0.0, 2.0), (1.0, 1.0), (0.7, 1.0))]
    schedule = visits.temperature_schedule(shares, 40)
    for n in range(1, 41):
        assert abs(schedule[:n].count(0.0) - n / 2) <= 1
        assert abs(schedule[:n].count(1.0) - n / 4) <= 1
    assert visits.temperature_schedule(shares, 10) == schedule[:10]


def test_row_order_visits_every_row_once_an_epoch() -> None:
    order = visits.RowOrder(list(range(10, 21)), [n % 5 + 1 for n in range(11)], 4, [0, 1])
    epochs = [list(itertools.chain.from_iterable(order.at(3 * epoch + i) for i in range(3))) for epoch in range(2)]
    assert all(sorted(epoch) == list(range(10, 21)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert order.at(4) == visits.RowOrder(list(range(10, 21)), [n % 5 + 1 for n in range(11)], 4, [0, 1]).at(4)


def test_objective_at_temperature_zero_is_the_path_form_plus_the_anchor() -> None:
    logits = tuple(torch.randn(3, 5, requires_grad=True) for _ in range(2))
    token, live = torch.tensor([[0, 1], [2, -1], [4, 4]]), torch.tensor([[True, True], [True, True], [True, False]])
    index, prob = torch.randint(-1, 5, (3, 2, 2)), torch.rand(3, 2, 2) / 2
    rounds = Rounds(0.0, logits, token, live, topk_index=index, topk_prob=prob)
    goal = policy.objective(rounds, PolicyConfig(anchor_weight=0.3), torch.Generator())
    q = [z.detach().softmax(1) for z in logits]
    first = [float(q[0][n, token[n, 0]]) for n in range(3)]
    length = sum(first) + first[0] * float(q[1][0, 1])
    assert goal.expected == pytest.approx(length / 3, rel=1e-5)
    entropy = [objectives.soft_cross_entropy(logits[i], index[:, i], prob[:, i]) * live[:, i] for i in range(2)]
    anchor = float((entropy[0].sum() + entropy[1].sum()).detach() / 5)
    assert goal.anchor == pytest.approx(anchor, rel=1e-5)
    assert float(goal.loss.detach()) == pytest.approx(-length / 3 + 0.3 * anchor, rel=1e-5)
    right = [[int(logits[i][n].argmax()) == token[n, i] for i in range(2)] for n in range(3)]
    assert goal.accepted == pytest.approx((sum(r[0] for r in right) + sum(r[0] and r[1] for r in right[:2])) / 3)


def exact_expected_length(start: DraftPass, verifier: TreeVerifier, rows: torch.Tensor, anchors: torch.Tensor) -> float:
    """E[L] of K = 2 at temperature 1 by enumerating the whole draft vocabulary, mean over the anchors."""
    size, total = len(start.ids), 0.0
    for row, anchor in zip(rows.tolist(), anchors.tolist(), strict=True):
        n = torch.full((size,), row)
        at = torch.full((size,), anchor)
        dense, _ = verifier.probabilities(start.batch.tokens, n, at, start.ids[:, None], 1.0)
        chain = start.chain(n, at)
        first = torch.minimum(dense[0, 0], chain.logits()[0].softmax(0))
        chain.advance(start.ids)
        second = torch.minimum(dense[:, 1], chain.logits().softmax(1)).sum(1)
        total += float((first * (1 + second)).sum())
    return total / len(rows)


def test_stage_2_raises_the_exact_expected_accepted_length(base: Path, tmp_path: Path) -> None:
    """Temperature 1, K = 2, no anchor: E[L] computed by enumeration at fixed anchors of the training rows goes up."""
    context = context_at(
        base, tmp_path, steps=30, eval_every=1000, checkpoint_every=1000, anchor_weight=0.0, learning_rate=2e-3,
        temperatures=[{"temperature": 1.0, "weight": 1.0}],
    )
    stage = policy.Stage(context)
    target = load_target(base / "target", "float32")
    batch = collate(stage.store, [i for i in stage.store.select("train") if stage.store.rows[i].temperature == 1.0])
    rows, anchors = torch.tensor([0, 0, 1, 1, 2, 3]), torch.tensor([5, 9, 6, 11, 7, 5])
    verifier = TreeVerifier(target, stage.model.draft_ids())

    def measure() -> float:
        with torch.no_grad():
            return exact_expected_length(DraftPass(stage.model, batch), verifier, rows, anchors)

    before = measure()
    stage.train()
    assert measure() > 1.05 * before


def test_gradient_reaches_every_weight_under_autocast(base: Path, tmp_path: Path) -> None:
    """The walk runs without gradient between two passes that need it: its cast weights must not be reused by them."""
    context = context_at(base, tmp_path, steps=2)
    config = context.config.model_copy(update={"distill": context.config.distill.model_copy(update={"autocast": True})})
    stage = policy.Stage(replace(context, config=config))
    for step in range(2):
        rounds, generator = stage.rollouts.at(step)
        stage.model.zero_grad(set_to_none=True)
        policy.objective(rounds, PolicyConfig(), generator).loss.backward()
        for name, parameter in stage.model.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.any()), name


def test_run_writes_the_kept_draft_curves_and_metrics(base: Path, tmp_path: Path) -> None:
    context = context_at(base, tmp_path)
    metrics = policy.run(context)
    curves = manifest.read_json(context.out / "curves.json")
    assert [row["step"] for row in curves] == [1, 2, 3, 4, 5, 6]
    assert {row["temperature"] for row in curves} == {0.0, 1.0}
    assert [row["acceptance_length"] is not None for row in curves] == [False, False, True] * 2
    assert all(row["expected_accepted"] >= 0 and row["gradient_norm"] > 0 for row in curves)
    measured = [row["acceptance_length"] for row in curves if row["acceptance_length"] is not None]
    assert metrics["acceptance_length"] == max([metrics["acceptance_length_before"], *measured])
    assert metrics["kept"] == ("policy" if metrics["best_step"] else "distilled")
    assert len(metrics["acceptance_by_position"]) == 2
    manifest.write_json(tmp_path / "metrics.json", metrics)  # finite JSON
    kept = load_draft(context.out / "draft", base / "target")
    assert torch.equal(kept.draft_ids(), load_draft(base / "distill" / "draft", base / "target").draft_ids())


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "group", "updates": 2}, {"method": "group", "baseline": "adjacent", "group_size": 1},
        {"method": "group", "baseline": "reference", "group_size": 3}, {"method": "naive", "token_cost": 0.1},
    ],
    ids=["leave one out, two updates", "adjacent", "reference", "naive with a cost"],
)
def test_sampled_methods_run_at_both_temperatures_and_log_every_step(base: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    context = context_at(base, tmp_path, steps=4, **keys)
    metrics = policy.run(context)
    curves = manifest.read_json(context.out / "curves.json")
    assert metrics["steps"] == 4
    assert {row["temperature"] for row in curves} == {0.0, 1.0}
    for row in curves:
        assert {"reward", "kl_to_distilled", "anchor_weight", "accepted", "expected_accepted"} <= row.keys()
        assert -0.2 - 1e-6 <= row["reward"] <= 2.0  # at most K = 2 accepted; at least none and two proposed
    assert curves[0]["kl_to_distilled"] == pytest.approx(0.0, abs=1e-6)
    assert curves[-1]["kl_to_distilled"] > 0.0


def test_group_raises_the_exact_expected_accepted_length_of_a_real_draft(base: Path, tmp_path: Path) -> None:
    context = context_at(
        base, tmp_path, steps=30, eval_every=1000, checkpoint_every=1000, anchor_weight=0.0, learning_rate=2e-3,
        temperatures=[{"temperature": 1.0, "weight": 1.0}], method="group", anchors_per_sequence=256, group_size=32,
    )
    stage = policy.Stage(context)
    target = load_target(base / "target", "float32")
    batch = collate(stage.store, [i for i in stage.store.select("train") if stage.store.rows[i].temperature == 1.0])
    rows, anchors = torch.tensor([0, 0, 1, 1, 2, 3]), torch.tensor([5, 9, 6, 11, 7, 5])
    verifier = TreeVerifier(target, stage.model.draft_ids())
    with torch.no_grad():
        before = exact_expected_length(DraftPass(stage.model, batch), verifier, rows, anchors)
    stage.train()
    with torch.no_grad():
        assert exact_expected_length(DraftPass(stage.model, batch), verifier, rows, anchors) > 1.05 * before


def test_divergence_and_alphas_of_the_frozen_draft(base: Path, tmp_path: Path) -> None:
    """KL against a plain computation over the rounds of the first two rows with any; alphas are the rounds' own before training."""
    stage = policy.Stage(context_at(base, tmp_path, steps=2, temperatures=[{"temperature": 1.0, "weight": 1.0}]))
    assert stage.reference is not None
    rounds, _ = stage.rollouts.at(0)
    torch.testing.assert_close(stage.reference.alphas(rounds), reward.alphas(rounds))
    assert stage.reference.kl(rounds) == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        stage.model.lm_head.weight.mul_(1.3)
    assert rounds.origin is not None
    alone = rounds.origin.rows != 0  # a row without a round, as a short answer leaves it
    some = replace(rounds.origin, **{name: getattr(rounds.origin, name)[alone] for name in ("rows", "anchors", "path")})
    rounds = replace(
        rounds, logits=tuple(z[alone] for z in rounds.logits), token=rounds.token[alone], live=rounds.live[alone], origin=some
    )
    moved, here = stage.rollouts.again(rounds), torch.isin(some.rows, some.rows.unique()[:2])
    apart = torch.stack([
        torch.nn.functional.kl_div(old.log_softmax(1), new.log_softmax(1), log_target=True, reduction="none").sum(1)
        for old, new in zip(rounds.logits, moved.logits, strict=True)
    ], 1)
    live = rounds.live & here[:, None]
    assert stage.reference.kl(moved) == pytest.approx(float(apart[live].mean().detach()), rel=1e-4)


def test_token_cost_favours_drafts_that_end_with_the_text(base: Path) -> None:
    """With a cost, the exact method's gradient of the ending token's logit rises by cost * saved proposals."""
    z = [torch.zeros(1, 3, requires_grad=True) for _ in range(3)]
    token, live = torch.tensor([[1, 0, 0]]), torch.tensor([[True, False, False]])
    dense = torch.full((1, 3, 3), 0.3)
    grads = []
    for cost in (0.0, 0.2):
        config = PolicyConfig(anchor_weight=0.0, token_cost=cost)
        goal = policy.objective(Rounds(1.0, tuple(z), token, live, dense=dense), config, torch.Generator().manual_seed(0))
        grads.append(torch.autograd.grad(goal.loss, z, allow_unused=True)[0])
        assert goal.reward == pytest.approx(goal.expected - cost)
    torch.testing.assert_close(grads[1] - grads[0], -0.2 * 2 * torch.tensor([[-1 / 3, 2 / 3, -1 / 3]]))


def test_short_answers_are_skipped_and_counted(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "dataset", base / "target", [0.0, 1.0], rows=9)
    kept = load_rows(tmp_path / "dataset", "train")
    short = Row("0" * 64, "self", "chat", 0.0, [3, 4, 5, 6], [0, 0, 0, 1], 3, "length")
    write_shards(tmp_path / "dataset", "train", [*kept, short], 2048)
    context = context_at(base, tmp_path, steps=2)
    metrics = policy.run(replace(context, inputs={**context.inputs, "dataset": tmp_path / "dataset"}))
    assert metrics["rows_skipped"] == 1
    assert "1 training rows with an answer below 2 tokens are skipped" in capsys.readouterr().err


def test_kept_draft_measures_what_the_metrics_say(base: Path, tmp_path: Path) -> None:
    context = context_at(base, tmp_path)
    metrics = policy.run(context)
    other = context_at(base, tmp_path / "check", steps=0)
    second = policy.run(replace(other, inputs={**other.inputs, "distill": context.out}))
    assert second["acceptance_length"] == metrics["acceptance_length"]
    assert second["kept"] == "distilled"


def test_steps_zero_copies_the_distilled_draft(base: Path, tmp_path: Path) -> None:
    context = context_at(base, tmp_path, steps=0)
    metrics = policy.run(context)
    assert same(context.out, base / "distill")
    assert metrics["steps"] == 0
    assert metrics["acceptance_length"] == metrics["acceptance_length_before"]
    assert manifest.read_json(context.out / "curves.json") == []


def test_a_ruinous_learning_rate_is_rolled_back(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A destructive step size: the guard stops and the distilled draft is kept."""
    context = context_at(base, tmp_path, steps=9, learning_rate=1.0, warmup_steps=0, eval_every=2, max_drop=0.02)
    metrics = policy.run(context)
    assert metrics["steps"] < 9
    assert metrics["kept"] == "distilled"
    assert same(context.out, base / "distill")
    said = capsys.readouterr().err
    assert "stopped at step" in said
    assert "did not improve" in said


@pytest.mark.parametrize("temperatures", [[0.0], [1.0]])
def test_data_sets_of_one_temperature_only(base: Path, tmp_path: Path, temperatures: list[float]) -> None:
    """Rollouts at a temperature for which there are no rows start from the others; the greedy path is then generated."""
    write_dataset(tmp_path / "dataset", base / "target", temperatures, rows=6)
    context = context_at(base, tmp_path, steps=2, eval_every=2)
    metrics = policy.run(replace(context, inputs={**context.inputs, "dataset": tmp_path / "dataset"}))
    assert metrics["steps"] == 2


def test_no_usable_row_is_a_data_error(base: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset", base / "target", [0.0], rows=6)
    train = [Row("0" * 64, "self", "chat", 0.0, [3, 4, 5, 6], [0, 0, 0, 1], 3, "length")]
    write_shards(tmp_path / "dataset", "train", train, 2048)
    context = context_at(base, tmp_path, steps=2)
    with pytest.raises(DataError, match="no training row"):
        policy.run(replace(context, inputs={**context.inputs, "dataset": tmp_path / "dataset"}))


def test_killed_run_goes_on_to_the_same_weights(base: Path, tmp_path: Path) -> None:
    """kill -9 right after a checkpoint; the second run ends bit for bit where an uninterrupted one ends."""
    whole = context_at(base, tmp_path / "whole")
    expected = policy.run(whole)
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.training.test_policy import context_at\n"
        "from eagle.train import policy\n"
        "keep = policy.Stage._checkpoint\n"
        "def checkpoint(self):\n"
        "    keep(self)\n"
        "    if self.progress.pace.step == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "policy.Stage._checkpoint = checkpoint\n"
        "policy.run(context_at(Path(sys.argv[1]), Path(sys.argv[2])))\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, str(base), str(tmp_path / "part")]
    killed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "part" / "out" / "draft").exists()
    context = context_at(base, tmp_path / "part")
    assert policy.run(context) == expected
    assert same(context.out, whole.out)
    first, second = (manifest.read_json(c.out / "curves.json") for c in (whole, context))
    assert first == second
