"""Checkpoints of a training run: weights, optimiser moments, random state and counters, without pickle.

A checkpoint is `state-<step>.safetensors` and, written after it, `state.json`, which names it. Both appear by rename,
so a kill at any moment leaves the former checkpoint or the new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle import manifest
from eagle.draft.io import save_tensors
from eagle.errors import StepFailed

STATE = "state.json"


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, extra: dict[str, Any]) -> None:
    """Write a checkpoint of `model` and `optimizer` after optimiser step `step`; `extra` is any finite JSON.

    The checkpoint before it is removed afterwards. Random state: torch's CPU generator (and CUDA's, where used).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in entry.items()}
    tensors["random.cpu"] = torch.get_rng_state()
    if next(model.parameters()).is_cuda:
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    name = f"state-{step:08d}.safetensors"
    save_tensors(folder / name, {key: value.detach().to("cpu").contiguous().clone() for key, value in tensors.items()})
    manifest.write_json(folder / STATE, {"file": name, "step": step, "extra": extra})
    for old in folder.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink()


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restore model, optimiser and random state in place; return the saved `extra`, or None when there is no checkpoint.

    Raises StepFailed when the checkpoint is not of this model and optimiser, or of another run's draft vocabulary.
    """
    if not (folder / STATE).is_file():
        return None
    saved = manifest.read_json(folder / STATE)
    path = folder / saved["file"]
    if not path.is_file():
        raise StepFailed(f"{folder / STATE} names {saved['file']}, which is gone; remove {folder} to train from the start")
    tensors = load_file(path)
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    mine = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    if {name: (t.shape, t.dtype) for name, t in weights.items()} != mine:
        raise StepFailed(f"{path}: its tensors are not those of this draft; remove {folder} to train from the start")
    for name, buffer in model.named_buffers():  # the map decides what every row of the head means
        if name in weights and not torch.equal(weights[name], buffer.to("cpu")):
            raise StepFailed(f"{path}: '{name}' is another run's draft vocabulary; remove {folder} to train from the start")
    model.load_state_dict(weights)
    _restore_optimizer(optimizer, tensors)
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    extra: dict[str, Any] = saved["extra"]
    return extra


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def remove_checkpoints(folder: Path) -> None:
    """Remove what `save_checkpoint` wrote in `folder`."""
    (folder / STATE).unlink(missing_ok=True)
    for path in folder.glob("state-*.safetensors"):
        path.unlink()
