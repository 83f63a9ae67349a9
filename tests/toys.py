"""Tiny random targets with a real tokenizer and chat template, made in milliseconds; no network."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer (no merges) with ChatML specials; ids 0..2 are pad/bos/eos-like specials."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    for filler in range(len(vocab), vocab_size):
        vocab[f"<|filler{filler}|>"] = filler
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=specials[1], eos_token=specials[2], pad_token=specials[0]
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_target(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab_size: int = 320,
    tie: bool = True,
    rope_theta: float = 10000.0,
    rope: dict[str, Any] | None = None,
    seed: int = 0,
    scale: float = 3.0,
) -> Path:
    """Save a random Llama at `folder` and return it. `scale` sharpens the logits so that answers are not uniform noise.

    `rope` adds keys to its rope_parameters.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=2 * hidden,
        vocab_size=vocab_size,
        tie_word_embeddings=tie,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta, **(rope or {})},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tiny_tokenizer(vocab_size).save_pretrained(folder)
    return folder


def write_program(path: Path, code: str) -> Path:
    """Write an executable that runs `code` under this Python; a shebang cannot name an interpreter with a space in its path."""
    source = path.with_name(path.name + ".source.py")
    source.write_text(code, encoding="utf-8")
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(source))} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path
