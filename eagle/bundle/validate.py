"""The static check of a bundle against what vLLM's loader reads (`Eagle3LlamaForCausalLM` and `EAGLEConfig`).

vLLM refuses an unexpected tensor but is silent about a missing one, a wrong map, a lost flag and NaN: the draft then
proposes nonsense, which costs speed and shows nowhere. So each of these is an error here, with the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle import manifest
from eagle.bundle.limits import check_limits
from eagle.draft.io import CONFIG, WEIGHTS, check_tensors, read_spec, tensor_headers
from eagle.draft.spec import FLOATS, DraftSpec
from eagle.errors import BundleError, closest
from eagle.target.load import target_dims

# Keys that vLLM obeys and this pipeline's drafts never have: with them the network would compute something else.
FOREIGN_KEYS = (
    "logit_scale", "quantization_config", "sliding_window", "layer_types", "parallel_drafting",
    "speculators_model_type", "transformer_layer_config", "model",
)  # fmt: skip
# The head sizes that vLLM's CPU attention lists (v1/attention/backends/cpu_attn.py); 0.32 runs 48 all the same.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True)
class BundleReport:
    """What a sound bundle holds. `bytes` is the size of the weights on disk; `notes` are limits that are no errors."""

    folder: Path
    spec: DraftSpec
    dtype: str
    tensors: int
    parameters: int
    bytes: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        spec = self.spec
        vocabulary = f"{spec.draft_vocab_size} of {spec.vocab_size} tokens"
        lines = [
            f"bundle {self.folder}: sound",
            f"  {self.tensors} tensors, {self.parameters / 1e6:.1f} M parameters in {self.dtype}, {self.bytes / 2**20:.1f} MiB",
            f"  {spec.num_layers} layers, {spec.num_heads} heads of {spec.head_dim}, vocabulary {vocabulary}",
            f"  hidden states {', '.join(map(str, spec.aux_layers))}; fc_norm {spec.fc_norm}, norm_output {spec.norm_output}",
        ]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def check_bundle(folder: Path, target: Path | None = None) -> BundleReport:
    """Check a bundle folder, and with `target` (a Hugging Face folder) that it fits that target. Returns what it holds.

    Raises BundleError naming the first wrong key of config.json, the first tensor that is missing, unexpected, of
    another shape or dtype or not finite, a vocabulary map that is not ascending or out of range, a stray weight file, or
    what vLLM cannot run as it was trained (`limits`).
    """
    require_bundle(folder)
    spec = read_spec(folder)
    check_limits(spec)
    dtype = _check_config(folder, spec)
    _check_files(folder)
    weights = folder / WEIGHTS
    headers = tensor_headers(weights)
    _check_flags(headers, spec, weights)
    check_tensors(headers, spec, str(weights))
    for name, (_, found) in headers.items():
        if found.is_floating_point and found != FLOATS[dtype]:
            raise BundleError(f"{weights}: tensor '{name}' has dtype {found}, config.json's torch_dtype says {dtype}")
    parameters = _check_values(weights, spec)
    notes = check_fits(spec, target) if target is not None else []
    if spec.head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        notes.append(f"head_dim {spec.head_dim} is not among the sizes that vLLM's CPU attention lists ({sizes})")
    return BundleReport(folder, spec, dtype, len(headers), parameters, weights.stat().st_size, tuple(notes))


def require_bundle(folder: Path) -> None:
    """Raise BundleError when `folder` is none, or holds no config.json; it names the closest folder, or the bundle inside."""
    what = "give the bundle folder, the one that holds config.json"
    if not folder.is_dir():
        near = closest(folder.name, sorted(p.name for p in folder.parent.iterdir() if p.is_dir())) if folder.parent.is_dir() else ""
        raise BundleError(f"{folder} is a file; {what}" if folder.exists() else f"no folder {folder}{near}; {what}")
    if not (folder / CONFIG).is_file():
        inside = [folder / name for name in ("bundle/bundle", "bundle") if (folder / name / CONFIG).is_file()]
        raise BundleError(f"{folder}: no {CONFIG}; {f'the bundle is {inside[0]}' if inside else what}")


def _check_config(folder: Path, spec: DraftSpec) -> str:
    """Compare config.json key by key with what the spec that was read from it would be written as; return the dtype."""
    where = folder / CONFIG
    content: dict[str, Any] = manifest.read_json(where)
    for key in FOREIGN_KEYS:
        if content.get(key) is not None:
            raise BundleError(f"{where}: key '{key}' is set; vLLM would obey it and the draft was not trained so")
    dtype = content.get("torch_dtype")
    if not isinstance(dtype, str) or dtype not in FLOATS:
        raise BundleError(f"{where}: torch_dtype is {dtype!r}; one of {', '.join(FLOATS)} is wanted")
    for key, wanted in spec.to_vllm_config(dtype).items():
        if key not in content:
            raise BundleError(f"{where}: no key '{key}'{closest(key, content)}; export the draft again")
        if content[key] != wanted:
            raise BundleError(f"{where}: {key} is {content[key]!r}, wanted {wanted!r}")
    return dtype


def _check_files(folder: Path) -> None:
    if not (folder / WEIGHTS).is_file():
        raise BundleError(f"{folder}: no {WEIGHTS}; export the draft again")
    loaded = (".safetensors", ".safetensors.index.json")
    stray = sorted(p.name for p in folder.iterdir() if p.name.endswith(loaded) and p.name != WEIGHTS)
    if stray:
        raise BundleError(f"{folder}: stray file '{stray[0]}'; vLLM would load it too: remove it")


def _check_flags(headers: Mapping[str, object], spec: DraftSpec, weights: Path) -> None:
    """Name a norm flag and its tensors when they contradict each other; the general check would name the tensor only."""
    norms = sorted(name for name in headers if name.startswith("fc_norm."))
    if norms and not spec.fc_norm:
        raise BundleError(f"{weights}: tensor '{norms[0]}' is there but config.json says fc_norm false")
    if "input_norm.weight" in headers:
        raise BundleError(f"{weights}: tensor 'input_norm.weight' is there but config.json says norm_before_fc false")


def _check_values(weights: Path, spec: DraftSpec) -> int:
    """Read every tensor once: all finite, the maps in order. Returns the number of float parameters."""
    parameters = 0
    maps: dict[str, Tensor] = {}
    try:
        with safe_open(weights, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point():
                    maps[name] = tensor
                    continue
                parameters += tensor.numel()
                bad = int((~torch.isfinite(tensor)).sum())
                if bad:
                    raise BundleError(f"{weights}: tensor '{name}' has {bad} values that are not finite")
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{weights}: cannot be read as safetensors: {str(error).splitlines()[0]}") from None
    if spec.reduced_vocab:
        _check_maps(weights, spec, maps["d2t"], maps["t2d"])
    return parameters


def _check_maps(weights: Path, spec: DraftSpec, d2t: Tensor, t2d: Tensor) -> None:
    ids = torch.arange(spec.draft_vocab_size) + d2t
    outside = ((ids < 0) | (ids >= spec.vocab_size)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise BundleError(f"{weights}: tensor 'd2t' maps draft id {at} to {int(ids[at])}, outside 0..{spec.vocab_size - 1}")
    falls = (ids.diff() <= 0).nonzero()
    if len(falls):
        at = int(falls[0]) + 1
        tokens = f"token {int(ids[at])} after {int(ids[at - 1])}"
        raise BundleError(f"{weights}: tensor 'd2t' is not ascending: draft id {at} is {tokens}")
    if not torch.equal(t2d.nonzero().squeeze(1), ids):
        raise BundleError(f"{weights}: tensor 't2d' marks other tokens than 'd2t' maps to")


def check_fits(spec: DraftSpec, target: Path) -> list[str]:
    """Check that a draft fits a target's Hugging Face folder; return limits that are no errors. BundleError when it does not."""
    dims = target_dims(target)
    pairs = (("vocab_size", spec.vocab_size, dims.vocab_size), ("target_hidden_size", spec.target_hidden_size, dims.hidden_size))
    for key, found, wanted in pairs:
        if found != wanted:
            raise BundleError(f"config.json: {key} is {found}, the target {target} has {wanted}; is it the draft's target?")
    if spec.aux_layers[-1] > dims.num_layers:
        raise BundleError(
            f"config.json: eagle_aux_hidden_state_layer_ids {list(spec.aux_layers)} go beyond the target's {dims.num_layers} layers"
        )
    notes = []
    if spec.max_position_embeddings < dims.max_position_embeddings:
        notes.append(f"positions end at {spec.max_position_embeddings}, the target's at {dims.max_position_embeddings}")
    keys = ("rope_type", "rope_theta")
    if any(dims.rope_parameters.get(key) != spec.rope_parameters.get(key) for key in keys):
        notes.append("the rotary embedding is not the target's: sound, if the draft was trained so")
    return notes
