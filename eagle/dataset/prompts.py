"""What a prompt is, and everything that is decided by the hash of its text: identity, split, temperature, seed.

Deciding by hash means that a prompt keeps its side of the split when other prompts come or go, so a retrained draft
is never measured on what a former one was trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from eagle.config import TemperatureShare

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Prompt:
    """The messages up to the answer that the target will give: an optional system message and the first user message.

    `source` is "file:<name>", "shipped:<kind>" or "self"; `file` and `row` (1-based) say where it came from.
    """

    source: str
    kind: str
    user: str
    system: str | None
    file: str
    row: int
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", hashlib.sha256(self.text.encode()).hexdigest())

    @property
    def text(self) -> str:
        """The text that is hashed and compared: the user's, after the system message if there is one."""
        return self.user if self.system is None else f"{self.system}\n\n{self.user}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages as the chat template takes them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.user}]


def hash_fraction(text: str) -> float:
    """Return a number in [0, 1) from the sha256 of `text` (its first 53 bits)."""
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11) / 2**53


def hash_seed(*parts: object) -> int:
    """Return a seed in [0, 2**31) from the sha256 of the parts."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def split_prompts(prompts: Sequence[Prompt], heldout_fraction: float) -> dict[str, Split]:
    """Return the split of every prompt by its id. It depends on the text alone, not on the seed or the other prompts.

    Only when that leaves one side of two or more prompts empty, the prompt nearest to the border changes sides.
    """
    places = {prompt.id: hash_fraction(prompt.text) for prompt in prompts}
    splits: dict[str, Split] = {key: "heldout" if place < heldout_fraction else "train" for key, place in places.items()}
    if len(splits) > 1:
        if "heldout" not in splits.values():
            splits[min(places, key=lambda key: places[key])] = "heldout"
        elif "train" not in splits.values():
            splits[max(places, key=lambda key: places[key])] = "train"
    return splits


def temperature_of(prompt: Prompt, split: Split, shares: Sequence[TemperatureShare]) -> float:
    """Return the temperature of the prompt's answer: 0 for held-out prompts, else one of the mix, by hash."""
    if split == "heldout":
        return 0.0
    total = sum(share.weight for share in shares)
    left = hash_fraction(f"temperature\0{prompt.text}") * total
    for share in shares:
        left -= share.weight
        if left < 0:
            return share.temperature
    return shares[-1].temperature
