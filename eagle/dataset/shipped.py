"""The prompts that ship with the project, under data/prompts/: plain rows and templates with slots.

A row is `{"kind", "prompt"}` or `{"kind", "template", "slots"}`; a slot is a list of texts, or whole numbers as
`{"min", "max", "step"}`. `{name}` in the template stands for slot `name`; other braces are text.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle.dataset.prompts import Prompt, hash_seed
from eagle.errors import DataError


@dataclass(frozen=True)
class Template:
    """One row of a prompt file. Without slots it is one prompt; else the product of its slots' values."""

    kind: str
    text: str
    slots: tuple[tuple[str, tuple[str, ...]], ...]
    file: str
    row: int

    @property
    def size(self) -> int:
        """How many prompts the row expands to."""
        return math.prod(len(values) for _, values in self.slots)

    def expand(self, index: int) -> Prompt:
        """Return expansion `index` (0 <= index < size): the slots' values in mixed radix."""
        chosen: dict[str, str] = {}
        for name, values in self.slots:
            index, at = divmod(index, len(values))
            chosen[name] = values[at]
        text = re.sub(r"\{(\w+)\}", lambda found: chosen.get(found[1], found[0]), self.text)
        return Prompt(f"shipped:{self.kind}", self.kind, text, None, self.file, self.row)


def read_templates(folder: Path) -> list[Template]:
    """Return all rows of folder/*.jsonl, files by name. Raises DataError with file and row for a malformed one."""
    templates = []
    for path in sorted(folder.glob("*.jsonl")):
        for row, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
            try:
                templates.append(_parse(json.loads(line), f"{folder.name}/{path.name}", row))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}, row {row}: not a shipped prompt ({error!r})") from None
    return templates


def pick_shipped(templates: list[Template], count: int, seed: int) -> list[Prompt]:
    """Return `count` distinct prompts, as evenly over the kinds as they allow, and within a kind over its rows.

    Which expansions are taken depends on the seed only. Fewer come back when the rows expand to fewer.
    """
    streams = {
        kind: _stream([t for t in templates if t.kind == kind], hash_seed(seed, "shipped", kind))
        for kind in sorted({t.kind for t in templates})
    }
    picked: list[Prompt] = []
    seen: set[str] = set()
    while streams and len(picked) < count:
        for kind in list(streams):
            if len(picked) == count:
                break
            prompt = next((p for p in streams[kind] if p.text not in seen), None)
            if prompt is None:
                del streams[kind]
                continue
            seen.add(prompt.text)
            picked.append(prompt)
    return picked


def _stream(templates: list[Template], seed: int) -> Iterator[Prompt]:
    """Yield the expansions of one kind in rounds: one more of every row that has more, in random order."""
    rng = random.Random(seed)  # noqa: S311 - choice of prompts, not a secret
    orders = [iter(rng.sample(range(t.size), min(t.size, 4096))) for t in templates]
    alive = list(range(len(templates)))
    while alive:
        rng.shuffle(alive)
        left = []
        for at in alive:
            index = next(orders[at], None)
            if index is not None:
                left.append(at)
                yield templates[at].expand(index)
        alive = left


def _parse(content: dict[str, Any], file: str, row: int) -> Template:
    if "prompt" in content:
        return Template(str(content["kind"]), str(content["prompt"]), (), file, row)
    slots = tuple((name, _values(values)) for name, values in content["slots"].items())
    text = str(content["template"])
    unused = [name for name, _ in slots if f"{{{name}}}" not in text]
    if unused:
        raise ValueError(f"slot '{unused[0]}' is not in the template")
    return Template(str(content["kind"]), text, slots, file, row)


def _values(values: Any) -> tuple[str, ...]:
    if isinstance(values, dict):
        values = range(values["min"], values["max"] + 1, values.get("step", 1))
    if not values:
        raise ValueError("a slot without values")
    return tuple(str(value) for value in values)
