"""The conditions of the suite `robustness`: which prompts, dressed how, and what each is compared with.

- `template`: the prompts of the suite `default` under perturbed chat templates (`eagle.bench.perturb`), against `plain`.
- `language`: the same eight questions in eleven languages, against the English ones. `code`: twelve programming tasks,
  against `plain` (other prompts, so not in pairs). Both ship under data/suites/robustness/.
- `context`: the prompts of `plain` behind real turns of the run's data set, against `plain`. A context of L tokens is the
  prompt and its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eagle.bench.contexts import LEAST, read_turns, with_context
from eagle.bench.perturb import Dress, perturbations
from eagle.bench.suites import SHIPPED, default_prompts
from eagle.dataset.prompts import Prompt
from eagle.dataset.quarantine import Quarantine
from eagle.dataset.readers import read_prompt_file
from eagle.errors import DataError
from eagle.target.template import encode, render_prompt

PLACE = SHIPPED / "robustness"
CONTEXTS = (512, 1024, 2048, 4096)
PLAIN = "plain"
ENGLISH = "en"
Ids = list[int]


@dataclass(frozen=True)
class Condition:
    """Prompts as token ids under one condition. `keys`: which prompt each is; the same key in `against` makes a pair.

    `against` None: a baseline. `skipped` says why there are no prompts.
    """

    group: str
    name: str
    against: str | None = None
    prompts: list[Ids] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    paired: bool = True
    skipped: str | None = None


@dataclass(frozen=True)
class Room:
    """Limits in tokens: of a prompt of the suites, of an answer, and of both together as target and draft allow."""

    prompt: int
    answer: int
    positions: int


def make_conditions(
    tokenizer: PreTrainedTokenizerBase, root: Path, dataset: Path, room: Room, count: int | None
) -> list[Condition]:
    """Return all conditions, baselines before what is compared with them. `count`: most prompts of each; None = all.

    `dataset`: the run's data set, for contexts. Raises DataError when prompts that ship are missing or none is usable.
    """
    render = partial(render_prompt, tokenizer)
    base = default_prompts(root, render, room.prompt, count)
    plain = Condition("template", PLAIN, None, [render(p.messages) for p in base], [p.id for p in base])
    found = [plain]
    for name, dress in perturbations(tokenizer, _read(root, "systems", room)).items():
        found.append(_dressed(tokenizer, name, dress, base, room))
    found += _languages(render, root, room, count)
    code = [render(prompt.messages) for prompt in _read(root, "code", room)[:count]]
    found.append(_fitting(Condition("code", "code", PLAIN, code, [str(at) for at in range(len(code))], paired=False), room))
    return found + _contexts(tokenizer, base, dataset, room)


def _read(root: Path, name: str, room: Room) -> list[Prompt]:
    path, quarantine = root / PLACE / f"{name}.jsonl", Quarantine()
    if not path.is_file():
        raise DataError(f"suite 'robustness': {path} is missing; it ships with the project, restore it")
    found = read_prompt_file(path, (PLACE / path.name).as_posix(), room.positions, quarantine)
    if quarantine.entries or not found:
        first = quarantine.entries[0]
        raise DataError(f"suite 'robustness': {first.file}, row {first.row}: {first.reason}; restore the file that ships")
    return found


def _dressed(
    tokenizer: PreTrainedTokenizerBase, name: str, dress: Dress, base: Sequence[Prompt], room: Room
) -> Condition:
    try:
        texts = [dress(prompt.messages) for prompt in base]
    except DataError as error:  # for example a template that takes no system message
        return Condition("template", name, PLAIN, skipped=str(error))
    if any(text is None for text in texts):
        return Condition("template", name, PLAIN, skipped="the target's template has nothing that could be changed so")
    prompts = [encode(tokenizer, text) for text in texts if text]
    return _fitting(Condition("template", name, PLAIN, prompts, [prompt.id for prompt in base]), room)


def _fitting(condition: Condition, room: Room) -> Condition:
    """Return the condition without the prompts that leave no room for their answers."""
    fits = [at for at, ids in enumerate(condition.prompts) if 0 < len(ids) <= room.positions - room.answer]
    why = None if fits else f"no prompt with its answer fits {room.positions} positions"
    kept, keys = [condition.prompts[at] for at in fits], [condition.keys[at] for at in fits]
    return replace(condition, prompts=kept, keys=keys, skipped=why)


def _languages(render: Callable[[list[dict[str, str]]], Ids], root: Path, room: Room, count: int | None) -> list[Condition]:
    """Return a condition a language, English first; the n-th questions of all languages are one question."""
    by_kind: dict[str, list[Ids]] = {ENGLISH: []}
    for prompt in _read(root, "languages", room):
        by_kind.setdefault(prompt.kind, []).append(render(prompt.messages))
    found = []
    for kind, prompts in by_kind.items():
        against, chosen = None if kind == ENGLISH else f"language-{ENGLISH}", prompts[:count]
        condition = Condition("language", f"language-{kind}", against, chosen, [str(at) for at in range(len(chosen))])
        found.append(_fitting(condition, room))
    return found


def _contexts(tokenizer: PreTrainedTokenizerBase, base: Sequence[Prompt], dataset: Path, room: Room) -> list[Condition]:
    try:
        turns = read_turns(dataset, tokenizer)
    except DataError as error:
        return [Condition("context", f"context-{length}", PLAIN, skipped=str(error)) for length in CONTEXTS]
    found = []
    for length in CONTEXTS:
        name = f"context-{length}"
        if length > room.positions:
            found.append(Condition("context", name, PLAIN, skipped=f"target and draft take {room.positions} positions"))
            continue
        made = {
            prompt.id: with_context(tokenizer, prompt.messages, turns, length - room.answer, at * len(turns) // len(base))
            for at, prompt in enumerate(base)
        }
        kept = {key: ids for key, ids in made.items() if ids is not None}
        why = None if kept else f"no prompt could be filled to {100 * LEAST:.0f} % of it with turns of the data set"
        found.append(Condition("context", name, PLAIN, list(kept.values()), list(kept), skipped=why))
    return found
