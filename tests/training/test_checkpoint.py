"""Checkpoints, and the schedule that they carry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from eagle.config import DepthStage
from eagle.errors import StepFailed
from eagle.train.checkpoint import STATE, load_checkpoint, remove_checkpoints, save_checkpoint
from eagle.train.schedule import Pace, learning_rate, work


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": [model[0].bias], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.1, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()  # draws from the global generator
    optimizer.step()


def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = make(0)
    for _ in range(3):
        step(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, 3, {"seen": [1, 2]})
    for _ in range(3):
        step(model, optimizer)
    other, other_optimizer = make(1)
    assert load_checkpoint(tmp_path, other, other_optimizer) == {"seen": [1, 2]}
    for _ in range(3):
        step(other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_checkpoint_is_kept_and_what_is_wrong_is_said(tmp_path: Path) -> None:
    model, optimizer = make(0)
    assert load_checkpoint(tmp_path / "nothing", model, optimizer) is None
    step(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, 1, {})
    save_checkpoint(tmp_path, model, optimizer, 2, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state-00000002.safetensors", STATE]
    wider = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    with pytest.raises(StepFailed, match="not those of this draft"):
        load_checkpoint(tmp_path, wider, torch.optim.AdamW(wider.parameters()))
    (tmp_path / "state-00000002.safetensors").unlink()
    with pytest.raises(StepFailed, match="which is gone"):
        load_checkpoint(tmp_path, model, optimizer)
    remove_checkpoints(tmp_path)
    assert list(tmp_path.iterdir()) == []


STAGES = [DepthStage(depth=1, steps=40), DepthStage(depth=3, steps=20)]


def run(pace: Pace, seconds: dict[int, float], limit: int = 10_000) -> list[tuple[int, float]]:
    """(depth, progress) of each step."""
    seen = []
    while not pace.done and len(seen) < limit:
        seen.append((pace.depth, pace.progress))
        pace.step_done(seconds[pace.depth])
    return seen


def test_with_time_enough_the_schedule_depends_on_steps_only() -> None:
    quick, slow = (run(Pace(STAGES, 1000.0), {1: a, 3: b}) for a, b in ((0.01, 0.02), (2.0, 5.0)))
    assert quick == slow
    assert [depth for depth, _ in quick] == [1] * 40 + [3] * 20
    assert quick[0][1] == 0.0
    assert quick[-1][1] > 0.95


def test_a_checkpoint_with_another_runs_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    model, optimizer = make(0)
    model.register_buffer("d2t", torch.tensor([0, 2, 2]))
    step(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, 1, {})
    assert load_checkpoint(tmp_path, model, optimizer) == {}
    before = model[0].weight.clone()
    model.register_buffer("d2t", torch.tensor([0, 1, 2]))
    with torch.no_grad():
        model[0].weight += 1.0
    with pytest.raises(StepFailed, match="'d2t' is another run's draft vocabulary"):
        load_checkpoint(tmp_path, model, optimizer)
    assert torch.equal(model[0].weight, before + 1.0), "nothing of a refused checkpoint is taken over"


@given(first=st.floats(0.1, 3.0), ratio=st.floats(1.2, 4.0), budget=st.floats(20.0, 60.0))
def test_with_too_little_time_every_stage_has_its_share(first: float, ratio: float, budget: float) -> None:
    pace = Pace(STAGES, budget)
    costs = {1: first, 3: first * ratio}
    seen = run(pace, costs)
    assert all(later >= earlier for (_, earlier), (_, later) in zip(seen, seen[1:], strict=False))
    whole = 40 * costs[1] + 20 * costs[3]
    if whole > 1.3 * budget:
        assert pace.elapsed <= budget + costs[3]
        assert {depth for depth, _ in seen} == {1, 3}
        assert seen[-1][1] >= 1 - 2 * costs[3] / budget  # the learning rate has come to its end
        share = sum(costs[d] for d, _ in seen if d == 1) / pace.elapsed
        assert share == pytest.approx(40 * costs[1] / whole, abs=0.3)
    if whole < 0.9 * budget and ratio >= work(3):  # a second stage that is cheaper than foreseen comes to light only there
        assert len(seen) == 60


def test_pace_survives_a_crash() -> None:
    pace = Pace(STAGES, 30.0)
    run(pace, {1: 0.5, 3: 1.5}, 45)
    pace.other_work(2.0)
    again = Pace.from_json(STAGES, 30.0, pace.as_json())
    assert again == pace
    assert run(again, {1: 0.5, 3: 1.5}) == run(pace, {1: 0.5, 3: 1.5})


def test_learning_rate() -> None:
    rate = lambda step, progress: learning_rate(step, progress, base=1.0, min_ratio=0.1, warmup=4)  # noqa: E731
    assert [rate(s, 0.0) for s in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rate(9, 0.5) == pytest.approx(0.55)
    assert rate(9, 1.0) == rate(9, 1.5) == pytest.approx(0.1)
