"""Figures F2.1 to F2.3: what stage 2 is worth against stage 1 continued for the same time, from one `eagle ablate`.

The run is the one that `benchmarks/decoding_run.py` finds (FIGURES_RUN, FIGURES_PROFILE); every arm and seed goes on from its
distilled draft, trained to the end of its budget, for MINUTES. The exact gradient is measured in both its forms: along drafts that
the target judges (`exact`, `greedy`) and along the target's own answers (`answers`, `greedy-answers`), which the figures name;
rollouts at T=1, those of the greedy arms at T=0. What is in the output folder already is not trained again. The whole table is
benchmarks/results/ablate.md and ablate.json.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.decoding_run import find_run
from benchmarks.figures import RESULTS, ROOT, Figure, Measured
from eagle import manifest
from eagle.ablate import report
from eagle.ablate.arms import parse_arms
from eagle.ablate.run import Ablation, ablate
from eagle.config import Config

MINUTES, SEEDS = 2.0, [0, 1, 2]
SEQUENCES = 8  # a step of stage 2: few large steps in MINUTES move the draft less
ARMS = ("stage1", "continued", "answers", "exact", "naive", "greedy-answers", "greedy")
T1, T0 = "expected_accepted_t1", "accepted_t0"


def settings(config: Config) -> Config:
    """Return the run's configuration with the ablation's budget: minutes, seeds, rollouts at T=1."""
    content = config.model_dump(by_alias=True)
    content["policy"] |= {"temperatures": [{"temperature": 1.0, "weight": 1.0}], "sequences_per_step": SEQUENCES}
    content["ablate"] |= {"minutes": MINUTES, "seeds": SEEDS}
    return Config.model_validate(content)


@cache
def _measured() -> tuple[dict[str, Any], str]:
    """Run the ablation and keep its table under benchmarks/results; returns ablate.json and the run's profile."""
    run = find_run()
    out = ROOT / "build" / "figures-ablate" / run.profile
    said = (
        "eagle", "--profile", run.profile, *(word for item in run.overrides for word in ("--set", item)),
        "--set", "policy.temperatures=[{temperature: 1.0, weight: 1.0}]",
        "--set", f"policy.sequences_per_step={SEQUENCES}",
    )  # fmt: skip
    ablate(Ablation(settings(run.config), run.root, run.base, out, said, start=run.base / "distill"), parse_arms(ARMS))
    result = manifest.read_json(out / report.JSON)
    for row in result["rows"]:  # the commands name no folder of this machine
        row["command"] = row["command"].replace(str(run.base), "RUN").replace(str(out), "RUN/ablate")
    RESULTS.mkdir(parents=True, exist_ok=True)
    report.write(RESULTS, result)
    return result, run.profile


def gain(result: dict[str, Any], arm: str, measure: str) -> tuple[float, float, float]:
    """Return (percent, low, high) by which `arm` accepts more than the reference: mean over seeds, 95 % interval."""
    rows = {row["arm"]: row for row in result["rows"]}
    base, found = rows[result["reference"]][measure]["mean"], rows[arm][measure]["difference"]
    return 100 * found["mean"] / base, 100 * found["low"] / base, 100 * found["high"] / base


def _gain_of(arm: str, measure: str) -> Measured:
    result, profile = _measured()
    percent, low, high = gain(result, arm, measure)
    why = f"95 % interval {low:+.1f} to {high:+.1f} %, {len(SEEDS)} seeds; the whole table: benchmarks/results/ablate.md"
    return Measured(round(percent, 2), result["rows"], why, broken=low <= 0.0, profile=profile)


def naive_share() -> Measured:
    """The naive reward's gain over that of the exact gradient. No value where the exact one gains nothing."""
    result, profile = _measured()
    naive, exact = gain(result, "naive", T1), gain(result, "answers", T1)
    why = f"naive {naive[0]:+.1f} % [{naive[1]:+.1f}, {naive[2]:+.1f}], exact {exact[0]:+.1f} % [{exact[1]:+.1f}, {exact[2]:+.1f}]"
    value = round(naive[0] / exact[0], 3) if exact[0] > 0 else None
    return Measured(value, result["rows"], why, profile=profile)


FIGURES = (
    Figure(
        "F2.1", "accepted tokens a round, stage 2 exact against stage 1 continued, T=1, K=4", "%", ">=", 8.0,
        lambda: _gain_of("answers", T1),
    ),
    Figure(
        "F2.2", "the same at T=0, greedy-path form", "%", ">=", 3.0, lambda: _gain_of("greedy-answers", T0),
    ),
    Figure("F2.3", "gain of the naive accept-bit reward at T=1, of the exact gradient's", "x", "<=", 0.5, naive_share),
)  # fmt: skip
