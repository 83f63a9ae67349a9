"""Perturbed chat templates: the same user text, dressed otherwise than the draft was trained on.

EAGLE 3.1's two norms are meant to keep acceptance up there (attention drift, arXiv 2605.09992). What a template puts
around the texts is found by rendering marks, so that only the template's own part is changed, never what the user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from eagle.dataset.prompts import Prompt
from eagle.target.template import render_text, user_suffix

Messages = list[dict[str, str]]
Change = Callable[[str], str]
Dress = Callable[[Messages], str | None]  # None: this template has nothing that could be changed so
_MARK = "QZMARK{}QZ"  # letters and digits only: no template trims or escapes it
_MARKED = re.compile(r"(QZMARK\d+QZ)")
_ROLES = {"user": "human", "assistant": "partner", "system": "context", "model": "partner"}


def perturbations(tokenizer: PreTrainedTokenizerBase, systems: Sequence[Prompt]) -> dict[str, Dress]:
    """Return the perturbations by name; each turns messages into the text up to where the answer starts.

    - `system-<kind>`: another system prompt, one for each of `systems`. `system-none`: the template's default one left out.
    - `roles`: other role names. `newlines-double`, `newlines-none`: other white space between the turns.
    - `alpaca`, `dialogue`: other templates. `bare`: no template.
    """
    found: dict[str, Dress] = {f"system-{one.kind}": _with_system(tokenizer, one.user) for one in systems}
    return found | {
        "system-none": lambda messages: _without_system(tokenizer, messages),
        "roles": lambda messages: _changed(tokenizer, messages, _other_roles(tokenizer)),
        "newlines-double": lambda messages: _changed(tokenizer, messages, lambda text: text.replace("\n", "\n\n")),
        "newlines-none": lambda messages: _changed(tokenizer, messages, lambda text: text.replace("\n", " ")),
        "alpaca": lambda messages: f"### Instruction:\n{_plain(messages)}\n\n### Response:\n",
        "dialogue": lambda messages: f"User: {_plain(messages)}\n\nAssistant:",
        "bare": lambda messages: f"{_plain(messages)}\n",
    }


def _plain(messages: Messages) -> str:
    return "\n\n".join(message["content"] for message in messages)


def _with_system(tokenizer: PreTrainedTokenizerBase, text: str) -> Dress:
    def dress(messages: Messages) -> str:
        turns = [message for message in messages if message["role"] != "system"]
        return render_text(tokenizer, [{"role": "system", "content": text}, *turns])

    return dress


def _parts(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[str]:
    """Return what the template prints, cut at the marks that stand for the contents: [text, mark, text, mark, text]."""
    marked = [{**message, "content": _MARK.format(at)} for at, message in enumerate(messages)]
    return _MARKED.split(render_text(tokenizer, marked))


def _changed(tokenizer: PreTrainedTokenizerBase, messages: Messages, change: Change) -> str | None:
    """Return the rendered text with `change` applied to the template's part; None when that changes nothing."""
    parts = _parts(tokenizer, messages)
    own = [part if _MARKED.fullmatch(part) else change(part) for part in parts]
    if own == parts:
        return None
    contents = {_MARK.format(at): message["content"] for at, message in enumerate(messages)}
    return "".join(contents.get(part, part) for part in own)


def _other_roles(tokenizer: PreTrainedTokenizerBase) -> Change:
    """Rename roles where a special token stands right before them: elsewhere the word is text."""
    special = sorted({*tokenizer.all_special_tokens, *map(str, tokenizer.get_added_vocab())}, key=len, reverse=True)
    if not special:
        return lambda text: text
    pattern = re.compile(f"({'|'.join(map(re.escape, special))})({'|'.join(_ROLES)})\\b")
    return lambda text: pattern.sub(lambda found: found[1] + _ROLES[found[2]], text)


def _without_system(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str | None:
    """Return the rendered text without a system turn; None when the template puts none, or not as a turn of its own.

    With an own system text S the template prints [A, S, B, user, C]: B closes the system's turn as a user's is closed, and
    what follows opens the user's.
    """
    user = [message for message in messages if message["role"] != "system"]
    own = _parts(tokenizer, user)
    whole = _parts(tokenizer, [{"role": "system", "content": ""}, *user])
    closing = user_suffix(tokenizer)
    if len(whole) != len(own) + 2 or not closing or not whole[2].startswith(closing):
        return None
    opening = whole[2].removeprefix(closing)
    begin = str(tokenizer.bos_token or "")
    if begin and own[0].startswith(begin) and not opening.startswith(begin):
        opening = begin + opening
    if own[0] == opening and len(messages) == len(user):
        return None
    return opening + "".join([user[0]["content"], *own[2:]])
