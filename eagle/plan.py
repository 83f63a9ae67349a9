"""What a run would do: steps, what is up to date and why not, disk and time. No side effects.

Time comes from, in this order: the last measured run of that step in the same folder (its provenance), the
step's own minute budget (an upper bound). Where neither is there, the plan says "not measured yet".
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.config import Config
from eagle.errors import ConfigError
from eagle.steps import STEPS, Step, status
from eagle.target.resolve import local_target

BYTES_PER_TOKEN_ON_DISK = 8  # int32 id + int8 mask + Parquet overhead, compressed


@dataclass(frozen=True)
class PlanRow:
    """One step of the plan; `time` and `disk` are text for people."""

    step: str
    up_to_date: bool
    reason: str
    time: str
    disk: str


@dataclass(frozen=True)
class Plan:
    """The rows in order, and notes on disk and target."""

    rows: list[PlanRow]
    notes: list[str]


def make_plan(config: Config, root: Path, base: Path) -> Plan:
    """Return the plan for the steps' folders under `base`. Reads manifests and the target's config.json only."""
    rows: list[PlanRow] = []
    stale: set[str] = set()
    dims = _dims(config, root)
    disk = _disk(config, dims)
    for step in STEPS.values():
        now = status(step, config, root, base)
        upstream = next((name for name in step.inputs if name in stale), None)
        reason = f"input {upstream} runs first" if now.up_to_date and upstream else now.reason
        fresh = now.up_to_date and upstream is None
        if not fresh:
            stale.add(step.name)
        rows.append(PlanRow(step.name, fresh, reason, "-" if fresh else _time(step, config, base), _size(disk.get(step.name))))
    free = shutil.disk_usage(_existing(base)).free
    total = sum(v for v in disk.values() if v) if dims else None
    notes = [f"target: {config.target.model}" + ("" if dims else " (not on this disk yet: its sizes are unknown, so disk is too)")]
    notes.append(f"disk: needs about {_size(total)}, {_size(free)} free, refuses to start below {config.flow.min_free_gib:g} GiB")
    return Plan(rows, notes)


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _dims(config: Config, root: Path) -> dict[str, Any] | None:
    folder = local_target(config.target, root, root / config.paths.cache)
    if folder is None:
        return None
    try:
        content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"target.model: {folder / 'config.json'} cannot be read: {error}") from None
    text: dict[str, Any] = content.get("text_config") or content  # multi-modal targets keep the decoder's numbers there
    return (
        text
        if {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"} <= set(text)
        else None
    )


def _time(step: Step, config: Config, base: Path) -> str:
    try:
        measured = manifest.read_json(base / f"{step.name}.provenance.json")["seconds"]
    except (OSError, ValueError, KeyError):
        measured = None
    if measured is not None:
        return f"{measured / 60:.1f} min last time"
    budget = getattr(getattr(config, step.name, None), "max_minutes", None)
    return f"<= {budget:g} min (budget) + set-up" if budget else "not measured yet"


def _disk(config: Config, dims: dict[str, Any] | None) -> dict[str, float]:
    prompts = (
        config.dataset.shipped_prompts
        + config.dataset.self_prompts
        + config.dataset.file_prompts * len(config.dataset.prompt_files)
    )
    tokens = prompts * (config.dataset.max_new_tokens + config.dataset.self_prompt_tokens)
    need: dict[str, float] = {"dataset": float(tokens * BYTES_PER_TOKEN_ON_DISK)}
    if dims is None:
        return need
    width, layers, draft = dims["hidden_size"], dims["num_hidden_layers"], config.draft
    aux = len(config.target.aux_layers or {min(2, layers), layers // 2, max(layers - 3, 0)})
    hidden, inter = draft.hidden_size or width, draft.intermediate_size or 2 * dims["intermediate_size"] // 3
    head_dim = draft.head_dim or dims.get("head_dim") or width // dims["num_attention_heads"]
    attention = hidden * head_dim * (2 * draft.heads + 2 * draft.kv_heads)
    parameters = (
        aux * width * hidden + draft.layers * (attention + 3 * hidden * inter) + hidden * (draft.vocab_size or dims["vocab_size"])
    )
    features = tokens * (aux * width * 2 + config.distill.top_k * 6)
    weights = 4.0 * parameters
    return need | {"distill": features + 4 * weights, "policy": 4 * weights, "bundle": weights, "register": weights}


def _size(count: float | None) -> str:
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit in ("B", "KiB") else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
