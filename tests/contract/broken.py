"""Bundles that vLLM loads without a word and that are not what was trained: the comparison must see each of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def _flip(key: str) -> Callable[[dict[str, Any], Tensors], None]:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config[key] = not config[key]

    return change


def _swap_states(config: dict[str, Any], tensors: Tensors) -> None:
    """Give the first and the last tapped state to each other's part of fc."""
    width = config["target_hidden_size"]
    parts = list(tensors["fc.weight"].split(width, dim=1))
    parts[0], parts[-1] = parts[-1], parts[0]
    tensors["fc.weight"] = torch.cat(parts, dim=1).contiguous()


def _other_layers(config: dict[str, Any], tensors: Tensors) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [layer + (layer == 2) for layer in config["eagle_aux_hidden_state_layer_ids"]]


def _plain_rope(config: dict[str, Any], tensors: Tensors) -> None:
    config["rope_scaling"] = None


def _no_map(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors["d2t"]


BREAKS: dict[str, Callable[[dict[str, Any], Tensors], None]] = {
    "norm_output flipped": _flip("norm_output"),
    "norm_before_residual flipped": _flip("norm_before_residual"),
    "states swapped": _swap_states,
    "another layer tapped": _other_layers,
    "rope scaling lost": _plain_rope,
    "map lost": _no_map,
}


def broken_copy(bundle: Path, how: str, folder: Path) -> Path:
    """Write a copy of a bundle to `folder`, broken in the named way, and return it."""
    shutil.copytree(bundle, folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    BREAKS[how](config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
