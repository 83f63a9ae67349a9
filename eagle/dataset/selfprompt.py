"""Self-prompting: the target itself writes what its users may ask.

An instruct model that is given only its chat template up to where the user's text starts continues with a plausible
user message and ends it with the template's end of turn (the idea of Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from eagle.config import Config
from eagle.dataset.prompts import Prompt, hash_seed
from eagle.dataset.quarantine import Quarantine
from eagle.dataset.readers import BadRow, check_text
from eagle.target.generate import Completion, Request
from eagle.target.template import user_prefix, user_suffix, user_suffix_stops

SOURCE = "self"
_SPARE = 4  # one message more for every so many: some never end


def self_prompt_requests(tokenizer: PreTrainedTokenizerBase, config: Config) -> list[Request]:
    """Return the requests that sample user messages, each with its own seed: a quarter more than `dataset.self_prompts`."""
    section = config.dataset
    if section.self_prompts == 0:
        return []
    prefix, stops = user_prefix(tokenizer), tuple(user_suffix_stops(tokenizer))
    return [
        Request(
            prompt=prefix, max_tokens=section.self_prompt_tokens, temperature=section.self_prompt_temperature,
            seed=hash_seed(config.runtime.seed, SOURCE, at), stop=stops,
        )
        for at in range(section.self_prompts + section.self_prompts // _SPARE)
    ]


def self_prompts(
    tokenizer: PreTrainedTokenizerBase, completions: list[Completion], config: Config, quarantine: Quarantine
) -> list[Prompt]:
    """Return at most `dataset.self_prompts` sampled user messages, decoded, cut at the end of turn and stripped, in order.

    Messages that the target ended itself come first; those that ran into the token limit are mostly rambling and only
    fill up what is missing. Empty ones go to `quarantine`.
    """
    section = config.dataset
    suffix = user_suffix(tokenizer).strip()
    ended: list[Prompt] = []
    unended: list[Prompt] = []
    for row, completion in enumerate(completions, start=1):
        ids = completion.tokens[:-1] if completion.finish == "stop" else completion.tokens
        # A template that ends turns with plain text has no stop id for it: its text is looked for.
        text, mark, _ = str(tokenizer.decode(ids, skip_special_tokens=True)).partition(suffix or "\0")
        text = text.replace("\ufffd", "").strip()  # a multi-byte character cut by the limit, or never finished
        try:
            check_text(text, section.max_prompt_tokens)
        except BadRow as reason:
            quarantine.add(SOURCE, row, str(reason), text)
            continue
        (ended if completion.finish == "stop" or mark else unended).append(Prompt(SOURCE, SOURCE, text, None, SOURCE, row))
    chosen = (ended + unended)[: section.self_prompts]
    return sorted(chosen, key=lambda prompt: prompt.row)
