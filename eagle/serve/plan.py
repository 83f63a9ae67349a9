"""How a bundle is to be served: which draft length, who sets it, and what vLLM is told. Pure; nothing is started here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle.bundle.record import BundleRecord, Recommended
from eagle.config import Config
from eagle.serve.command import speculative_config
from eagle.serve.plugin.settings import TESTED, PidSettings

Control = Literal["pid", "schedule", "fixed", "off"]
PLUGIN = "eagle.serve.plugin.scheduler"


@dataclass(frozen=True)
class Speculation:
    """What the server is told of speculation.

    `config`: vLLM's speculative_config, None = no speculation. `scheduler`: the class for --scheduler-cls, with
    `settings`, or None. `notes`: lines for the person who starts it.
    """

    control: Control
    config: dict[str, Any] | None
    scheduler: str | None = None
    settings: PidSettings | None = None
    notes: tuple[str, ...] = ()


def plan_speculation(
    bundle: Path, record: BundleRecord, config: Config, version: str, *, cpu: bool, draft_tokens: int | None = None
) -> Speculation:
    """Decide how to serve `bundle` on vLLM `version`.

    `draft_tokens`: a draft length that was asked for (0 = none): it is served fixed, whatever was measured. Otherwise
    `serve.control` decides; where the measurement recommends no speculation at any batch size, there is none. The
    controller is only used with versions it was run with; else vLLM gets the measured schedule, or the fixed length.
    """
    if draft_tokens is not None:
        return _fixed(bundle, draft_tokens, config, ()) if draft_tokens else Speculation("off", None)
    if record.off:
        note = "speculation was measured and is slower at every batch size: served without it (--draft-tokens 3 insists)"
        return Speculation("off", None, notes=(note,))
    return controlled(config.serve.control, bundle, record, config, version, cpu=cpu)


def controlled(
    control: Control, bundle: Path, record: BundleRecord, config: Config, version: str, *, cpu: bool
) -> Speculation:
    """Return how `control` serves the bundle, whether or not speculation pays; falls back, with a note, where it cannot."""
    notes: tuple[str, ...] = ()
    if control == "pid" and ".".join(version.split(".")[:2]) not in TESTED:
        known = ", ".join(f"{name}.x" for name in TESTED)
        notes = (f"warning: the controller is not tested on vLLM {version} (known: {known}): vLLM's own draft length is used",)
        control = "schedule" if record.recommended else "fixed"
    if control == "schedule" and not record.recommended:
        notes += ("the bundle holds no measured draft lengths: served with a fixed one",)
        control = "fixed"
    if control == "pid":
        return _pid(bundle, record, config, cpu)
    if control == "schedule":
        ranges = schedule(record.recommended)
        base = _told(bundle, max(row.draft_tokens for row in record.recommended), config)
        return Speculation("schedule", {**base, "num_speculative_tokens_per_batch_size": ranges}, notes=notes)
    return _fixed(bundle, _smallest_batch(record) or config.bundle.draft_tokens, config, notes)


def schedule(recommended: Sequence[Recommended]) -> list[list[int]]:
    """Return vLLM's `num_speculative_tokens_per_batch_size`: [first batch, last batch, K], both inclusive, from 1 on.

    A batch between two measured ones takes the length of the larger: more load pays for fewer drafts. Beyond the largest
    vLLM keeps the last length.
    """
    ranges, first = [], 1
    for row in sorted(recommended, key=lambda row: row.batch):
        ranges.append([first, row.batch, row.draft_tokens])
        first = row.batch + 1
    return ranges


def _fixed(bundle: Path, length: int, config: Config, notes: tuple[str, ...]) -> Speculation:
    return Speculation("fixed", _told(bundle, length, config), notes=notes)


def _told(bundle: Path, length: int, config: Config) -> dict[str, Any]:
    """Return vLLM's speculative_config. What is its default is left out: an older vLLM refuses a key that it does not know."""
    sampling = config.serve.draft_sampling
    return {**speculative_config(bundle, length), **({} if sampling == "greedy" else {"draft_sample_method": sampling})}


def _smallest_batch(record: BundleRecord) -> int:
    return next((row.draft_tokens for row in sorted(record.recommended, key=lambda row: row.batch) if row.draft_tokens), 0)


def _pid(bundle: Path, record: BundleRecord, config: Config, cpu: bool) -> Speculation:
    longest = config.serve.max_draft_tokens
    settings = PidSettings(max_tokens=longest, control=config.control.model_dump(), costs=record.costs)
    # The schedule makes vLLM prepare for lengths that change (CUDA graphs); should the controller refuse, it is the fixed length.
    fallback = schedule(record.recommended) or [[1, config.vllm.max_num_seqs, min(config.bundle.draft_tokens, longest)]]
    told = {**_told(bundle, longest, config), "num_speculative_tokens_per_batch_size": fallback}
    return Speculation("pid", told, f"{PLUGIN}.{'PidScheduler' if cpu else 'AsyncPidScheduler'}", settings)
