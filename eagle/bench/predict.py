"""Speed predicted from measured costs and acceptance: expected tokens of a round over its seconds (arXiv 2211.17192).

speed-up(K) = (1 + S_1 + .. + S_K) * T(1) / (T(K + 1) + D(K)), with S_k the share of drafts whose first k tokens are all
accepted, T(w) a target pass over w tokens of each row and D(K) drafting K tokens. Prefill and stops are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle.decode.cost import CostTable


def survival_to(by_position: Sequence[float], length: int) -> list[float]:
    """Return S_1 .. S_length: as measured, beyond that with the last measured conditional acceptance.

    `by_position`: cumulative shares, one at least (`acceptance_by_position`). Raises ValueError when it is empty.
    """
    if not by_position:
        raise ValueError("acceptance by position is empty")
    found = list(by_position[:length])
    before = by_position[-2] if len(by_position) > 1 else 1.0
    rate = by_position[-1] / before if before > 0 else 0.0
    while len(found) < length:
        found.append(found[-1] * rate)
    return found


def speedup(costs: CostTable, survival: Sequence[float], batch: int, length: int) -> float:
    """Return the predicted tokens/s with `length` draft tokens over those without, at `batch` rows."""
    expected = 1.0 + sum(survival[:length])
    return expected * costs.target_seconds(batch, 1) / costs.round_seconds(batch, length)


def tuned_costs(tuned: dict[str, Any], dtype: str) -> CostTable | None:
    """Return the costs that the tune step measured with the settings it chose, or None when it has none in `dtype`.

    Its times hold for short contexts; drafting is taken as proportional to the number of tokens.
    """
    chosen = {name: tuned.get(name) for name in ("threads", "dtype", "draft_step")}
    seconds = {
        (row["what"], row["batch"]): row["median_ms"] / 1e3
        for row in tuned.get("rows", [])
        if all(row.get(name) == value for name, value in chosen.items())
    }
    length = tuned.get("draft_tokens")
    whole = {"target_step", "verify", "draft_step"}
    batches = [b for b in {batch for _, batch in seconds} if all((what, b) in seconds for what in whole)]
    if tuned.get("dtype") != dtype or not length or not batches:
        return None
    target = {(b, 1): seconds["target_step", b] for b in batches} | {(b, length + 1): seconds["verify", b] for b in batches}
    draft = {(b, k): k * seconds["draft_step", b] for b in batches for k in {1, length}}
    return CostTable(target, draft)


def add_predictions(rows: list[dict[str, Any]], acceptance: list[dict[str, Any]], costs: CostTable | None) -> None:
    """Give every row `predicted_speedup`: of Eagle 3.1 chains within the measured batch sizes a number, else None.

    `rows` and `acceptance` are those of bench.json. Costs of the tune step and acceptance over whole answers know nothing
    of the timed runs, so the numbers are a prediction of these.
    """
    known = {(a["temperature"], a["draft_tokens"]): a["acceptance_by_position"] for a in acceptance if a["method"] == "eagle31"}
    batches = {batch for batch, _ in costs.target} if costs else set()
    for row in rows:
        row["predicted_speedup"] = None
        by_position = known.get((row["temperature"], row["draft_tokens"]))
        if row["method"] != "eagle31" or not by_position or costs is None or not min(batches) <= row["batch"] <= max(batches):
            continue
        survival = survival_to(by_position, row["draft_tokens"])
        row["predicted_speedup"] = round(speedup(costs, survival, row["batch"], row["draft_tokens"]), 4)
