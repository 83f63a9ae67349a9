"""From prompts to answered rows: rendering, requests with their own seed and temperature, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eagle.config import Config
from eagle.dataset.prompts import Prompt, Split, hash_seed, split_prompts, temperature_of
from eagle.dataset.quarantine import Quarantine
from eagle.dataset.read import Row
from eagle.errors import DataError
from eagle.target.generate import Completion, Request
from eagle.target.template import render_prompt


@dataclass(frozen=True)
class Question:
    """A prompt that is ready to be answered: rendered ids, split and temperature."""

    prompt: Prompt
    ids: list[int]
    split: Split
    temperature: float


def render_questions(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], config: Config, quarantine: Quarantine
) -> list[Question]:
    """Render every prompt with the target's chat template; what it refuses or is too long goes to `quarantine`.

    Questions come ordered by id, so neighbours in a batch or shard are of mixed sources, the same at every run.
    """
    section = config.dataset
    rendered: list[tuple[Prompt, list[int]]] = []
    for prompt in sorted(prompts, key=lambda p: p.id):
        try:
            ids = render_prompt(tokenizer, prompt.messages)
        except DataError as error:
            quarantine.add(prompt.file, prompt.row, f"template: {error}", prompt.text)
            continue
        if len(ids) > section.max_prompt_tokens:
            reason = f"prompt too long: {len(ids)} tokens, more than max_prompt_tokens ({section.max_prompt_tokens})"
            quarantine.add(prompt.file, prompt.row, reason, prompt.text)
            continue
        rendered.append((prompt, ids))
    splits = split_prompts([prompt for prompt, _ in rendered], section.heldout_fraction)
    return [
        Question(prompt, ids, splits[prompt.id], temperature_of(prompt, splits[prompt.id], section.temperatures))
        for prompt, ids in rendered
    ]


def answer_requests(questions: Sequence[Question], config: Config, stop: tuple[int, ...]) -> list[Request]:
    """Return one request a question. Its seed comes from runtime.seed and the prompt's hash, not from its place."""
    return [
        Request(
            prompt=question.ids, max_tokens=config.dataset.max_new_tokens, temperature=question.temperature,
            seed=hash_seed(config.runtime.seed, "answer", question.prompt.id), stop=stop,
        )
        for question in questions
    ]


def answered_rows(
    questions: Sequence[Question], completions: Sequence[Completion], min_new_tokens: int, quarantine: Quarantine
) -> dict[Split, list[Row]]:
    """Join questions and completions to rows by split; answers shorter than `min_new_tokens` go to `quarantine`."""
    rows: dict[Split, list[Row]] = {"train": [], "heldout": []}
    for question, completion in zip(questions, completions, strict=True):
        prompt, length, new = question.prompt, len(question.ids), len(completion.tokens)
        if new < min_new_tokens:
            reason = f"answer too short: {new} tokens, less than min_new_tokens ({min_new_tokens})"
            quarantine.add(prompt.file, prompt.row, reason, prompt.text)
            continue
        rows[question.split].append(
            Row(
                id=prompt.id, source=prompt.source, kind=prompt.kind, temperature=question.temperature,
                input_ids=[*question.ids, *completion.tokens], loss_mask=[0] * length + [1] * new,
                prompt_length=length, finish=completion.finish,
            )
        )
    return rows
