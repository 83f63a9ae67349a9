"""The numbers of a draft network, their form in vLLM's config.json, and the list of tensors that follows from them.

vLLM refuses an unknown tensor but is silent about a missing one, so `expected_tensors` is the contract that saving,
loading and the bundle check all use. Keys and semantics: vLLM `model_executor/models/llama_eagle3.py` and
`transformers_utils/configs/eagle.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle.config import DraftConfig
from eagle.errors import BundleError, ConfigError, closest
from eagle.target.load import TargetDims

ARCHITECTURE = "LlamaForCausalLMEagle3"
MOST_LAYERS = 1024  # of a draft that is read: the names of a damaged file's layers would fill the memory
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Rotary embeddings that transformers and vLLM compute alike, with the keys each of them reads.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}


@dataclass(frozen=True)
class DraftSpec:
    """Every number of a draft. `vocab_size` is the target's config value; `bos_token_id` and `eos_token_id` are the target's.

    `rope_parameters` is flat, transformers 5's form (rope_type, rope_theta, scaling keys). `aux_layers` are vLLM's ids,
    ascending and distinct.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    @property
    def num_aux(self) -> int:
        """Number of tapped hidden states."""
        return len(self.aux_layers)

    @property
    def reduced_vocab(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's (then d2t and t2d exist)."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def own_embedding(self) -> bool:
        """Whether the draft has its own embed_tokens.weight: it can share the target's only at the same width."""
        return self.hidden_size != self.target_hidden_size

    @classmethod
    def from_config(cls, draft: DraftConfig, dims: TargetDims, aux_layers: tuple[int, ...]) -> DraftSpec:
        """Fill every number from the config section and the target; null widths follow the target.

        A draft vocabulary larger than the target's becomes the target's. A rotary embedding that transformers and vLLM
        compute differently (dynamic, longrope, partial) becomes the plain one: the draft is trained with its own.
        Raises ConfigError when the head dimension is odd.
        """
        head_dim = draft.head_dim or dims.head_dim
        if head_dim % 2:
            raise ConfigError(f"draft.head_dim: {head_dim} is odd; rotary embeddings need an even one (for example {head_dim + 1})")
        return cls(
            hidden_size=draft.hidden_size or dims.hidden_size,
            target_hidden_size=dims.hidden_size,
            intermediate_size=draft.intermediate_size or default_intermediate_size(dims.intermediate_size),
            num_layers=draft.layers,
            num_heads=draft.heads,
            num_kv_heads=draft.kv_heads,
            head_dim=head_dim,
            vocab_size=dims.vocab_size,
            draft_vocab_size=min(draft.vocab_size or dims.vocab_size, dims.vocab_size),
            aux_layers=tuple(sorted(set(aux_layers))),
            rms_norm_eps=dims.rms_norm_eps,
            rope_parameters=_portable_rope(dims.rope_parameters),
            max_position_embeddings=dims.max_position_embeddings,
            fc_norm=draft.fc_norm,
            norm_output=draft.norm_output,
            norm_before_residual=draft.norm_before_residual,
            bos_token_id=dims.bos_token_id,
            eos_token_id=tuple(dims.eos_token_ids),
        )

    def to_vllm_config(self, dtype: str = "float32") -> dict[str, Any]:
        """Return the content of config.json: every flag written out, aux ids at the top level.

        The rotary embedding is written as rope_theta and rope_scaling, which transformers 4 and 5 both read.

        `dtype` names the weights' dtype ('float32' | 'bfloat16' | 'float16'); vLLM runs the draft in the target's.
        """
        scaling = {key: value for key, value in self.rope_parameters.items() if key != "rope_theta"}
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_parameters["rope_theta"],
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": False,
            "num_aux_hidden_states": self.num_aux,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(self.aux_layers)},
            "torch_dtype": dtype,
        }
        if self.bos_token_id is not None:
            config["bos_token_id"] = self.bos_token_id
        if self.eos_token_id:
            config["eos_token_id"] = self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id)
        return config

    @classmethod
    def from_vllm_config(cls, config: Mapping[str, Any]) -> DraftSpec:
        """Read a config.json as written by `to_vllm_config`. Raises BundleError naming the key that is missing or unusable."""
        _check_fixed(config)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise BundleError(f"config.json: rope_scaling must be null or an object, got {rope!r}")
        rope = {"rope_type": "default", **rope}
        eos = _tokens(config, "eos_token_id")
        return cls(
            hidden_size=_int(config, "hidden_size"),
            target_hidden_size=_int(config, "target_hidden_size"),
            intermediate_size=_int(config, "intermediate_size"),
            num_layers=_int(config, "num_hidden_layers", MOST_LAYERS),
            num_heads=_int(config, "num_attention_heads"),
            num_kv_heads=_int(config, "num_key_value_heads"),
            head_dim=_int(config, "head_dim"),
            vocab_size=_int(config, "vocab_size"),
            draft_vocab_size=_int(config, "draft_vocab_size"),
            aux_layers=_aux_layers(config),
            rms_norm_eps=_float(config, "rms_norm_eps"),
            rope_parameters={**rope, "rope_theta": _float(rope if rope.get("rope_theta") else config, "rope_theta")},
            max_position_embeddings=_int(config, "max_position_embeddings"),
            fc_norm=_bool(config, "fc_norm"),
            norm_output=_bool(config, "norm_output"),
            norm_before_residual=_bool(config, "norm_before_residual"),
            bos_token_id=next(iter(_tokens(config, "bos_token_id")), None),
            eos_token_id=eos,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return {**asdict(self), "aux_layers": list(self.aux_layers), "eos_token_id": list(self.eos_token_id)}


def default_intermediate_size(target: int) -> int:
    """Return the draft's MLP width when the configuration leaves it open: two thirds of the target's, rounded up to 64."""
    return min(-(-(2 * target) // (3 * 64)) * 64, target)


def expected_tensors(spec: DraftSpec, dtype: torch.dtype = torch.float32) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return every tensor of a draft checkpoint: name -> (shape, dtype), floats in `dtype`, d2t int64, t2d bool.

    d2t [Vd] holds offsets (target id = draft id + d2t[draft id]); both maps exist only when Vd < V.
    """
    h, inter, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv = spec.num_heads * d, spec.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, spec.num_aux * spec.target_hidden_size)}
    if spec.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (spec.target_hidden_size,) for i in range(spec.num_aux)}
    if spec.own_embedding:
        shapes["embed_tokens.weight"] = (spec.vocab_size, h)
    shapes["layers.0.hidden_norm.weight"] = (h,)
    for i in range(spec.num_layers):
        at, width = f"layers.{i}", 2 * h if i == 0 else h
        shapes |= {
            f"{at}.input_layernorm.weight": (h,),
            f"{at}.post_attention_layernorm.weight": (h,),
            f"{at}.self_attn.q_proj.weight": (q, width),
            f"{at}.self_attn.k_proj.weight": (kv, width),
            f"{at}.self_attn.v_proj.weight": (kv, width),
            f"{at}.self_attn.o_proj.weight": (h, q),
            f"{at}.mlp.gate_proj.weight": (inter, h),
            f"{at}.mlp.up_proj.weight": (inter, h),
            f"{at}.mlp.down_proj.weight": (h, inter),
        }
    shapes |= {"norm.weight": (h,), "lm_head.weight": (spec.draft_vocab_size, h)}
    tensors = {name: (shape, dtype) for name, shape in shapes.items()}
    if spec.reduced_vocab:
        tensors["d2t"] = ((spec.draft_vocab_size,), torch.int64)
        tensors["t2d"] = ((spec.vocab_size,), torch.bool)
    return tensors


def _portable_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(rope.get("rope_type", "default"))
    plain = {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))}
    if kind not in ROPE_KEYS or float(rope.get("partial_rotary_factor") or 1.0) != 1.0 or "mrope_section" in rope:
        return plain
    return {**plain, "rope_type": kind, **{key: rope[key] for key in ROPE_KEYS[kind] if key in rope}}


def _check_fixed(config: Mapping[str, Any]) -> None:
    """Refuse what this network does not compute, instead of computing something else."""
    for key, wanted in (("norm_before_fc", False), ("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if key in config and config[key] != wanted:
            raise BundleError(f"config.json: {key} is {config[key]!r}; this pipeline's drafts have {wanted!r}")


def _get(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise BundleError(f"config.json: no key '{key}'{closest(key, config)}; export the draft again")
    return config[key]


def _int(config: Mapping[str, Any], key: str, most: int = 2**31 - 1) -> int:
    value = _get(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BundleError(f"config.json: {key} must be a positive integer, at most {most}, got {value!r}")
    return value


def _float(config: Mapping[str, Any], key: str) -> float:
    value = _get(config, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1e38:
        raise BundleError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def _tokens(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return the ids under a key that holds none, one or several."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise BundleError(f"config.json: {key} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _bool(config: Mapping[str, Any], key: str) -> bool:
    value = _get(config, key)
    if not isinstance(value, bool):
        raise BundleError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def _aux_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = _get(config, "eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise BundleError(f"config.json: eagle_aux_hidden_state_layer_ids must be a list of layer ids, got {ids!r}")
    if ids != sorted(set(ids)):
        raise BundleError(f"config.json: eagle_aux_hidden_state_layer_ids {ids} must be ascending and distinct (vLLM sorts them)")
    if config.get("num_aux_hidden_states", len(ids)) != len(ids):
        given = config["num_aux_hidden_states"]
        raise BundleError(f"config.json: num_aux_hidden_states is {given} but {len(ids)} layer ids are given")
    return tuple(ids)
