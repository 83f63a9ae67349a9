"""What a draft must know of its target to be continued: sizes, tokenizer, template. Kept as JSON beside the draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle import manifest
from eagle.config import TargetConfig
from eagle.target.load import load_tokenizer, target_dims
from eagle.target.resolve import target_fingerprint

IDENTITY = "target.json"


def target_identity(config: TargetConfig, target: Path, root: Path, cache: Path) -> dict[str, Any]:
    """Return {fingerprint, hidden_size, num_layers, vocab_size, tokenizer_sha256, chat_template_sha256} of a target folder."""
    dims = target_dims(target)
    tokenizer = load_tokenizer(target, trust_remote_code=config.trust_remote_code)
    return {
        "fingerprint": target_fingerprint(config, root, cache),
        "hidden_size": dims.hidden_size,
        "num_layers": dims.num_layers,
        "vocab_size": dims.vocab_size,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "chat_template_sha256": manifest.hash_json(tokenizer.chat_template),
    }


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of which text each token id stands for: what a draft's embedding and head are about."""
    return manifest.hash_json(sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]))
