"""Replay: training rows of a former run's data set mixed into a new one, so that a continued draft does not forget them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.config import Config
from eagle.dataset.prompts import hash_fraction
from eagle.dataset.read import Row, iter_rows
from eagle.errors import ConfigError, DataError

PREFIX = "replay:"
_BITS = 16  # hexadecimal digits of a row's id that decide its split, as `hash_fraction` does


@dataclass(frozen=True)
class Replay:
    """The rows to mix in, and what dataset.json says of them (None without replay)."""

    rows: list[Row]
    about: dict[str, Any] | None


def replay_rows(
    config: Config, root: Path, own: Path, fingerprint: str, train: Sequence[Row], heldout: Sequence[Row]
) -> Replay:
    """Return training rows of `dataset.replay_from` so that they are `dataset.replay_fraction` of all training rows.

    `own`: the folder that this step will write; `fingerprint`: the target's; `train`, `heldout`: the new rows. Rows
    whose prompt is among these, or belongs to the held-out side by its hash, are left out. Which of the others are
    taken depends on their ids and the seed; fewer come back when there are fewer.
    Raises ConfigError when `replay_from` is this run's own folder or holds answers of another target, DataError when it
    is no finished data set.
    """
    section = config.dataset
    if section.replay_from is None or section.replay_fraction == 0.0:
        return Replay([], None)
    folder = root / section.replay_from
    if folder.resolve() == own.resolve():
        raise ConfigError(f"dataset.replay_from: {section.replay_from} is the folder that this run writes; name another run's")
    found = manifest.read_manifest(folder)
    if found is None:
        raise DataError(
            f"dataset.replay_from: no finished data set in {folder}; give a run's dataset folder, like runs/default/dataset"
        )
    if found["parts"].get("extra", {}).get("target") != fingerprint:
        raise ConfigError(
            f"dataset.replay_from: the answers in {section.replay_from} are another target's; name a run of this target, or null"
        )
    taken = {row.id for row in (*train, *heldout)}
    offered = [row for row in iter_rows(folder, "train") if row.id not in taken and not _held_out(row, section.heldout_fraction)]
    wanted = round(section.replay_fraction / (1.0 - section.replay_fraction) * len(train))
    ranked = sorted(offered, key=lambda row: (hash_fraction(f"replay\0{config.runtime.seed}\0{row.id}"), row.id))
    rows = [replace(row, source=PREFIX + row.source.removeprefix(PREFIX)) for row in ranked[:wanted]]
    about = {"content_hash": found["content_hash"], "offered": len(offered), "rows": len(rows)}
    return Replay(rows, about)


def _held_out(row: Row, fraction: float) -> bool:
    """Whether the row's prompt belongs to the held-out side: its id is the sha256 that `hash_fraction` reads."""
    return (int(row.id[:_BITS], 16) >> 11) / 2**53 < fraction
