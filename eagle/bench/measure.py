"""The measurements: paired speed, acceptance, greedy equality, memory. Each returns plain numbers for bench.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import torch
from transformers import PreTrainedModel

from eagle.bench.workload import Arm, Workload, is_adaptive
from eagle.config import Method
from eagle.decode.control import LengthPolicy
from eagle.decode.engine import Engine
from eagle.decode.stats import DecodeStats
from eagle.progress import say
from eagle.target.layout import weight_bytes

BUSY_PERCENT = 25.0
Spread = dict[str, Any]


def spread(values: Sequence[float], digits: int = 4) -> Spread:
    """Return {median, min, max, runs} of repeated measurements."""
    runs = [round(value, digits) for value in values]
    return {"median": round(statistics.median(values), digits), "min": min(runs), "max": max(runs), "runs": runs}


def busy_percent(who: str) -> float:
    """Return how busy the cores are before anything is timed here, in percent; says so where timings cannot be relied on."""
    busy = psutil.cpu_percent(interval=0.3)
    if busy > BUSY_PERCENT:
        say(f"{who}: other processes use {busy:.0f} % of the cores: the timings are not reliable")
    return busy


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the sorted values lie (nearest rank); 0.0 for none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


@dataclass
class Timed:
    """The repeats of one arm, in the order of the turns."""

    arm: Arm
    stats: list[DecodeStats]

    def row(self, base: Timed) -> dict[str, Any]:
        """Return the arm's row of bench.json; ratios are taken turn by turn against `base`, the arm without speculation."""
        itl = [1e3 * seconds for stats in self.stats for seconds in stats.token_seconds]
        accepted = _pooled(self.stats)
        pairs = list(zip(self.stats, base.stats, strict=True))
        drafted = self.arm.draft_tokens > 0
        return {
            "method": self.arm.method,
            "batch": self.arm.batch,
            "temperature": self.arm.temperature,
            "draft_tokens": self.arm.draft_tokens,
            "tokens_per_second": spread([s.tokens_per_second for s in self.stats], 2),
            "speedup": spread([s.tokens_per_second / b.tokens_per_second for s, b in pairs]) if drafted else None,
            "ttft_ms": spread([1e3 * s.ttft_seconds for s in self.stats], 2),
            "ttft_ratio": spread([s.ttft_seconds / b.ttft_seconds for s, b in pairs]) if drafted else None,
            "itl_ms": {
                "mean": round(statistics.fmean(itl), 3) if itl else 0.0,
                "p50": round(quantile(itl, 0.5), 3),
                "p95": round(quantile(itl, 0.95), 3),
            },
            "target_step_ms": spread([1e3 * s.target_step_seconds for s in self.stats], 3),
            "draft_step_ms": spread([1e3 * s.draft_step_seconds for s in self.stats], 3) if drafted else None,
            "acceptance_length": round(accepted.acceptance_length, 4) if drafted else None,
            "mean_draft_tokens": round(accepted.mean_draft_tokens, 3) if drafted else None,
            "lengths": {str(length): count for length, count in sorted(accepted.lengths.items())} if drafted else None,
            "chosen": [step.length for step in self.stats[-1].steps] if is_adaptive(self.arm.method) else None,
            "peak_logits_mib": round(max(s.peak_logits_bytes for s in self.stats) / 2**20, 3),
            "tokens": sum(s.tokens for s in self.stats),
        }


def _pooled(stats: Sequence[DecodeStats]) -> DecodeStats:
    """Add up the acceptance counters of several runs of one arm."""
    total = DecodeStats()
    for run in stats:
        total.rounds += run.rounds
        total.drafted += run.drafted
        total.accepted += run.accepted
        total.lengths += run.lengths
    return total


class Players(Protocol):
    """Who decodes for which arm (`eagle.bench.methods.Lab`)."""

    def engine(self, method: Method) -> Engine:
        """The engine of a method."""

    def policy(self, arm: Arm) -> int | LengthPolicy:
        """Its draft length, fixed or chosen each round."""

    def prepare(self, arm: Arm, work: Workload) -> None:
        """Measure what the arm needs to know before it starts."""


def race(
    players: Players,
    work: Workload,
    arms: list[Arm],
    *,
    max_new_tokens: int | Sequence[int],
    size: int,
    rounds: int,
    seed: int,
    done: Callable[[], None],
    began: Callable[[str], None] = lambda what: None,
) -> list[Timed]:
    """Time `arms` in turns, `rounds` times: A B C, B C A, ... In one turn all arms get the same prompts and budget.

    Stop tokens are ignored, so that every arm makes the same number of tokens: `max_new_tokens`, one number or one for each of
    the `size` prompts of a turn. `done` is called after each run, `began` before each, and before what prepares an arm, with
    what it is.
    """
    found = [Timed(arm, []) for arm in arms]
    short = min(8, max_new_tokens if isinstance(max_new_tokens, int) else max(max_new_tokens))
    for arm in arms:  # first calls allocate and, for a compiled draft, compile
        began(f"{arm.place}: {arm.name}, warm-up{' and costs' if is_adaptive(arm.method) else ''}")
        players.engine(arm.method).generate(
            work.window(0, arm.batch), max_new_tokens=short, draft_tokens=arm.draft_tokens, batch=arm.batch, ignore_eos=True
        )
        players.prepare(arm, work)
    for turn in range(rounds):
        prompts = work.window(turn, size)
        first = turn % len(arms)
        for timed in found[first:] + found[:first]:
            began(f"{timed.arm.place}: {timed.arm.name}, turn {turn + 1} of {rounds}")
            result = players.engine(timed.arm.method).generate(
                prompts,
                max_new_tokens=max_new_tokens,
                draft_tokens=players.policy(timed.arm),
                temperature=timed.arm.temperature,
                seed=seed + turn,
                ignore_eos=True,
                batch=timed.arm.batch,
            )
            timed.stats.append(result.stats)
            done()
    return found


def acceptance(
    engine: Engine, work: Workload, arm: Arm, *, max_new_tokens: int, seed: int, stop: AbstractSet[int],
    done: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Decode all prompts once, to their ends, and return what was accepted (vLLM's counters). `done`: see `Engine.generate`."""
    stats = engine.generate(
        work.prompts,
        max_new_tokens=max_new_tokens,
        draft_tokens=arm.draft_tokens,
        temperature=arm.temperature,
        seed=seed,
        stop=stop,
        batch=arm.batch,
        done=done,
    ).stats
    return {
        "method": arm.method,
        "temperature": arm.temperature,
        "draft_tokens": arm.draft_tokens,
        "acceptance_length": round(stats.acceptance_length, 4),
        "acceptance_by_position": [round(share, 4) for share in stats.acceptance_by_position],
        "drafts": stats.rounds,
        "draft_tokens_proposed": stats.drafted,
        "draft_tokens_accepted": stats.accepted,
        "tokens": stats.tokens,
    }


def cost_ratio(none: Timed, drafted: Timed) -> dict[str, Any]:
    """Return c, the time of a draft step over that of a target step without speculation, turn by turn."""
    pairs = list(zip(drafted.stats, none.stats, strict=True))
    ratios = [s.draft_step_seconds / b.target_step_seconds for s, b in pairs if s.draft_steps and b.target_steps]
    if not ratios:
        return {"batch": none.arm.batch, "draft_tokens": drafted.arm.draft_tokens, "median": None}
    return {"batch": none.arm.batch, "draft_tokens": drafted.arm.draft_tokens, **spread(ratios)}


def equality(
    players: Players, arms: Sequence[Arm], prompts: list[list[int]], *, max_new_tokens: int, stop: AbstractSet[int],
    done: Callable[[int], None] | None = None, began: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Compare each arm's greedy text to the target's own at batch 1.

    The players' target must be float32. A token is equal if it and all before it in its answer are; a first difference
    is reported with its position and the gap between the target's two highest logits there: only a gap at the level of
    rounding (about 1e-5 and below) may be one. `done`: see `Engine.generate`; `began` is called with what comes next.
    """
    plain = players.engine("none")
    began("the target's own text")
    base = plain.generate(prompts, max_new_tokens=max_new_tokens, draft_tokens=0, stop=stop, batch=1, done=done).tokens
    total = sum(len(tokens) for tokens in base)
    found: dict[str, Any] = {"prompts": len(prompts), "tokens": total, "runs": [], "mismatches": []}
    for arm in arms:
        began(f"batch {arm.batch}: {arm.name}")
        result = players.engine(arm.method).generate(
            prompts, max_new_tokens=max_new_tokens, draft_tokens=players.policy(arm), stop=stop, batch=arm.batch, done=done
        )
        equal = 0
        told = {"method": arm.method, "batch": arm.batch}
        for index, (wanted, got) in enumerate(zip(base, result.tokens, strict=True)):
            same = common_prefix(wanted, got)
            equal += same
            if same < max(len(wanted), len(got)):
                gap = logit_gap(plain.target, prompts[index] + wanted[:same])
                place = {**told, "prompt": index, "position": same, "logit_gap": gap}
                found["mismatches"].append({**place, "wanted": wanted[same : same + 1], "got": got[same : same + 1]})
        counted = {"equal_tokens": equal / total, "acceptance_length": round(result.stats.acceptance_length, 4)}
        found["runs"].append({**told, "draft_tokens": arm.draft_tokens, **counted})
    found["equal_tokens"] = min(run["equal_tokens"] for run in found["runs"])
    return found


def common_prefix(one: list[int], other: list[int]) -> int:
    """Return how many leading tokens two lists share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@torch.inference_mode()
def logit_gap(target: PreTrainedModel, tokens: list[int]) -> float:
    """Return the difference between the target's two highest logits after `tokens`."""
    logits = target(torch.tensor([tokens], device=target.device), logits_to_keep=1).logits[0, -1].float()
    top = logits.topk(2).values
    return float(top[0] - top[1])


def memory(engine: Engine) -> dict[str, Any]:
    """Return the bytes of weights and KV cache of target and draft as the engine holds them, and their ratio.

    The embedding that the draft shares with the target counts as the target's. `target_held_bytes` has second copies of
    weights too (a head tied to the embedding, laid out for CPU); the ratio does not.
    """
    drafter = engine.drafter
    if drafter is None:
        raise ValueError("an engine without a draft has no overhead")
    weights, kv = weight_bytes(engine.target), engine.store.bytes
    return {
        "target_weights_bytes": weights,
        "target_held_bytes": weight_bytes(engine.target, held=True),
        "target_kv_bytes": kv,
        "draft_weights_bytes": drafter.weight_bytes,
        "draft_kv_bytes": drafter.state_bytes,
        "batch": engine.batch,
        "max_length": engine.store.max_length,
        "overhead": round((drafter.weight_bytes + drafter.state_bytes) / (weights + kv), 4),
    }


def recommend(rows: list[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """Return, per batch size, the fixed draft length of the Eagle 3.1 chain with the highest median speed-up.

    It is what vLLM can be started with; 0 where none is above 1. `sure` says whether it won every single turn.
    """
    found = []
    for batch in sorted({row["batch"] for row in rows}):
        at = [r for r in rows if r["batch"] == batch and r["temperature"] == temperature]
        drafted = [r for r in at if r["method"] == "eagle31"]
        if not drafted:
            continue
        best = max(drafted, key=lambda row: row["speedup"]["median"])
        gain = best["speedup"]
        if gain["median"] > 1.0:
            found.append(
                {"batch": batch, "draft_tokens": best["draft_tokens"], "speedup": gain["median"], "sure": gain["min"] > 1.0}
            )
        else:
            found.append(
                {"batch": batch, "draft_tokens": 0, "speedup": 1.0, "sure": all(r["speedup"]["max"] < 1.0 for r in drafted)}
            )
    return found
