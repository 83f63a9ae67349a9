"""Long contexts: real turns of a run's data set, prompts with the target's answers, in front of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eagle.dataset.read import iter_rows
from eagle.errors import DataError
from eagle.target.template import encode, render_prompt, render_text

LEAST = 0.8  # a context that is shorter than this share of what was asked for is no such context
_TURNS = 400  # turns read from the data set
_MARK = "QZCONTEXTQZ"


@dataclass(frozen=True)
class Turn:
    """A user's text, the target's answer, and the tokens that both take in a conversation, the template's own included."""

    user: str
    answer: str
    tokens: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the chat template takes them."""
        return [{"role": "user", "content": self.user}, {"role": "assistant", "content": self.answer}]


def read_turns(dataset: Path, tokenizer: PreTrainedTokenizerBase) -> list[Turn]:
    """Return turns made of training rows whose answer came to its end, in the data set's order (which has no meaning).

    Rows with a system prompt of their own are left out: a conversation has one. Raises DataError when nothing is left.
    """
    around = render_text(tokenizer, [{"role": "user", "content": _MARK}])
    before, _, after = around.partition(_MARK)
    empty = len(encode(tokenizer, around.replace(_MARK, "")))
    turns: list[Turn] = []
    for row in iter_rows(dataset, "train"):
        text = str(tokenizer.decode(row.prompt))
        answer = str(tokenizer.decode(row.answer, skip_special_tokens=True)).strip()
        if row.finish != "stop" or not answer or not (text.startswith(before) and text.endswith(after)):
            continue
        turn = Turn(text[len(before) : len(text) - len(after)], answer, 0)
        tokens = len(render_prompt(tokenizer, [*turn.messages, {"role": "user", "content": ""}])) - empty
        turns.append(Turn(turn.user, turn.answer, tokens))
        if len(turns) == _TURNS:
            break
    if not turns:
        raise DataError(f"{dataset}: no training row with a finished answer in the template's usual form to build contexts of")
    return turns


def with_context(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], turns: Sequence[Turn], length: int, start: int
) -> list[int] | None:
    """Return the ids of `messages` behind as many turns as fit, at most `length` tokens in all; None when under 80 % of it.

    `start` says which turn is tried first; the list is taken as a circle.
    """
    lead, rest = [m for m in messages if m["role"] == "system"], [m for m in messages if m["role"] != "system"]
    left = length - len(render_prompt(tokenizer, messages))
    chosen: list[dict[str, str]] = []
    for at in range(len(turns)):
        turn = turns[(start + at) % len(turns)]
        if turn.tokens <= left:
            chosen += turn.messages
            left -= turn.tokens
    ids = render_prompt(tokenizer, [*lead, *chosen, *rest])
    while len(ids) > length and chosen:  # tokens at a seam may be cut otherwise than in the turn alone
        chosen = chosen[:-2]
        ids = render_prompt(tokenizer, [*lead, *chosen, *rest])
    return ids if LEAST * length <= len(ids) <= length else None
