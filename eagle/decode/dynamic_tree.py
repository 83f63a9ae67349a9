"""Dynamic draft trees as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858), from any EAGLE draft of this project.

Expansion: at every level the `top_k` most promising nodes are fed to the draft in one pass, and each gets its `top_k`
most probable children. A node's promise is the product of the draft's probabilities on its path. Reranking: of all
nodes, the `nodes` most promising are verified; a parent is never less promising than its child, so they form a tree.
The tree depends on the draft's distributions only and nothing in it is drawn, so verification stays lossless at every
temperature (methods of `eagle.decode.judge`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.decode.cache import Branches
from eagle.decode.drafting import EagleDrafter
from eagle.decode.proposal import Draws, Proposal
from eagle.draft.model import DraftModel
from kernels.packed import linear

_STEP = 1e-9  # keeps a child behind its parent where the draft is certain


@dataclass(frozen=True)
class TreeShape:
    """`top_k`: nodes expanded per level and children of each; `nodes`: verified per round; `deepest`: levels at most."""

    top_k: int = 6
    nodes: int = 16
    deepest: int = 6

    def __post_init__(self) -> None:
        if min(self.top_k, self.nodes, self.deepest) < 1:
            raise ValueError(f"a tree needs top_k, nodes and depth of at least 1, not {self}")


class EagleTreeDrafter(EagleDrafter):
    """`EagleDrafter` that proposes a dynamic tree per row; `length` is its depth, at most `shape.deepest`."""

    deterministic = True
    branches = True

    def __init__(self, draft: DraftModel, embed: Tensor, *, batch: int, max_length: int, shape: TreeShape | None = None) -> None:
        self._shape = shape or TreeShape()
        self.max_nodes = self._shape.nodes
        reach = self._shape.top_k * self._shape.deepest + 1
        super().__init__(draft, embed, batch=batch, max_length=max_length, reach=reach)

    def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
        """See `Drafter.draft`."""
        count, top_k = len(rows), min(self._shape.top_k, self.spec.draft_vocab_size)
        scores, tokens = self._children(self._normed[rows][:, None], self._normed.new_zeros(count, 1, dtype=torch.float64))
        parents = torch.full_like(tokens, -1)
        frontier = torch.arange(tokens.shape[1], device=tokens.device).expand(count, -1)  # candidates to expand
        hidden = self._feedback[rows][:, None].expand(-1, top_k, -1)
        seen = torch.eye(top_k, dtype=torch.bool, device=tokens.device).expand(count, -1, -1)
        base = [self._next[row] for row in rows]
        for level in range(min(length, self._shape.deepest) - 1):
            fed = tokens.gather(1, frontier)
            positions = torch.tensor([b + level for b in base], device=tokens.device)[:, None].expand(-1, top_k)
            starts = [b + level * top_k for b in base]
            normed, feedback = self.forward(rows, fed, hidden, starts, Branches(base, positions, seen))
            new_scores, new_tokens = self._children(normed, scores.gather(1, frontier))
            origin = frontier.repeat_interleave(top_k, dim=1)
            best = new_scores.topk(top_k, dim=1).indices
            place = best // top_k  # which of the fed nodes each is a child of
            hidden = feedback.gather(1, place[:, :, None].expand(-1, -1, feedback.shape[-1]))
            past = seen.gather(1, place[:, :, None].expand(-1, -1, seen.shape[-1]))
            own = torch.eye(top_k, dtype=torch.bool, device=tokens.device).expand(count, -1, -1)
            seen = torch.cat([past, own], dim=2)
            frontier = best + tokens.shape[1]
            tokens, scores = torch.cat([tokens, new_tokens], dim=1), torch.cat([scores, new_scores], dim=1)
            parents = torch.cat([parents, origin], dim=1)
        return self._rerank(tokens, parents, scores)

    def _children(self, normed: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return log promise and target ids [n, m * top_k] of the children of m nodes, from normed [n, m, H] and theirs [n, m]."""
        logits = linear(normed, self._head)
        best = logits.topk(min(self._shape.top_k, logits.shape[-1]), dim=-1)
        log_p = best.values.double() - logits.double().logsumexp(dim=-1, keepdim=True)
        ids = best.indices if self.ids is None else self.ids[best.indices]
        return (scores[:, :, None] + log_p.clamp_max(0.0) - _STEP).flatten(1), ids.flatten(1)

    def _rerank(self, tokens: Tensor, parents: Tensor, scores: Tensor) -> Proposal:
        """Keep the most promising candidates, in the order they were made: parents before children."""
        kept = scores.topk(min(self._shape.nodes, scores.shape[1]), dim=1).indices.sort(dim=1).values
        origin = parents.gather(1, kept)
        place = torch.searchsorted(kept, origin.clamp_min(0))
        return Proposal(tokens.gather(1, kept), parents=torch.where(origin < 0, origin, place))
