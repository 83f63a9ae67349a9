"""What vLLM cannot run, or would run otherwise than the draft was trained: refused at export and at every check.

From vLLM 0.32's source (`model_executor/layers/attention`, `.../rotary_embedding`, `model_executor/models/llama_eagle3.py`)
and from comparing its drafts with ours token for token (tests/contract). The rotary embeddings are the trap: vLLM takes more
types and keys than transformers, with which drafts are trained, and without a word (seen: `rope_dim`, which transformers
ignores). `dynamic` and `longrope` change with the length of the sequence in transformers; vLLM has one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle.draft.spec import ROPE_KEYS, DraftSpec
from eagle.errors import BundleError, closest

_OPTIONAL = ("beta_fast", "beta_slow")  # both sides take 32 and 1 where they are absent
_PLACE = "config.json"


def portable(spec: DraftSpec) -> DraftSpec:
    """Return the spec with its rotary embedding spelt as vLLM takes it; it stays the same function.

    Null keys are dropped (vLLM computes with them), `factor` is a float (vLLM iterates over an integer one), and yarn's
    original length is written out: absent, transformers takes `max_position_embeddings`, which vLLM may raise.
    """
    rope = {key: value for key, value in spec.rope_parameters.items() if value is not None}
    if isinstance(rope.get("factor"), int):
        rope["factor"] = float(rope["factor"])
    if rope.get("rope_type") in ("yarn", "llama3"):
        rope.setdefault("original_max_position_embeddings", spec.max_position_embeddings)
    return replace(spec, rope_parameters=rope)


def check_limits(spec: DraftSpec) -> None:
    """Raise BundleError with the reason when vLLM cannot run this draft, or would compute something else."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % kv_heads:
        raise BundleError(
            f"{_PLACE}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}; vLLM's attention needs one"
        )
    if spec.head_dim % 2:
        raise BundleError(f"{_PLACE}: head_dim {spec.head_dim} is odd; rotary embeddings turn pairs of values")
    if spec.draft_vocab_size > spec.vocab_size:
        raise BundleError(
            f"{_PLACE}: draft_vocab_size {spec.draft_vocab_size} is larger than vocab_size {spec.vocab_size}; "
            "vLLM would propose tokens that the target does not have"
        )
    _check_rope(spec.rope_parameters)


def _check_rope(rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type")
    if kind not in ROPE_KEYS:
        raise BundleError(
            f"{_PLACE}: rope_type {kind!r}{closest(str(kind), ROPE_KEYS)} is not one that vLLM and transformers compute alike; "
            f"known: {', '.join(ROPE_KEYS)}; train the draft anew: it then gets a plain one"
        )
    unknown = sorted(set(rope) - {"rope_type", "rope_theta", *ROPE_KEYS[kind]})
    if unknown:
        near = closest(unknown[0], ROPE_KEYS[kind])
        raise BundleError(
            f"{_PLACE}: rope_scaling.{unknown[0]} is no key of rope_type '{kind}'{near}; vLLM might obey it: remove it"
        )
    for key in ROPE_KEYS[kind]:
        if key not in rope and key in _OPTIONAL:
            continue
        value = rope.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise BundleError(f"{_PLACE}: rope_scaling.{key} must be a positive number for rope_type '{kind}', got {value!r}")
    if kind == "linear" and not isinstance(rope["factor"], float):
        factor = rope["factor"]
        raise BundleError(f"{_PLACE}: rope_scaling.factor is {factor}; vLLM's linear rotary embedding takes {factor}.0 only")
