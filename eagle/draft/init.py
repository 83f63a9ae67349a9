"""Where a new draft starts: what can be taken from the target is taken, so that few steps suffice."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from eagle.draft.io import target_tensor
from eagle.draft.model import DraftModel
from eagle.errors import ConfigError

STD = 0.02  # the Llama family's initializer_range


def initialise(model: DraftModel, *, output_scale: float, generator: torch.Generator) -> None:
    """Draw all matrices from N(0, 0.02^2), norms at one; o_proj and down_proj are scaled by `output_scale`.

    Small output projections leave the residual stream near the fused target states at first.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = parameter.shape[1] ** -0.5 if name == "fc.weight" else STD
            parameter.normal_(0.0, std, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(output_scale)


def init_from_target(model: DraftModel, target_folder: Path) -> None:
    """Take the head's rows of the draft vocabulary and the final norm from the target.

    fc starts near the identity on the last tapped state: the draft then begins as a look through the target's own head
    at that state. Only for a draft as wide as its target; otherwise nothing is changed.
    Raises ConfigError when the target has no final norm or a head of another shape.
    """
    spec = model.spec
    if spec.own_embedding:
        return
    head = target_tensor(target_folder, "lm_head.weight")
    if head is None:  # tied to the embedding
        head = target_tensor(target_folder, "model.embed_tokens.weight")
    norm = target_tensor(target_folder, "model.norm.weight")
    with torch.no_grad():
        model.lm_head.weight.copy_(_fitting(head, "lm_head.weight", (spec.vocab_size, spec.hidden_size))[model.draft_ids().cpu()])
        model.norm.weight.copy_(_fitting(norm, "model.norm.weight", (spec.hidden_size,)))
        _near_identity(model.fc, spec.hidden_size)


def _fitting(tensor: Tensor | None, name: str, shape: tuple[int, ...]) -> Tensor:
    if tensor is None or tuple(tensor.shape) != shape:
        got = "nothing" if tensor is None else tuple(tensor.shape)
        raise ConfigError(f"target.model: {name} should have shape {shape}, found {got}; set distill.init_from_target=false")
    return tensor


def _near_identity(fc: nn.Linear, size: int) -> None:
    weight: Tensor = fc.weight
    weight.mul_(0.3)
    weight[:, -size:] += torch.eye(size, dtype=weight.dtype, device=weight.device)
