"""`eagle bench --suite robustness`: acceptance length where the traffic differs from what the draft was trained on.

Greedy decoding, acceptance only: nothing is timed. Output under RUN/bench-robustness/: robustness.json, robustness.md and
suite.json. The loss of a condition is 1 - its acceptance length (bonus token included) over that of its baseline, with a
95 % bootstrap interval over prompts; in pairs where both sides have the same prompts.

robustness.json: `drafts` {name: settings of the draft}, `conditions`: group, name, against, paired, skipped (null or why),
prompts, mean_prompt_tokens, `measured` {name of draft: acceptance_length, acceptance_by_position (cumulative), rounds, loss
{value, low, high} or null}, `compared` (with a second draft: how much less that one accepts here); `worst` by group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle import manifest
from eagle.bench.bootstrap import Counts, relative_loss
from eagle.bench.compare import check_sources, find_sources
from eagle.bench.conditions import Condition, Room, make_conditions
from eagle.bench.outputs import ABOUT, replacing, result_folder
from eagle.bench.robustness_report import render
from eagle.bench.session import read_tuned, timed_dtype
from eagle.config import Config, DType
from eagle.decode.engine import Engine
from eagle.draft.io import load_draft
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from eagle.errors import ConfigError
from eagle.progress import Track, say
from eagle.target.load import ensure_target, load_target, load_tokenizer, pick_device, setup_torch, target_dims

ROBUSTNESS = "robustness"
BATCH = 8  # prompts decoded at once, fewer where they are long
BATCH_TOKENS = 8192
OWN, OTHER = "run", "compared"


@dataclass(frozen=True)
class Subjects:
    """The target and the drafts that are measured, by name: the run's own, and the one it is compared with."""

    target: PreTrainedModel
    drafts: dict[str, DraftModel]
    draft_tokens: int
    max_new_tokens: int
    stop: frozenset[int]

    def count(self, name: str, prompts: list[list[int]], done: Callable[[int], None] | None = None) -> Counts:
        """Decode the prompts greedily to their ends and return what was accepted of the named draft. `done`: see `Engine`."""
        longest = max(map(len, prompts)) + self.max_new_tokens
        batch = max(1, min(BATCH, len(prompts), BATCH_TOKENS // longest))
        engine = Engine(self.target, self.drafts[name], max_length=longest, batch=batch)
        found = engine.generate(
            prompts, max_new_tokens=self.max_new_tokens, draft_tokens=self.draft_tokens, stop=self.stop, done=done
        )
        return Counts.of(found.accepted, self.draft_tokens)


def measure_robustness(
    config: Config, root: Path, base: Path, *, compare: Path | None = None, prompts: int | None = None, out: Path | None = None
) -> Path:
    """Measure the draft of the run folder `base`, and of `compare`'s, under every condition; returns the output folder.

    K is the largest of `bench.draft_tokens`, an answer has `bench.max_new_tokens`; `prompts`: most prompts of a condition.
    Raises StepFailed for a run without a draft, ConfigError or BundleError for one that does not fit the target, DataError for
    missing prompts, BusyError when another bench writes the same folder. Only former results are replaced.
    """
    sources = {OWN: find_sources(base)}
    if compare is not None:
        sources[OTHER] = find_sources(compare)
    folders = {name: source.policy / "draft" for name, source in sources.items()}
    if compare is not None and folders[OTHER].resolve() == folders[OWN].resolve():
        raise ConfigError(f"--compare {compare}: it is the same run; name the folder of another one")
    for source in sources.values():
        check_sources(source, [], config, root)
    final = result_folder(out or base / f"bench-{ROBUSTNESS}")
    with replacing(final) as fresh:
        target = ensure_target(config.target, root, root / config.paths.cache)
        subjects = _load(config, base, target, folders)
        tokenizer = load_tokenizer(target, trust_remote_code=config.target.trust_remote_code)
        positions = [target_dims(target).max_position_embeddings]
        positions += [draft.spec.max_position_embeddings for draft in subjects.drafts.values()]
        room = Room(config.dataset.max_prompt_tokens, subjects.max_new_tokens, min(positions))
        conditions = make_conditions(tokenizer, root, base / "dataset", room, prompts)
        counts = _count_all(subjects, conditions)
        result = {
            "suite": ROBUSTNESS, "draft_tokens": subjects.draft_tokens, "max_new_tokens": subjects.max_new_tokens,
            "dtype": str(subjects.target.dtype).removeprefix("torch."), "temperature": 0.0, "seed": config.runtime.seed,
            "drafts": {name: _about(draft.spec) for name, draft in subjects.drafts.items()},
            **evaluate(conditions, counts, config.runtime.seed), "versions": manifest.versions(),
        }  # fmt: skip
        manifest.write_json(fresh / "robustness.json", result)
        text = render(result)
        manifest.write_text(fresh / "robustness.md", text)
        manifest.write_json(fresh / ABOUT, {"suite": ROBUSTNESS, "conditions": [c.name for c in conditions if not c.skipped]})
        say("\n" + text)
    return final


def _load(config: Config, base: Path, target: Path, folders: dict[str, Path]) -> Subjects:
    device = pick_device(config.runtime.device)
    setup_torch(config.runtime.threads, config.runtime.seed)
    tuned = read_tuned(base / "tune") if (base / "tune").is_dir() else {"dtype": config.bench.dtype}
    dtype = timed_dtype(config, tuned)
    model = load_target(target, dtype, device, trust_remote_code=config.target.trust_remote_code)
    weights: DType = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    drafts = {name: load_draft(folder, target, device=device, dtype=weights).eval() for name, folder in folders.items()}
    stop = frozenset(target_dims(target).eos_token_ids)
    return Subjects(model, drafts, max(config.bench.draft_tokens), config.bench.max_new_tokens, stop)


def _count_all(subjects: Subjects, conditions: list[Condition]) -> dict[str, dict[str, Counts]]:
    """Return {condition: {draft: counts}} of the conditions that have prompts."""
    found: dict[str, dict[str, Counts]] = {}
    usable = [condition for condition in conditions if not condition.skipped]
    total = len(subjects.drafts) * sum(len(condition.prompts) for condition in usable)
    with Track("bench: robustness", total, "answers") as track:
        for condition in usable:
            found[condition.name] = {}
            for name in subjects.drafts:
                track.begin(condition.name if len(subjects.drafts) == 1 else f"{condition.name}, draft '{name}'")
                found[condition.name][name] = subjects.count(name, condition.prompts, track.advance)
    return found


def evaluate(conditions: list[Condition], counts: dict[str, dict[str, Counts]], seed: int) -> dict[str, Any]:
    """Return `conditions` and `worst` of robustness.json from what was counted, {condition: {draft: counts}}."""
    by_name = {condition.name: condition for condition in conditions}
    rows = []
    for condition in conditions:
        row: dict[str, Any] = {
            "group": condition.group, "name": condition.name, "against": condition.against, "paired": condition.paired,
            "skipped": condition.skipped, "prompts": len(condition.prompts), "measured": {}, "compared": None,
        }  # fmt: skip
        rows.append(row)
        if condition.skipped:
            continue
        row["mean_prompt_tokens"] = round(sum(map(len, condition.prompts)) / len(condition.prompts), 1)
        mine = counts[condition.name]
        for name, found in mine.items():
            row["measured"][name] = {
                "acceptance_length": round(found.acceptance_length, 4),
                "acceptance_by_position": [round(share, 4) for share in found.by_position],
                "rounds": int(found.rounds.sum()),
                "loss": _loss(condition, by_name, counts, name, seed),
            }
        if OTHER in mine:
            row["compared"] = relative_loss(mine[OWN], mine[OTHER], paired=True, seed=seed).as_json()
    return {"conditions": rows, "worst": _worst(rows)}


def _loss(
    condition: Condition, by_name: dict[str, Condition], counts: dict[str, dict[str, Counts]], name: str, seed: int
) -> dict[str, Any] | None:
    if condition.against is None:
        return None
    if condition.against not in counts:
        return None
    base, found = counts[condition.against][name], counts[condition.name][name]
    if condition.paired:
        place = {key: at for at, key in enumerate(by_name[condition.against].keys)}
        shared = [at for at, key in enumerate(condition.keys) if key in place]
        if not shared:
            return None
        base, found = base.take([place[condition.keys[at]] for at in shared]), found.take(shared)
    return relative_loss(base, found, paired=condition.paired, seed=seed).as_json()


def _worst(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, per group, the condition in which the run's own draft loses most."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        loss = row["measured"].get(OWN, {}).get("loss")
        if loss and (row["group"] not in found or loss["value"] > found[row["group"]]["loss"]["value"]):
            found[row["group"]] = {"name": row["name"], "loss": loss}
    return found


def _about(spec: DraftSpec) -> dict[str, Any]:
    return {
        "layers": spec.num_layers, "heads": spec.num_heads, "hidden_size": spec.hidden_size,
        "draft_vocab_size": spec.draft_vocab_size, "fc_norm": spec.fc_norm, "norm_output": spec.norm_output,
    }  # fmt: skip
