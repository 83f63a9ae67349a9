"""The dataset step: gathers prompts, has the target answer them, writes shards, quarantine and statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle import manifest
from eagle.dataset.answers import answer_requests, answered_rows, render_questions
from eagle.dataset.duplicates import Deduplicated, drop_duplicates
from eagle.dataset.prompts import Prompt, Split
from eagle.dataset.quarantine import Quarantine
from eagle.dataset.read import Row, write_shards
from eagle.dataset.readers import find_prompt_file, read_prompt_file, sample_prompts
from eagle.dataset.replay import Replay, replay_rows
from eagle.dataset.selfprompt import self_prompt_requests, self_prompts
from eagle.dataset.shipped import pick_shipped, read_templates
from eagle.errors import DataError
from eagle.progress import say
from eagle.steps import StepContext
from eagle.target.generate import choose_backend, generate
from eagle.target.load import ensure_target, load_tokenizer, target_dims
from eagle.target.resolve import target_fingerprint

FORMAT = 1


@dataclass(frozen=True)
class _Gathered:
    """Prompts after duplicates were dropped, and how many each source gave before."""

    kept: Deduplicated
    offered: dict[str, int]


def run(context: StepContext) -> dict[str, Any]:
    """Fill `context.out` with train-*.parquet, heldout-*.parquet, quarantine.jsonl, stats.json and dataset.json.

    Returns the counts as metrics. Single bad rows are quarantined. Raises ConfigError for a prompt file that is not
    there, DataError when no prompt at all is usable or one split stays empty.
    """
    config = context.config
    target = ensure_target(config.target, context.root, context.cache)
    tokenizer = load_tokenizer(target, trust_remote_code=config.target.trust_remote_code)
    stop = _stop_ids(target, tokenizer)
    quarantine = Quarantine()
    gathered = _gather(context, target, tokenizer, quarantine)
    questions = render_questions(tokenizer, gathered.kept.prompts, config, quarantine)
    if len(questions) < 2:
        raise DataError(
            f"{len(questions)} usable prompts, at least 2 are needed (train and held out): {_why_none(gathered, quarantine)}; "
            "set dataset.prompt_files, dataset.shipped_prompts or dataset.self_prompts"
        )
    requests = answer_requests(questions, config, stop)
    completions = generate(requests, target, config, context.root, title="dataset: answers", resume=context.work / "answers")
    rows = answered_rows(questions, completions, config.dataset.min_new_tokens, quarantine)
    for split, members in rows.items():
        if not members:
            raise DataError(
                f"no {split} row: {len(questions)} prompts, {len(quarantine.entries)} rows quarantined {quarantine.reasons()}; "
                "give more prompts or change dataset.heldout_fraction"
            )
    replay = replay_rows(
        config, context.root, context.out.parent / "dataset", target_fingerprint(config.target, context.root, context.cache),
        rows["train"], rows["heldout"],
    )  # fmt: skip
    if replay.about:
        say(f"dataset: {len(replay.rows)} training rows replayed from {config.dataset.replay_from}")
    rows["train"] = sorted([*rows["train"], *replay.rows], key=lambda row: row.id)
    return _write(context, target, tokenizer, rows, gathered, quarantine, replay)


def _gather(context: StepContext, target: Path, tokenizer: PreTrainedTokenizerBase, quarantine: Quarantine) -> _Gathered:
    """Collect prompts (files, then shipped, then the target's own) and drop duplicates; the earlier one stays."""
    config, section = context.config, context.config.dataset
    prompts: list[Prompt] = []
    for name in section.prompt_files:
        path = find_prompt_file(context.root, name)
        shown = path.name if Path(name).is_absolute() else name  # outputs hold no absolute path
        found = read_prompt_file(path, shown, section.max_prompt_tokens, quarantine)
        prompts += sample_prompts(found, section.file_prompts, config.runtime.seed)
    if section.shipped_prompts:
        shipped = pick_shipped(read_templates(context.root / "data" / "prompts"), section.shipped_prompts, config.runtime.seed)
        if len(shipped) < section.shipped_prompts:
            say(f"dataset: the shipped prompts expand to {len(shipped)}, fewer than shipped_prompts={section.shipped_prompts}")
        prompts += shipped
    requests = self_prompt_requests(tokenizer, config)
    sampled = generate(requests, target, config, context.root, title="dataset: self-prompts", resume=context.work / "self")
    prompts += self_prompts(tokenizer, sampled, config, quarantine)
    kept = drop_duplicates(prompts, section.near_duplicate_jaccard)
    say(f"dataset: {len(kept.prompts)} prompts; dropped {kept.exact} duplicates and {kept.near} near-duplicates")
    return _Gathered(kept, _counts(_family(p.source) for p in prompts))


def _stop_ids(target: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    ids = set(target_dims(target).eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return tuple(sorted(ids))


def _why_none(gathered: _Gathered, quarantine: Quarantine) -> str:
    if quarantine.entries:
        first = quarantine.entries[0]
        return f"{len(quarantine.entries)} rows quarantined, the first is {first.file} row {first.row} ({first.reason})"
    return f"sources gave {gathered.offered or 'nothing'}"


def _write(
    context: StepContext, target: Path, tokenizer: PreTrainedTokenizerBase, rows: dict[Split, list[Row]],
    gathered: _Gathered, quarantine: Quarantine, replay: Replay,
) -> dict[str, Any]:
    config = context.config
    shards = {split: write_shards(context.out, split, members, config.dataset.shard_rows) for split, members in rows.items()}
    quarantine.write(context.out / "quarantine.jsonl")
    stats = {
        "splits": {split: _describe(members) for split, members in rows.items()},
        "prompts_offered": gathered.offered,
        "duplicates_dropped": {"exact": gathered.kept.exact, "near": gathered.kept.near},
        "quarantined": quarantine.reasons(),
    }
    manifest.write_json(context.out / "stats.json", stats)
    manifest.write_json(
        context.out / "dataset.json",
        {
            "format": FORMAT, "target": config.target.model, "target_revision": config.target.revision,
            "chat_template_sha256": manifest.hash_json(tokenizer.chat_template), "stop_ids": list(_stop_ids(target, tokenizer)),
            "generated_by": choose_backend(config, context.root), "dtype": config.target.dtype, "seed": config.runtime.seed,
            "shards": shards, "rows": {split: len(members) for split, members in rows.items()},
            **({"replay": replay.about} if replay.about else {}),
        },
    )
    metrics: dict[str, Any] = {
        "quarantined": len(quarantine.entries), "duplicates_dropped": gathered.kept.exact + gathered.kept.near,
    }
    for split, members in rows.items():
        found = stats["splits"][split]  # type: ignore[index]
        metrics |= {f"{split}_rows": len(members), f"{split}_answer_tokens": found["answer_tokens"]}
    return metrics


def _describe(rows: list[Row]) -> dict[str, Any]:
    """Return the counts of one split; lengths in tokens."""
    answers = [len(row.input_ids) - row.prompt_length for row in rows]
    return {
        "rows": len(rows),
        "by_source": _counts(_family(row.source) for row in rows),
        "by_kind": _counts(row.kind for row in rows),
        "by_temperature": _counts(f"{row.temperature:g}" for row in rows),
        "by_finish": _counts(row.finish for row in rows),
        "prompt_tokens": sum(row.prompt_length for row in rows),
        "answer_tokens": sum(answers),
        "mean_answer_tokens": round(sum(answers) / max(len(answers), 1), 2),
        "longest_row_tokens": max((len(row.input_ids) for row in rows), default=0),
        "distinct_answer_tokens": len({token for row in rows for token in row.answer}),
    }


def _family(source: str) -> str:
    """Return the source without the shipped prompts' kind: 'file:chats.jsonl', 'shipped', 'self', 'replay'."""
    return source if source.startswith("file:") else source.partition(":")[0]


def _counts(items: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(items).items()))
