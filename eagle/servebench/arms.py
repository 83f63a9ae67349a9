"""What is compared through the server: one way to speculate each, as vLLM is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from eagle.bundle.record import BundleRecord
from eagle.errors import ConfigError, closest
from eagle.serve.launch import Wanted
from eagle.serve.plan import Speculation, controlled

ServedMethod = Literal["none", "ngram", "eagle31", "eagle31-schedule", "eagle31-pid"]
METHODS: tuple[ServedMethod, ...] = get_args(ServedMethod)
LABELS: dict[ServedMethod, str] = {
    "none": "none",
    "ngram": "n-gram (vLLM's)",
    "eagle31": "Eagle 3.1",
    "eagle31-schedule": "Eagle 3.1, K by batch",
    "eagle31-pid": "Eagle 3.1 + PID",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def parse_methods(names: str) -> list[ServedMethod]:
    """Return the methods named, each once, `none` first. ConfigError names the closest one for a name that is none."""
    found: list[ServedMethod] = ["none"]
    for name in filter(None, (part.strip() for part in names.split(","))):
        known = next((method for method in METHODS if method == name), None)
        if known is None:
            raise ConfigError(
                f"--methods: vLLM is not measured with '{name}'{closest(name, METHODS)}; methods: {', '.join(METHODS)}"
            )
        if known not in found:
            found.append(known)
    return found


def wanted_for(method: ServedMethod, wanted: Wanted, record: BundleRecord, port: int) -> Wanted:
    """Return what to serve for `method` on `port`, everything else as in `wanted`.

    What the bundle's own measurement says of speculation is not heeded: it is measured here.
    """
    config = wanted.config.model_copy(update={"serve": wanted.config.serve.model_copy(update={"port": port})})
    return replace(wanted, config=config, speculation=_speculation(method, wanted, record))


def _speculation(method: ServedMethod, wanted: Wanted, record: BundleRecord) -> Speculation:
    if method == "none":
        return Speculation("off", None)
    if method == "ngram":
        return Speculation("fixed", dict(NGRAM))
    control: Literal["fixed", "schedule", "pid"] = (
        "pid" if method == "eagle31-pid" else "schedule" if method == "eagle31-schedule" else "fixed"
    )
    return controlled(control, wanted.bundle, record, wanted.config, wanted.build.version, cpu=wanted.build.cpu)


def can_be_served(methods: Sequence[ServedMethod], record: BundleRecord) -> list[ServedMethod]:
    """Return the methods without the schedule where the bundle holds no measured draft lengths to make one of."""
    drafted = any(row.draft_tokens for row in record.recommended)
    return [method for method in methods if drafted or method != "eagle31-schedule"]


def describe(method: ServedMethod, speculation: Speculation) -> str:
    """Return the row's name, e.g. 'Eagle 3.1, K=3'."""
    told = speculation.config
    if told is None:
        return LABELS[method]
    size = told["num_speculative_tokens"]
    if method == "eagle31-schedule":
        return LABELS[method]
    return f"{LABELS[method]}, K{'<' if method == 'eagle31-pid' else ''}={size}"
