"""The target's chat template: rendering prompts, and where a user's turn starts and ends."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eagle.errors import ConfigError, DataError

_MARK = "QZEAGLEUSERTEXTQZ"  # stands for the user's text; letters only, so that no template trims or escapes it


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of `messages` up to where the assistant's answer starts (generation prompt included).

    `messages` are `{"role", "content"}`. Raises DataError, one line, when the template refuses them (for example
    roles that do not alternate), ConfigError when the target has no chat template.
    """
    return encode(tokenizer, render_text(tokenizer, messages))


def render_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Return the text that `render_prompt` encodes. Raises as it does."""
    return _render(tokenizer, messages, add_generation_prompt=True)


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids up to where a user's first text starts; a default system prompt is part of it.

    An instruct model that continues from here writes what a user may ask (self-prompting).
    """
    return encode(tokenizer, _around_user_text(tokenizer)[0])


def user_suffix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the template puts after a user's text, for example '<|im_end|>' and a newline."""
    return _around_user_text(tokenizer)[1]


def user_suffix_stops(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a user's turn: special tokens of the template's user suffix, and the tokenizer's eos.

    A template that ends the turn with plain text has no such token; cut the decoded text at `user_suffix` then.
    """
    special = set(tokenizer.all_special_ids) | {i for i, token in _added_tokens(tokenizer).items() if token.special}
    stops = {i for i in encode(tokenizer, user_suffix(tokenizer)) if i in special}
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    return sorted(stops)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a rendered text; special tokens come from the template only, none is added."""
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, Any]:
    return dict(getattr(tokenizer, "added_tokens_decoder", {}))


def _around_user_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    rendered = _render(tokenizer, [{"role": "user", "content": _MARK}], add_generation_prompt=False)
    before, mark, after = rendered.partition(_MARK)
    if not mark:
        raise ConfigError("target.model: its chat template does not print the user's text; self-prompting is impossible")
    return before, after


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise ConfigError("target.model: the tokenizer has no chat template; use an instruct model or add chat_template.jinja")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"the target's chat template refuses these messages: {why}") from None
