"""The `speculators` layout of a draft (github.com/vllm-project/speculators, `Eagle3SpeculatorConfig`; read: 0.9.0).

The tensors have vLLM's names there too; config.json is another, and the target's embedding is shipped: where it is absent the
package computes with a random one (seen: 0.9.0 with transformers 5.19), without a word. Eagle 3.1's norms, several layers, a
pruned vocabulary and any number of tapped states can be said in it. What cannot is a draft of another width than its
target: the package's fc takes states as wide as the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle import manifest
from eagle.bundle.export import read_checkpoint
from eagle.config import DType
from eagle.draft.io import CONFIG, WEIGHTS, save_tensors, target_embedding
from eagle.draft.spec import FLOATS, DraftSpec
from eagle.errors import BundleError, ConfigError

ALGORITHM = "eagle3"
VERSION = "0.9.0"  # of the format as read; the package writes its own there and compares nothing


@dataclass(frozen=True)
class Verifier:
    """The target: its folder, and as the format names it: a hub name or a folder, and the architectures of its config.json."""

    folder: Path
    name: str
    architectures: tuple[str, ...]

    @classmethod
    def of(cls, target: Path, name: str | None = None) -> Verifier:
        """Describe a target's Hugging Face folder; `name` None = the folder itself. ConfigError when it has no config.json."""
        try:
            content = manifest.read_json(target / CONFIG)
            architectures = tuple(str(architecture) for architecture in content["architectures"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"target.model: {target / CONFIG}: cannot read the architectures ({type(error).__name__})") from None
        return cls(target, name or str(target.resolve()), architectures)


def export_speculators(draft: Path, folder: Path, verifier: Verifier, draft_tokens: int, dtype: DType) -> DraftSpec:
    """Write the checkpoint in `draft` to `folder` in the speculators layout, floats in `dtype`.

    `draft_tokens` is the draft length that servers take from the file. Raises BundleError as `read_checkpoint` does, and
    for a draft that the format cannot express, ConfigError for a target whose embedding does not fit; nothing is written then.
    """
    spec, tensors = read_checkpoint(draft, dtype)
    check_expressible(spec)
    tensors["embed_tokens.weight"] = _embedding(spec, verifier.folder, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, tensors)
    manifest.write_json(folder / CONFIG, speculators_config(spec, verifier, draft_tokens, dtype))
    return spec


def _embedding(spec: DraftSpec, target: Path, dtype: DType) -> Tensor:
    """Return the target's embedding [V, H], in `dtype` where that loses nothing: a rounded one would be another one."""
    embedding = target_embedding(target, spec)
    assert embedding is not None  # noqa: S101 -- for the type checker: the widths agree
    rounded = embedding.to(FLOATS[dtype])
    return rounded if torch.equal(rounded.float(), embedding) else embedding


def check_expressible(spec: DraftSpec) -> None:
    """Raise BundleError when the format has no way to say what this draft is."""
    if spec.own_embedding:
        raise BundleError(
            f"--format speculators: the draft is {spec.hidden_size} wide, its target {spec.target_hidden_size}: the format's fc "
            "takes hidden states of the draft's own width; use --format vllm, or train with draft.hidden_size=null"
        )


def speculators_config(spec: DraftSpec, verifier: Verifier, draft_tokens: int, dtype: DType) -> dict[str, Any]:
    """Return the content of config.json, every flag written out: vLLM's defaults for this format are not those of its own.

    vLLM counts three tapped states here unless `num_aux_hidden_states` stands in the layer's part.
    """
    native = spec.to_vllm_config(dtype)
    layer_keys = (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "vocab_size", "tie_word_embeddings",
        "max_position_embeddings", "num_aux_hidden_states", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    flags = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": ALGORITHM,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": ALGORITHM,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_tokens}],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": {
            **{key: native[key] for key in layer_keys if key in native},
            "rope_parameters": dict(spec.rope_parameters),
        },
        **{key: native[key] for key in flags},
        "eagle_aux_hidden_state_layer_ids": list(spec.aux_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
