"""The cost table: measured at every batch and draft length, in few fillings of the batch also where answers are short."""

from __future__ import annotations

import pytest

from eagle.bench import costs
from eagle.bench.workload import Workload
from eagle.decode.engine import Engine
from tests.decode.models import draft, prompts, target


def test_long_prompts_with_little_room_behind_them_cost_few_fillings(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    engine = Engine(model, draft(model), max_length=150, batch=4)
    questions = prompts([142, 30, 60, 141])  # 8 tokens of room behind the longest: not one round of K = 8
    work = Workload(questions, ["a", "b", "c", "d"], ["x"] * 4)
    fillings: list[list[int]] = []
    decode = costs._full_steps

    def counted(engine: Engine, asked: list[list[int]], size: int, turns: costs.Turns) -> list[costs.Step]:
        fillings.append([len(prompt) for prompt in asked])
        return decode(engine, asked, size, turns)

    monkeypatch.setattr(costs, "_full_steps", counted)
    table = costs.measure_costs(engine, work, 4, 8)
    assert len(fillings) <= 3 * 12
    assert max(max(lengths) for lengths in fillings) == 150 - costs.ROOM
    for size in (1, 2, 4):
        for length in (0, 1, 2, 3, 4, 6, 8):
            assert table.round_seconds(size, length) > 0
