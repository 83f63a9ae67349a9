"""The table of `eagle ablate`: ablate.json, and the same as Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.ablate.arms import REFERENCE, Arm
from eagle.ablate.statistics import Estimate, estimate, paired
from eagle.config import Config

JSON, MARKDOWN = "ablate.json", "ablate.md"
MEASURES = {
    "expected_accepted_t1": "accepted, T=1",
    "accepted_t0": "accepted, T=0",
    "vllm_accepted_t0": "accepted in vLLM, T=0",
}


@dataclass(frozen=True)
class Result:
    """What an arm trained and measured with one seed; `measured` has some of MEASURES."""

    trained: Mapping[str, Any]
    measured: Mapping[str, Any]


Results = Mapping[str, Mapping[int, Result]]  # arm -> seed -> result


def _threads(config: Config) -> int:
    from eagle.target.load import available_cores  # imports torch: only when there is something to say

    return config.runtime.threads or available_cores()


def build(
    arms: Sequence[Arm], results: Results, commands: Mapping[str, str], config: Config, *, given: bool = False
) -> dict[str, Any]:
    """Return the report as JSON: one row per arm that has a result, machine, versions and budgets.

    `given`: stage 1 was not trained here, every arm and seed goes on from the same draft.
    """
    rows = [_row(arm, results, commands[arm.name]) for arm in arms if results.get(arm.name)]
    distill, about = config.distill, config.ablate
    return {
        "reference": REFERENCE,
        "rows": rows,
        "budget": {
            "stage_1_minutes": None if given else distill.max_minutes, "second_phase_minutes": about.minutes,
            "learning_rate": about.learning_rate, "threads": _threads(config),
        },
        "draft_tokens": about.draft_tokens,
        "temperatures": [share.model_dump() for share in config.policy.temperatures],
        "machine": {
            "platform": platform.platform(), "processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(),
        },
        "versions": manifest.versions(),
    }


def _row(arm: Arm, results: Results, command: str) -> dict[str, Any]:
    mine = results[arm.name]
    row: dict[str, Any] = {
        "arm": arm.name, "title": arm.title, "command": command, "seeds": sorted(mine),
        "steps": [mine[seed].trained["steps"] for seed in sorted(mine)],
        "seconds": [mine[seed].trained.get("seconds") for seed in sorted(mine)],
    }
    for name in MEASURES:
        values = _values(mine, name)
        if not values:
            continue
        against = paired(values, _values(results.get(REFERENCE, {}), name)) if arm.name != REFERENCE else None
        row[name] = {
            "by_seed": {str(seed): value for seed, value in values.items()}, **estimate(list(values.values())).as_json(),
            "difference": against.as_json() if against else None,
        }
    return row


def _values(results: Mapping[int, Result], name: str) -> dict[int, float]:
    return {seed: float(results[seed].measured[name]) for seed in sorted(results) if name in results[seed].measured}


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table with one line per arm, and the commands below it."""
    measures = [name for name in MEASURES if any(name in row for row in report["rows"])]
    heads = ["arm", "what", "seeds", "steps"]
    for name in measures:
        heads += [MEASURES[name], f"difference to {report['reference']}"]
    lines = ["# Ablation", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    means = {name: _mean_of_reference(report, name) for name in measures}
    for row in report["rows"]:
        cells = [row["arm"], row["title"], str(len(row["seeds"])), str(round(sum(row["steps"]) / len(row["steps"])))]
        for name in measures:
            found = row.get(name)
            cells += [_shown(found) if found else "", _difference(found, means[name]) if found else ""]
        lines.append("| " + " | ".join(cells) + " |")
    budget = report["budget"]
    lines += [
        "",
        f"Accepted draft tokens a round on held-out rounds, K = {report['draft_tokens']}, bonus token not counted: mean over seeds "
        "[95 % interval, Student's t]. Differences are paired by seed.",
        "T=1: exact overlaps on the draft's own prefixes. T=0: replay of greedy decoding.",
        f"Training: {_stage_1(budget['stage_1_minutes'])}, then {budget['second_phase_minutes']:g} min for every "
        f"arm but stage 1 alone; threads {budget['threads']}, peak rate {budget['learning_rate']:g}, last weights.",
        f"Machine: {report['machine']['platform']}, {report['machine']['processor']}, {report['machine']['cpus']} CPUs. "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "",
        "Each row again:",
        "",
        *(f"- {row['arm']}: `{row['command']}`" for row in report["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _stage_1(minutes: float | None) -> str:
    return "one given stage 1, the same for all seeds" if minutes is None else f"stage 1 at most {minutes:g} min"


def _mean_of_reference(report: dict[str, Any], name: str) -> float:
    return next((row[name]["mean"] for row in report["rows"] if row["arm"] == report["reference"] and name in row), 0.0)


def _shown(found: dict[str, Any]) -> str:
    interval = "" if found["low"] is None else f" [{found['low']:.3f}, {found['high']:.3f}]"
    return f"{found['mean']:.3f}{interval}"


def _difference(found: dict[str, Any], reference: float) -> str:
    if found["difference"] is None:
        return ""
    against = Estimate(**found["difference"])
    interval = "" if against.low is None else f" [{against.low:+.3f}, {against.high:+.3f}]"
    share = f" ({100 * against.mean / reference:+.1f} %)" if reference > 0 else ""
    return f"{against.mean:+.3f}{interval}{share}"


def write(folder: Path, report: dict[str, Any]) -> str:
    """Write both files into `folder`; return the Markdown."""
    text = markdown(report)
    manifest.write_json(folder / JSON, report)
    manifest.write_text(folder / MARKDOWN, text)
    return text
