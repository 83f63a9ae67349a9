"""Matrix products with weights that are laid out once: y = x W^T on CPU through oneDNN's blocked weight layout.

A decode step multiplies few rows with every weight once, so it is bound by reading the weights. `torch.nn.functional.linear`
reads them row by row in the order they are stored and, in bfloat16, reorders them at every call; laid out in oneDNN's
blocks they stream. 2*M*I*O flops and O*I weight elements read per call, for x [M, I] and W [O, I].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch can lay out `weight` [O, I]: on CPU, float32 or (where the processor has it) bfloat16."""
    if weight.device.type != "cpu" or weight.dim() != 2 or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def packed(weight: Tensor, rows: int = 1) -> Tensor:
    """Return `weight` [O, I] laid out for products with about `rows` rows, for `linear` only; itself where that is impossible."""
    if not can_pack(weight):
        return weight
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
    return found


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T [..., O] of x [..., I] and a weight [O, I], packed or not. No gradient flows through a packed weight."""
    if weight.is_mkldnn:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return found
    return F.linear(x, weight)
