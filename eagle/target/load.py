"""Loading the target: from config to a folder, from a folder to model, tokenizer and dimensions; torch set-up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from eagle import manifest
from eagle.config import TargetConfig
from eagle.errors import ConfigError, PreflightError, closest
from eagle.target.demo import ensure_demo
from eagle.target.resolve import local_target

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]  # never pickled weights


@dataclass(frozen=True)
class TargetDims:
    """The target's numbers, as its config.json and generation_config.json give them.

    `rope_parameters` has transformers 5's form: rope_type, rope_theta and the scaling's own keys in one flat dict.
    `eos_token_ids` joins the ids of both files, ascending; it may be empty.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a config dtype ('float32' or 'bfloat16')."""
    return _DTYPES[name]


def ensure_target(config: TargetConfig, root: Path, cache: Path) -> Path:
    """Return the target's Hugging Face folder: the demo (converted if needed), a local folder, or a hub snapshot.

    Only a hub name uses the network, and only what is not under `cache`/hub yet is downloaded.
    Raises ConfigError for an unusable folder, PreflightError when the demo's package or the hub cannot be had.
    """
    if config.model == "demo":
        return ensure_demo(cache)
    folder = local_target(config, root, cache)
    return folder if folder is not None else _download(config, cache)


def _download(config: TargetConfig, cache: Path) -> Path:
    import httpx  # here: only hub targets need them
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(config.model, revision=config.revision, cache_dir=cache / "hub", allow_patterns=_HUB_FILES))
    except HFValidationError:
        near = closest(config.model, ["demo"])
        raise ConfigError(f"target.model: '{config.model}' is neither a folder nor a hub name{near}") from None
    except (OSError, httpx.HTTPError) as error:  # offline, unknown name or revision, gated: all OSError but transport errors
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PreflightError(
            f"target.model: cannot fetch '{config.model}' from the hub{closest(config.model, ['demo'])}: {why}; "
            "check the name and the network, or give a local folder"
        ) from None


def load_target(path: Path, dtype: str, device: str = "cpu", *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the target causal LM for inference: eval mode, no gradients, SDPA attention.

    `dtype` is 'float32' or 'bfloat16', `device` a torch device. Only safetensors weights are read.
    Raises ConfigError when the folder holds no model that transformers can build.
    """
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=_DTYPES[dtype], attn_implementation="sdpa", use_safetensors=True,
            local_files_only=True, trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"target.model: cannot load {path}: {_first_line(error)}") from None
    model.requires_grad_(False)
    loaded: PreTrainedModel = model.eval()
    loaded.to(torch.device(device))  # type: ignore[arg-type]
    return loaded


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside the target. Raises ConfigError when there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"target.model: cannot load the tokenizer in {path}: {_first_line(error)}") from None
    return tokenizer


def target_dims(path: Path) -> TargetDims:
    """Read the target's dimensions from config.json and generation_config.json; nothing heavy is loaded.

    Raises ConfigError naming the key that is missing. Of a multi-modal target the text model's part is read.
    """
    raw = _read_config(path / "config.json")
    text = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else raw
    try:
        heads = int(text["num_attention_heads"])
        hidden = int(text["hidden_size"])
        return TargetDims(
            hidden_size=hidden,
            num_layers=int(text["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate_size=int(text["intermediate_size"]),
            vocab_size=int(text["vocab_size"]),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope_parameters=_rope_parameters(text),
            max_position_embeddings=int(text.get("max_position_embeddings", 2048)),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
            bos_token_id=next(iter(_ids(text.get("bos_token_id"))), None),
            eos_token_ids=_eos_ids(path, text),
        )
    except KeyError as error:
        raise ConfigError(f"{path / 'config.json'}: no key {error}; targets are decoder-only models of the Llama kind") from None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = manifest.read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.model: cannot read {path}: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"target.model: {path} is not a JSON object")
    return content


def _rope_parameters(text: dict[str, Any]) -> dict[str, Any]:
    """Join rope_parameters (transformers 5) or rope_theta + rope_scaling (4) into one flat dict."""
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if isinstance(rope.get("full_attention"), dict):  # one dict per kind of layer: the draft attends to everything
        rope = dict(rope["full_attention"])
    kind = rope.pop("type", None)  # the key's name before transformers 4.43
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", text.get("rope_theta") or 10000.0)
    rope["rope_theta"] = float(rope["rope_theta"])
    if "partial_rotary_factor" in text:
        rope.setdefault("partial_rotary_factor", text["partial_rotary_factor"])
    return rope


def _eos_ids(path: Path, text: dict[str, Any]) -> tuple[int, ...]:
    ids = set(_ids(text.get("eos_token_id")))
    if (path / "generation_config.json").is_file():
        ids |= set(_ids(_read_config(path / "generation_config.json").get("eos_token_id")))
    return tuple(sorted(ids))


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def setup_torch(threads: int, seed: int) -> None:
    """Set threads (0 = all cores this process may use), flush denormals, seed torch, prefer deterministic algorithms.

    Call it before any computation: oneDNN reads its cache size once.

    Denormals: softmax tails and Adam's second moments reach them, and each such operation is then many times slower.
    """
    torch.set_num_threads(threads or available_cores())
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass a buffer
    torch.backends.cudnn.benchmark = False
    # oneDNN keeps the kernels and buffers of 1,024 shapes; batches of ragged rows have a new shape each, and memory only grows.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def available_cores() -> int:
    """Return how many cores this process may use (its affinity mask where the system has one)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pick_device(name: str) -> str:
    """Return 'cpu' or 'cuda' for `runtime.device`; PreflightError when 'cuda' is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise PreflightError("runtime.device: cuda is asked for, but torch sees no CUDA device; use auto or cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
