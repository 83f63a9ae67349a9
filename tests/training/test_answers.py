"""Stage 2 along the target's own answers: the expected rounds against the process itself, by enumeration; the stage on a toy."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from eagle.config import PolicyConfig
from eagle.errors import DataError
from eagle.train import answers, policy
from eagle.train.answers import AnswerRollouts, expected_starts
from tests.training.test_policy import base, context_at, make_config, write_dataset

__all__ = ["base"]  # the fixture: a target, a data set answered at temperatures 0 and 1, and a distilled draft
V, K, S = 3, 2, 4
T1 = [{"temperature": 1.0, "weight": 1.0}]
Text = tuple[int, ...]


class Tables:
    """A target p(. | text) and a draft q(. | where its round started, text), one row of random logits each."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.target: dict[Text, Tensor] = {}
        self.draft: dict[tuple[int, Text], Tensor] = {}

    def p(self, text: Text) -> Tensor:
        if text not in self.target:
            self.target[text] = (2 * torch.randn(V, generator=self.g, dtype=torch.float64)).softmax(0)
        return self.target[text]

    def q(self, start: int, text: Text) -> Tensor:
        if (start, text) not in self.draft:
            self.draft[start, text] = (2 * torch.randn(V, generator=self.g, dtype=torch.float64)).requires_grad_()
        return self.draft[start, text].softmax(0)

    def rounds(self, text: Text) -> Tensor:
        """Expected rounds of chain rejection sampling from `text` until S tokens are there."""
        if len(text) >= S:
            return torch.zeros((), dtype=torch.float64)
        return 1 + self.drafted(len(text), text)

    def drafted(self, start: int, text: Text) -> Tensor:
        p = self.p(text)
        if len(text) - start == K:  # all accepted: the bonus token
            return torch.stack([p[y] * self.rounds((*text, y)) for y in range(V)]).sum()
        both = torch.minimum(p, self.q(start, text))
        on = [both[y] * self.drafted(start, (*text, y)) + (p[y] - both[y]) * self.rounds((*text, y)) for y in range(V)]
        return torch.stack(on).sum()


@pytest.mark.parametrize("seed", range(4))
def test_over_all_answers_the_mean_rounds_and_their_gradient_are_those_of_rejection_sampling(seed: int) -> None:
    tables = Tables(seed)
    truth = tables.rounds(())
    mean = torch.zeros((), dtype=torch.float64)
    for y in itertools.product(range(V), repeat=S + K):
        chance = torch.stack([tables.p(y[:i])[y[i]] for i in range(S + K)]).prod()
        reach = torch.stack([
            torch.stack([(tables.q(t, y[: t + i])[y[t + i]] / tables.p(y[: t + i])[y[t + i]]).clamp_max(1.0) for i in range(K)])
            .cumprod(0) for t in range(S)
        ])  # fmt: skip
        mean = mean + chance * expected_starts(reach[None]).sum()
    torch.testing.assert_close(mean, truth, rtol=1e-12, atol=1e-12)
    logits = [z for (start, text), z in tables.draft.items() if len(text) < S]
    wanted = torch.autograd.grad(truth, logits, retain_graph=True)
    found = torch.autograd.grad(mean, logits)
    assert max(float(g.abs().max()) for g in wanted) > 1e-3
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_starts_of_certain_rounds() -> None:
    nothing, all_of_them = torch.zeros(1, 7, K), torch.ones(1, 7, K)
    assert expected_starts(nothing)[0].tolist() == [1.0] * 7
    assert expected_starts(all_of_them)[0].tolist() == [1.0, 0, 0, 1.0, 0, 0, 1.0]
    assert expected_starts(torch.ones(2, 1, 5)).tolist() == [[1.0], [1.0]]  # K longer than the text


def stage_of(base: Path, folder: Path, **keys: Any) -> policy.Stage:
    settings = {"path": "answers", "steps": 30, "eval_every": 1000, "checkpoint_every": 1000, "anchor_weight": 0.0} | keys
    return policy.Stage(context_at(base, folder, **settings))


def source_of(stage: policy.Stage) -> AnswerRollouts:
    assert stage.answers is not None
    return stage.answers


def tokens_a_round(stage: policy.Stage, temperature: float, seed: int = 0) -> float:
    with torch.no_grad():
        source = source_of(stage)
        found, _ = source.at(source.schedule.index(temperature))
        return 1.0 + source.objective(found, torch.Generator().manual_seed(seed)).expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_dropping_improbable_rounds_leaves_the_mean(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    stage = stage_of(base, tmp_path, draft_tokens=4, temperatures=[{"temperature": temperature, "weight": 1.0}])
    monkeypatch.setattr(answers, "FLOOR", 1e-9)
    whole = 1.0 / tokens_a_round(stage, temperature)
    monkeypatch.setattr(answers, "FLOOR", 0.6)
    drawn = torch.tensor([1.0 / tokens_a_round(stage, temperature, seed) for seed in range(400)])
    assert float(drawn.std()) > 0
    assert abs(float(drawn.mean()) - whole) < 4 * float(drawn.std()) / 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_stage_raises_the_tokens_a_round(base: Path, tmp_path: Path, temperature: float) -> None:
    stage = stage_of(
        base, tmp_path, learning_rate=2e-3, sequences_per_step=8, temperatures=[{"temperature": temperature, "weight": 1.0}]
    )
    before = tokens_a_round(stage, temperature)
    stage.train()
    assert tokens_a_round(stage, temperature) > 1.05 * before
    for row in stage.progress.curves:
        assert row["temperature"] == temperature
        assert row["rounds"] > 0
        assert row["gradient_norm"] >= 0  # 0 where every likely token is certain to be accepted
        assert 0 <= row["accepted"] <= 2
    assert stage.progress.curves[-1]["kl_to_distilled"] > stage.progress.curves[0]["kl_to_distilled"]


def test_at_temperature_1_it_is_what_the_drawn_rounds_get_accepted(base: Path, tmp_path: Path) -> None:
    """K = 1: tokens a round over fixed answers is 1 + their mean acceptance where rounds start; checked by simulation."""
    stage = stage_of(base, tmp_path, draft_tokens=1, temperatures=T1, sequences_per_step=8, anchors_per_sequence=40)
    found, _ = source_of(stage).at(0)
    wanted = tokens_a_round(stage, 1.0)
    rows, _, anchors = found.anchors()
    with torch.no_grad():
        logits = found.start.chain(rows, anchors).logits()
        y, inside = found.start.row_tokens(rows, anchors + 1)
        draft_id = found.start.index[y]
        q = logits.softmax(1).gather(1, draft_id.clamp_min(0)[:, None])[:, 0] * (draft_id >= 0)
        chance = (q / found.start.batch.own[rows, anchors].exp()).clamp_max(1.0) * inside
    g, started = torch.Generator().manual_seed(3), []
    for _ in range(600):
        coins, count = torch.rand(len(rows), generator=g) < chance, 0
        for row in range(len(found.stretch.offset)):
            hits, at = coins[rows == row].tolist(), 0
            while at < len(hits):
                count, at = count + 1, at + 1 + int(hits[at])
        started.append(count)
    mean = torch.tensor(started, dtype=torch.float64)
    assert abs(float(mean.mean()) - len(rows) / wanted) < 4 * float(mean.std()) / 600**0.5


def test_gradient_reaches_every_weight_under_autocast(base: Path, tmp_path: Path) -> None:
    context = context_at(base, tmp_path, steps=2, path="answers")
    config = context.config.model_copy(update={"distill": context.config.distill.model_copy(update={"autocast": True})})
    stage = policy.Stage(replace(context, config=config))
    for step in range(2):
        found, generator = source_of(stage).at(step)
        stage.model.zero_grad(set_to_none=True)
        source_of(stage).objective(found, generator).loss.backward()
        for name, parameter in stage.model.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.any()), name


def test_answers_of_a_temperature_that_nobody_gave(base: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "cold" / "dataset", base / "target", [0.0])
    context = context_at(base, tmp_path, path="answers", temperatures=T1)
    inputs = {**context.inputs, "dataset": tmp_path / "cold" / "dataset"}
    with pytest.raises(DataError, match=r"temperature 1 \(there are: 0\); add it to dataset.temperatures"):
        policy.Stage(replace(context, inputs=inputs))


def test_settings_that_do_not_go_together(base: Path) -> None:
    with pytest.raises(ValidationError, match="needs method exact, not group"):
        PolicyConfig(path="answers", method="group")
    with pytest.raises(ValidationError, match="at temperatures 0 and 1, not 0.7"):
        make_config(base / "target", base, path="answers", temperatures=[{"temperature": 0.7, "weight": 1.0}])
