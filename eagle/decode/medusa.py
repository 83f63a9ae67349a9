"""Medusa-1: our implementation of a rival, so that it can be measured in the same engine as the draft.

Cai et al. 2024, arXiv 2401.10774. Heads on the target's last hidden state each predict one further token; their likeliest
tokens form a tree of fixed shape. Verification here is the engine's lossless one, not the paper's typical acceptance.
The heads are trained by eagle/train/medusa.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle import manifest
from eagle.decode.proposal import Drafter, Draws, Proposal
from eagle.draft import ops
from eagle.draft.io import CONFIG, WEIGHTS, save_tensors
from eagle.draft.model import compute_dtype
from eagle.errors import BundleError
from kernels.dispatch import add_rms_norm

FORMAT = "medusa-1"
Paths = tuple[tuple[int, ...], ...]


class MedusaHead(nn.Module):
    """One head: a residual block h + SiLU(W h + b), then a matrix over the vocabulary. The block starts as the identity."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.block = nn.Linear(hidden_size, hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        nn.init.zeros_(self.block.weight)
        nn.init.zeros_(self.block.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden [N, H] after the target's final norm -> logits [N, Vd], in autocast's dtype where it is on."""
        dtype = compute_dtype(self.lm_head.weight)
        turned = ops.linear(hidden.to(dtype), self.block.weight.to(dtype)) + self.block.bias.to(dtype)
        state = hidden + F.silu(turned)
        return ops.linear(state.to(dtype), self.lm_head.weight.to(dtype))


class MedusaHeads(nn.Module):
    """K heads with what goes with them. Head k (from 1) at position t predicts token t + 1 + k; the target's own says t + 1.

    `ids` [Vd]: the heads' vocabulary, ascending target ids. `norm` [H]: the weight of the target's final RMS norm, applied
    to hidden states of layer `aux_layer` (the residual stream after all layers, vLLM's id). `accuracies` [K][R]: the
    share of held-out tokens that were the head's likeliest, second likeliest, ... `paths`: the tree, each node as the ranks
    (from 0) that lead to it, parents first. `norm` and `ids` are not trained.
    """

    norm: Tensor
    ids: Tensor

    def __init__(self, heads: int, norm: Tensor, eps: float, ids: Tensor, aux_layer: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(MedusaHead(len(norm), len(ids)) for _ in range(heads))
        self.register_buffer("norm", norm.detach().float().clone())
        self.register_buffer("ids", ids.detach().clone())
        self.eps, self.aux_layer = eps, aux_layer
        self.accuracies: list[list[float]] = []
        self.paths: Paths = tuple((0,) * depth for depth in range(1, heads + 1))

    def normed(self, aux: Tensor) -> Tensor:
        """Apply the final norm to hidden states aux [..., H] of `aux_layer`; the result is in the weights' dtype."""
        return add_rms_norm(aux.to(self.norm.dtype), None, self.norm, self.eps)[0]


def choose_paths(accuracies: Sequence[Sequence[float]], nodes: int) -> Paths:
    """Return the tree of `nodes` nodes that maximises the expected accepted length, if the heads were right independently.

    accuracies [K][R]: chance that the token of rank r of head k is right. A node is accepted with the product of its ranks'
    chances, so the nodes of the largest products are the best tree: a parent's is never smaller than its child's. There
    are fewer than `nodes` when not so many have a chance above 0 (the paper's sparse trees are grown alike).
    Raises ValueError when `nodes` < 1 or no accuracies are given.
    """
    if nodes < 1 or not accuracies:
        raise ValueError(f"a tree has at least 1 node and 1 head, not {nodes} nodes and {len(accuracies)} heads")
    ahead: list[tuple[float, tuple[int, ...]]] = [(-chance, (rank,)) for rank, chance in enumerate(accuracies[0])]
    heapq.heapify(ahead)
    paths: list[tuple[int, ...]] = []
    while ahead and len(paths) < nodes:
        value, path = heapq.heappop(ahead)
        if value == 0 and paths:  # heads that are never right still get one node: a draft is never empty
            break
        paths.append(path)
        if len(path) < len(accuracies):
            for rank, chance in enumerate(accuracies[len(path)]):
                heapq.heappush(ahead, (value * chance, (*path, rank)))
    return tuple(paths)


def save_medusa(folder: Path, heads: MedusaHeads) -> None:
    """Write heads into `folder` (made if missing): config.json and model.safetensors, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, {name: t.detach().cpu().contiguous().clone() for name, t in heads.state_dict().items()})
    about = {
        "format": FORMAT, "heads": len(heads.heads), "aux_layer": heads.aux_layer, "rms_norm_eps": heads.eps,
        "accuracies": heads.accuracies, "paths": [list(path) for path in heads.paths],
    }
    manifest.write_json(folder / CONFIG, about)


def load_medusa(folder: Path) -> MedusaHeads:
    """Load what `save_medusa` wrote, on the CPU in fp32. Raises BundleError when it is not that."""
    try:
        about, state = manifest.read_json(folder / CONFIG), load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise BundleError(f"{folder}: no Medusa heads can be read: {str(error).splitlines()[0]}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise BundleError(f"{folder / CONFIG}: not the configuration of Medusa heads (format '{FORMAT}')")
    try:
        heads = MedusaHeads(about["heads"], state["norm"], about["rms_norm_eps"], state["ids"], about["aux_layer"])
        heads.load_state_dict(state)
        heads.accuracies = about["accuracies"]
        heads.paths = tuple(tuple(path) for path in about["paths"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise BundleError(f"{folder}: the Medusa heads are incomplete: {str(error).splitlines()[0]}; train them again") from None
    return heads


class MedusaDrafter(Drafter):
    """Proposes the tree `heads.paths`: at depth k the likeliest tokens of head k at the last position with a hidden state.

    `draft`'s `length` is the most levels; there are never more than heads. `dtype` and `device`: the target's. The heads
    are copied; only the last hidden state of each row is kept. Raises ValueError for a path whose parent is not before it.
    """

    deterministic = True
    branches = True

    def __init__(self, heads: MedusaHeads, *, batch: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.aux_layers = (heads.aux_layer,)
        self.max_nodes = len(heads.paths)
        made = [head for head in heads.heads if isinstance(head, MedusaHead)]
        self._weight = torch.stack([head.block.weight.detach() for head in made]).to(device, dtype)
        self._bias = torch.stack([head.block.bias.detach() for head in made]).to(device, dtype)[:, None]
        self._lm_head = torch.stack([head.lm_head.weight.detach() for head in made]).to(device, dtype)
        self._norm, self._ids, self._eps = heads.norm.to(device, dtype), heads.ids.to(device), heads.eps
        self._last = torch.zeros(batch, len(heads.norm), dtype=dtype, device=device)
        self._trees = [_tree(heads.paths, depth) for depth in range(1, len(made) + 1)]

    @property
    def depth(self) -> int:
        """Levels of the deepest tree: one per head."""
        return len(self._trees)

    def extend(self, rows: list[int], tokens: Tensor, aux: Tensor | None, starts: list[int], counts: list[int]) -> None:
        """See `Drafter.extend`. Raises ValueError without hidden states."""
        if aux is None:
            raise ValueError("Medusa heads need the target's last hidden state")
        last = torch.tensor(counts, device=aux.device) - 1
        self._last[rows] = aux[torch.arange(len(rows), device=aux.device), last].to(self._last)

    def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
        """See `Drafter.draft`; `draws` is not used."""
        levels, ranks, parents = self._trees[min(length, len(self._trees)) - 1]
        depth, width = max(levels) + 1, max(ranks) + 1
        hidden = add_rms_norm(self._last[rows], None, self._norm, self._eps)[0].expand(depth, -1, -1)
        state = hidden + F.silu(torch.baddbmm(self._bias[:depth], hidden, self._weight[:depth].transpose(1, 2)))
        logits = torch.bmm(state, self._lm_head[:depth].transpose(1, 2))
        best = self._ids[logits.topk(width, dim=-1).indices]
        tokens = best[levels, :, ranks].transpose(0, 1).contiguous()
        return Proposal(tokens, torch.tensor([parents], device=tokens.device).expand(len(rows), -1))

    def move(self, source: int, destination: int) -> None:
        """See `Drafter.move`."""
        self._last[destination] = self._last[source]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the heads; the norm is the target's."""
        return sum(t.numel() * t.element_size() for t in (self._weight, self._bias, self._lm_head))

    @property
    def state_bytes(self) -> int:
        """Bytes of the rows' last hidden states."""
        return self._last.numel() * self._last.element_size()


def _tree(paths: Paths, depth: int) -> tuple[list[int], list[int], list[int]]:
    """Return level (from 0), rank and parent of the nodes of at most `depth` levels."""
    kept = [path for path in paths if len(path) <= depth]
    places: dict[tuple[int, ...], int] = {(): -1}
    for place, path in enumerate(kept):
        if path in places or path[:-1] not in places:
            raise ValueError(f"the tree's node {path} is there twice, or its parent does not come before it")
        places[path] = place
    return [len(path) - 1 for path in kept], [path[-1] for path in kept], [places[path[:-1]] for path in kept]
