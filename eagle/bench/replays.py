"""What the controller left on the table: acceptance recorded with the longest draft, replayed under each policy.

A request that would have accepted a tokens of K_max gives min(a, K) + 1 tokens with K; seconds come from the measured
cost table. So every fixed K, the per-round oracle and the controller itself are judged on the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle.decode.control import ControlSettings, PidController
from eagle.decode.cost import CostTable
from eagle.decode.engine import Engine
from eagle.decode.replay import Round, best_fixed, oracle, regret, replay, save_trace, worst_window


def record(
    engine: Engine, prompts: list[list[int]], batch: int, longest: int, max_new_tokens: int,
    done: Callable[[int], None] | None = None,
) -> list[Round]:  # fmt: skip
    """Decode greedily with `longest` draft tokens in every round and return what each round accepted."""
    stats = engine.generate(
        prompts, max_new_tokens=max_new_tokens, draft_tokens=longest, batch=batch, ignore_eos=True, done=done
    ).stats
    return [Round(len(step.accepted), step.accepted) for step in stats.steps if step.accepted]


def judge(stream: Sequence[Round], costs: CostTable, settings: ControlSettings, longest: int, batch: int) -> dict[str, Any]:
    """Return, of a recorded stream: tokens/s of each fixed K, the best, the oracle's and the controller's, and regrets.

    The controller starts without any knowledge. Regret is 1 - its tokens/s over the other's.
    """
    pid = replay(stream, PidController(costs, settings), costs, longest)
    fixed, clairvoyant = best_fixed(stream, costs, longest), oracle(stream, costs, longest)
    lost = regret(pid, stream, costs, longest)
    return {
        "batch": batch,
        "rounds": len(stream),
        "max_draft_tokens": longest,
        "best_fixed_k": fixed.lengths[0],
        "best_fixed_tokens_per_second": round(fixed.rate, 3),
        "oracle_tokens_per_second": round(clairvoyant.rate, 3),
        "pid_tokens_per_second": round(pid.rate, 3),
        "pid_mean_k": round(sum(pid.lengths) / len(pid.lengths), 3),
        "regret_to_best_fixed": round(lost.fixed, 5),
        "regret_to_oracle": round(lost.oracle, 5),
        "worst_window_regret": round(worst_window(pid, fixed), 5),
    }


def write_traces(folder: Path, traces: dict[int, list[Round]]) -> None:
    """Write trace-b<batch>.jsonl, one line a round."""
    for batch, stream in traces.items():
        save_trace(folder / f"trace-b{batch}.jsonl", stream)
