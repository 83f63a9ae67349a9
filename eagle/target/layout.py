"""The target's weights laid out for decoding on CPU: its linear layers read blocked copies instead of their own weights.

A decode step is bound by reading the weights, and most of them are read by linear layers; see `kernels.packed`. Only for
inference: a laid-out layer has no parameter any more. Everything else of the model stays transformers' own.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.packed import can_pack, linear, packed


class PackedLinear(nn.Module):
    """A linear layer whose weight [O, I] is laid out; `extra` says whether the weight it was made from is still in use."""

    def __init__(self, made_from: nn.Linear, extra: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.extra = made_from.in_features, made_from.out_features, extra
        self._layout = packed(made_from.weight)
        self._bytes = made_from.weight.numel() * made_from.weight.element_size()
        self.bias = made_from.bias

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self._bytes

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        out = linear(x, self._layout)
        return out if self.bias is None else out + self.bias


def lay_out(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the linear layers of `model` by laid-out ones, in place, where this machine has such a layout; returns `model`.

    A weight that something else uses too (an embedding tied to the head) stays, so its layout is a second copy.
    """
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child, extra=users[id(child.weight)] > 1))
    return model


def weight_bytes(model: nn.Module, *, held: bool = False) -> int:
    """Return the bytes of the model's weights, laid out or not, each weight once; `held`: second copies count too."""
    plain = sum(p.numel() * p.element_size() for p in model.parameters())
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return plain + sum(layer.weight_bytes for layer in layers if held or not layer.extra)


