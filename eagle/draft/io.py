"""Draft checkpoints on disk: a folder with config.json and model.safetensors that vLLM loads as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle import manifest
from eagle.draft.model import DraftModel
from eagle.draft.spec import FLOATS, DraftSpec, expected_tensors
from eagle.errors import BundleError, ConfigError, closest

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
Found = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}


def check_tensors(found: Found, spec: DraftSpec, where: str = WEIGHTS) -> None:
    """Compare the tensors of a checkpoint, name -> (shape, dtype), with what `spec` asks for.

    Floats may have any one float dtype. Raises BundleError naming the first tensor that is missing, extra, of another
    shape or of another dtype.
    """
    expected = expected_tensors(spec)
    for name, (shape, dtype) in expected.items():
        if name not in found:
            near = closest(name, set(found) - set(expected))
            raise BundleError(f"{where}: tensor '{name}' is missing{near}; vLLM would not notice")
        got_shape, got_dtype = found[name]
        if tuple(got_shape) != shape:
            raise BundleError(f"{where}: tensor '{name}' has shape {tuple(got_shape)}, config.json asks for {shape}")
        fits = got_dtype in FLOATS.values() if dtype.is_floating_point else got_dtype == dtype
        if not fits:
            wanted = "a float" if dtype.is_floating_point else dtype
            raise BundleError(f"{where}: tensor '{name}' has dtype {got_dtype}, wanted {wanted}")
    extra = sorted(set(found) - set(expected))
    if extra:
        raise BundleError(f"{where}: unexpected tensor '{extra[0]}'{closest(extra[0], expected)}; vLLM would refuse to load it")


def read_spec(folder: Path) -> DraftSpec:
    """Read the DraftSpec of a checkpoint folder. Raises BundleError when config.json is missing or unusable."""
    try:
        content = manifest.read_json(folder / CONFIG)
    except OSError as error:
        raise BundleError(f"{folder / CONFIG}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{folder / CONFIG}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise BundleError(f"{folder / CONFIG}: not a JSON object")
    return DraftSpec.from_vllm_config(content)


def tensor_headers(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of a safetensors file without reading its data. BundleError when it is not one."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118  (not a dict)
                part = file.get_slice(name)
                found[name] = (tuple(part.get_shape()), _STORED.get(part.get_dtype(), torch.uint8))
            return found
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path}: cannot be read as safetensors: {str(error).splitlines()[0]}") from None


def save_draft(folder: Path, model: DraftModel, dtype: str = "float32") -> None:
    """Write the draft into `folder` (made if missing): config.json and model.safetensors with floats in `dtype`.

    Each file appears whole or not at all. Raises BundleError when the model's tensors are not those of its spec.
    """
    target = FLOATS[dtype]
    state = model.state_dict()
    check_tensors({name: (tuple(t.shape), t.dtype) for name, t in state.items()}, model.spec, "model")
    tensors = {name: _plain(t.to(target) if t.is_floating_point() else t) for name, t in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, tensors)
    manifest.write_json(folder / CONFIG, model.spec.to_vllm_config(dtype))


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically (temporary file, fsync, rename), readable by everybody."""
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.chmod(0o644)
    partial.replace(path)


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, contiguous and in its own memory, as safetensors wants it."""
    return tensor.detach().to("cpu").contiguous().clone()


def load_draft(folder: Path, target_folder: Path, device: str = "cpu", dtype: str | None = None) -> DraftModel:
    """Load a checkpoint for use with the target in `target_folder`, whose embedding is shared where the widths agree.

    `dtype` converts the weights ('float32' | 'bfloat16'); None keeps the file's. The model is in train mode, with
    gradients on. Raises BundleError for a missing, extra or mis-shaped tensor or a vocabulary map that does not fit,
    ConfigError when the target's embedding does not fit.
    """
    spec = read_spec(folder)
    check_tensors(tensor_headers(folder / WEIGHTS), spec, str(folder / WEIGHTS))
    state = load_file(folder / WEIGHTS)
    _check_map(state, spec, folder)
    model = DraftModel(spec, target_embedding(target_folder, spec))
    model.load_state_dict(state)
    return model.to(device=device, dtype=FLOATS[dtype] if dtype else state["fc.weight"].dtype)


def _check_map(state: dict[str, Tensor], spec: DraftSpec, folder: Path) -> None:
    if not spec.reduced_vocab:
        return
    ids = torch.arange(spec.draft_vocab_size) + state["d2t"]
    if int(ids[0]) < 0 or int(ids[-1]) >= spec.vocab_size or bool((ids.diff() <= 0).any()):
        raise BundleError(f"{folder / WEIGHTS}: tensor 'd2t' does not map to ascending ids within 0..{spec.vocab_size - 1}")
    if not torch.equal(state["t2d"].nonzero().squeeze(1), ids):
        raise BundleError(f"{folder / WEIGHTS}: tensors 't2d' and 'd2t' name different vocabularies")


def target_embedding(target_folder: Path, spec: DraftSpec) -> Tensor | None:
    """Return the target's embedding [V, H] fp32 for the draft to share, or None when the draft has its own."""
    if spec.own_embedding:
        return None
    embed = target_tensor(target_folder, "model.embed_tokens.weight")
    wanted = (spec.vocab_size, spec.hidden_size)
    if embed is None or tuple(embed.shape) != wanted:
        got = "none" if embed is None else tuple(embed.shape)
        raise ConfigError(
            f"target.model: the draft needs an embedding of shape {wanted}, {target_folder} has {got}; is it the draft's target?"
        )
    return embed.float()


def target_tensor(target_folder: Path, name: str) -> Tensor | None:
    """Return one tensor of a Hugging Face folder (single file or sharded safetensors), or None when it has none so named.

    Only that tensor is read. A prefix before the name (multi-modal checkpoints) is accepted.
    """
    files = sorted(target_folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"target.model: {target_folder} holds no safetensors weights; save the target with save_pretrained")
    tail = name.removeprefix("model.")
    candidates: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (not a dict)
                if key == name or (key.endswith("." + tail) and ".layers." not in key):
                    candidates[key] = path
    if not candidates:
        return None
    found = name if name in candidates else min(candidates, key=len)
    with safe_open(candidates[found], framework="pt") as file:
        tensor: Tensor = file.get_tensor(found)
    return tensor
