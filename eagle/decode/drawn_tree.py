"""Trees whose children are drawn from the draft without replacement, in a fixed shape.

At temperature > 0 such a tree is judged by multi-round rejection sampling (`eagle.decode.trees.verify_tree_drawn`). Its
shape may not depend on what was drawn: dropping a node because of its own probability would bias the text (DSpark,
arXiv 2607.05147, appendix A). Greedily the children are the most probable ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle.decode.cache import Branches
from eagle.decode.drafting import EagleDrafter
from eagle.decode.proposal import Draws, Proposal
from eagle.decode.sampling import distribution
from eagle.decode.verify import draw
from eagle.draft.model import DraftModel
from kernels.packed import linear

WIDTHS = (3, 2, 1, 1)


class DrawnTreeDrafter(EagleDrafter):
    """`EagleDrafter` that proposes a tree in which each node of depth d has `widths[d]` children.

    `length` is its depth, at most the number of `widths`. Raises ValueError for a width below 1.
    """

    branches = True

    def __init__(self, draft: DraftModel, embed: Tensor, *, batch: int, max_length: int, widths: Sequence[int] = WIDTHS) -> None:
        if not widths or min(widths) < 1 or max(widths) > draft.spec.draft_vocab_size:
            raise ValueError(f"each level of a tree has 1..{draft.spec.draft_vocab_size} children a node, not {list(widths)}")
        self._widths, self.lanes = tuple(widths), max(widths)
        counts = [1]
        for width in widths:
            counts.append(counts[-1] * width)
        self.max_nodes = sum(counts[1:])
        super().__init__(draft, embed, batch=batch, max_length=max_length, reach=self.max_nodes + 1)

    def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
        """See `Drafter.draft`."""
        widths = self._widths[:length]
        device, count = self._normed.device, len(rows)
        normed, feedback = self._normed[rows][:, None], self._feedback[rows][:, None]
        base = [self._next[row] for row in rows]
        seen = torch.zeros(count, 1, 0, dtype=torch.bool, device=device)
        above = torch.full((count, 1), -1, device=device)  # the nodes whose children come next
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        q: list[Tensor] = []
        total = 0
        for depth, width in enumerate(widths):
            if depth:
                own = torch.eye(above.shape[1], dtype=torch.bool, device=device).expand(count, -1, -1)
                seen = torch.cat([seen, own], dim=2)
                starts = [b + total - above.shape[1] for b in base]
                positions = torch.tensor([b + depth - 1 for b in base], device=device)[:, None].expand(-1, above.shape[1])
                normed, feedback = self.forward(rows, tokens[-1], feedback, starts, Branches(base, positions, seen))
            logits = linear(normed, self._head)
            if draws is None:
                index = logits.topk(width, dim=-1).indices
            else:
                index, level = _without_replacement(distribution(logits, draws.warp), width, draws.uniforms[:, depth])
                q.append(level)
            parents.append(above.repeat_interleave(width, dim=1))
            tokens.append((index if self.ids is None else self.ids[index]).flatten(1))
            feedback = feedback.repeat_interleave(width, dim=1)
            seen = seen.repeat_interleave(width, dim=1)
            above = torch.arange(total, total + tokens[-1].shape[1], device=device).expand(count, -1)
            total += tokens[-1].shape[1]
        nodes, origin = torch.cat(tokens, dim=1), torch.cat(parents, dim=1)
        if draws is None:
            return Proposal(nodes, parents=origin)
        leaves = q[0].new_zeros(count, above.shape[1], q[0].shape[-1])
        return Proposal(nodes, parents=origin, probabilities=torch.cat([*q, leaves], dim=1), ids=self.ids, widths=widths)


def _without_replacement(q: Tensor, width: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw `width` indices [n, m, width] from each of q [n, m, Vd], the former ones taken out; returns them and q.

    `uniforms` [n, lanes]: one number per draw, the same for the m nodes of a level: at most one of them is on the path
    that is accepted. Where q has no mass left, the index means nothing (the verifier skips it).
    """
    count, nodes, size = q.shape
    left = q.double().reshape(-1, size)
    found = []
    for rank in range(width):
        number = uniforms[:, rank].repeat_interleave(nodes)
        index = draw(left, number).clamp_max(size - 1)
        found.append(index)
        left = left.scatter(1, index[:, None], 0.0)
    return torch.stack(found, dim=1).view(count, nodes, width), q
