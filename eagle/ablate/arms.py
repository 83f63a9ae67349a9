"""The arms of `eagle ablate`: what each row of the table trains, and from which draft it starts.

Every arm is stage 1 and then one more phase of `ablate.minutes`; only `stage1` ends with stage 1. So all rows but that one
spend the same training time, and an arm differs from `continued` in one thing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from eagle.config import Config
from eagle.errors import ConfigError, closest

REFERENCE = "continued"
_STEPS = 200_000  # of the second phase: more than its minutes allow, so that they end it
_NEVER = 10**9
_T0 = {"temperatures": [{"temperature": 0.0, "weight": 1.0}]}
GREEDY = {"method": "exact", **_T0}
ANSWERS = {"method": "exact", "path": "answers"}
Changes = dict[str, dict[str, Any]]  # section -> key -> value


@dataclass(frozen=True)
class Arm:
    """One row. `phase`: how it is trained; `base`: the arm whose draft it starts from (None: from scratch)."""

    name: str
    title: str
    phase: Literal["scratch", "distill", "policy"]
    base: str | None = "stage1"
    changes: Changes = field(default_factory=dict)


def _shapes(name: str, title: str, draft: dict[str, Any]) -> list[Arm]:
    """A draft of another shape: its own stage 1, then the reference's second phase."""
    own = f"{name}-stage1"
    return [
        Arm(own, f"{title}: stage 1 alone", "scratch", None, {"draft": draft}),
        Arm(name, title, "distill", own, {"draft": draft}),
    ]


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("stage1", "stage 1 alone", "scratch", None),
        Arm(REFERENCE, "stage 1 continued for the same time", "distill"),
        Arm("exact", "stage 2, exact gradient", "policy", changes={"policy": {"method": "exact"}}),
        Arm("greedy", "stage 2, exact gradient along the greedy path only", "policy", changes={"policy": GREEDY}),
        Arm("answers", "stage 2, exact gradient along the target's own answers", "policy", changes={"policy": ANSWERS}),
        Arm(
            "greedy-answers", "stage 2, exact gradient along the target's greedy answers only", "policy",
            changes={"policy": {**ANSWERS, **_T0}},
        ),
        Arm("group", "stage 2, group (REINFORCE)", "policy", changes={"policy": {"method": "group"}}),
        Arm("naive", "stage 2, naive accept-bit reward (ablation)", "policy", changes={"policy": {"method": "naive"}}),
        Arm("lk", "stage 1 continued with LK's hybrid loss", "distill", changes={"distill": {"objective": "lk_hybrid"}}),
        *_shapes("eagle30", "Eagle 3.0: without fc_norm and norm_output", {"fc_norm": False, "norm_output": False}),
        *_shapes("depth1", "1 layer", {"layers": 1}),
        *_shapes("depth2", "2 layers", {"layers": 2}),
        *_shapes("depth4", "4 layers", {"layers": 4}),
    )
}
DEFAULT = [name for name in ARMS if not name.endswith("-stage1")]


def parse_arms(names: Iterable[str]) -> list[Arm]:
    """Return the arms of these names, each once. ConfigError names the closest one for a name that is none."""
    found = {}
    for name in (part.strip() for part in names):
        if name not in ARMS:
            raise ConfigError(f"--arms: no arm '{name}'{closest(name, ARMS)}; arms: {', '.join(ARMS)}")
        found[name] = ARMS[name]
    return list(found.values())


def arm_config(arm: Arm, config: Config, seed: int) -> Config:
    """Return the configuration that `arm` trains with: the arm's changes, the seed, and the second phase's budget and rate.

    The second phase has no validation before its end: its last weights are what is measured, chosen by no arm's own score.
    """
    content = config.model_dump(by_alias=True)
    content["runtime"]["seed"] = seed
    second: Changes = {}
    shared = {"learning_rate": config.ablate.learning_rate, "max_minutes": config.ablate.minutes, "eval_every": _NEVER}
    if arm.phase == "distill":
        depth = config.distill.stages[-1].depth
        second = {"distill": {**shared, "stages": [{"depth": depth, "steps": _STEPS}], "warmup_steps": config.policy.warmup_steps}}
    elif arm.phase == "policy":
        second = {"policy": {**shared, "steps": _STEPS, "draft_tokens": config.ablate.draft_tokens}}
    for changes in (second, arm.changes):
        for section, keys in changes.items():
            content[section] |= keys
    return Config.model_validate(content)


def same_as_reference(arm: Arm, config: Config) -> bool:
    """Whether `arm` would train what the reference trains, e.g. depth4 where draft.layers is 4 already."""
    return arm.phase == "distill" and arm_config(arm, config, 0) == arm_config(ARMS[REFERENCE], config, 0)


def needed(arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms with the bases they start from, every base before what needs it."""
    order: dict[str, Arm] = {}
    for arm in arms:
        if arm.base:
            order.setdefault(arm.base, ARMS[arm.base])
        order.setdefault(arm.name, arm)
    return list(order.values())
