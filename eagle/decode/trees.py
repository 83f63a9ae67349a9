"""Lossless verification of tree drafts: pure functions of probabilities, draft tokens and uniforms.

A tree of N nodes a row: `tokens` [n, N] (target ids), `parents` [n, N]: the index of each node's parent, smaller than
its own, or -1 for a child of the pending token. The target's opinion after the pending token is at index 0, after node i
at index 1 + i. The walk goes down from the pending token. No function waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.decode.verify import acceptance, draw, residual, scatter


@dataclass(frozen=True)
class TreeVerdict:
    """`path` [n, D] (int64): the node accepted at each depth, -1 from the first depth on where none was.

    `accepted` [n] (int64): accepted nodes, 0..D. `following` [n] (int64): the target's token after them.
    """

    path: Tensor
    accepted: Tensor
    following: Tensor


def verify_tree_greedy(tokens: Tensor, parents: Tensor, open_: Tensor | None, choices: Tensor, depth: int) -> TreeVerdict:
    """Follow the target's choices [n, 1 + N] down the tree, at most `depth` nodes deep.

    Nodes whose `open_` [n, N] is False are never accepted. Of two children with the same token the first is taken.
    """
    return _walk(tokens, parents, open_, depth, lambda at, _: choices.gather(1, at[:, None])[:, 0])


def verify_tree_coupled(
    tokens: Tensor, parents: Tensor, open_: Tensor | None, p: Tensor, token_uniform: Tensor
) -> TreeVerdict:
    """Follow the target's own draws down a tree that was drafted without randomness, as `verify.verify_coupled` does.

    `p` [n, 1 + N, V]: the target's probabilities; `token_uniform` [n, D+1]: one number per position, so that the text is
    the one that plain sampling draws with them, whatever was drafted. Rows are drawn along the path only.
    """
    rows = torch.arange(len(p), device=p.device)
    depth = token_uniform.shape[1] - 1
    return _walk(tokens, parents, open_, depth, lambda at, level: draw(p[rows, at], token_uniform[:, level]))


def verify_tree_drawn(
    tokens: Tensor,
    parents: Tensor,
    widths: Sequence[int],
    q: Tensor,
    p: Tensor,
    ids: Tensor | None,
    accept_uniform: Tensor,
    token_uniform: Tensor,
) -> TreeVerdict:
    """Multi-round rejection sampling (SpecInfer, arXiv:2305.09781, algorithm 2) of children drawn without replacement.

    `widths` [D]: the most children that a node of each depth (the pending token's first) has. `q` [n, 1 + N, Vd]: what the
    children of each node were drawn from, with `ids` [Vd] as in `verify.scatter`; the children of a node, in the order of
    their indices, must be successive draws from q with the former children's mass taken out. Where q runs out of mass, the
    remaining children may be anything: a token that q has no mass left for is skipped. `p` [n, 1 + N, V];
    `accept_uniform` [n, N], a number per node; `token_uniform` [n, D+1], a number per position.

    Each child x in turn is accepted with probability min(1, p(x)/q(x)); after a rejection p becomes norm((p - q)+) and q
    loses x and is normalised. When all are rejected, the token comes from the p that is left. Sums are in float64.
    """
    count, nodes, vocab_size = len(p), tokens.shape[1], p.shape[2]
    rows = torch.arange(count, device=p.device)
    at = torch.zeros_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    weights, path = _normalised(p[:, 0].double()), []
    for width in widths:
        # A row that has stopped keeps its weights; what is computed for it here is not used.
        left, proposed = weights, _normalised(scatter(q[rows, at].double(), ids, vocab_size))
        taken = torch.full_like(rows, -1)
        children = parents == (at - 1)[:, None]
        order = children.long().cumsum(dim=1)
        for rank in range(1, width + 1 if nodes else 1):
            here = children & (order == rank)
            node = here.long().argmax(dim=1)
            token = tokens.gather(1, node[:, None])
            q_token = proposed.gather(1, token)[:, 0]
            tried = here.any(dim=1) & alive & (taken < 0) & (q_token > 0)
            kept = accept_uniform[rows, node] < acceptance(left.gather(1, token)[:, 0], q_token)
            taken = torch.where(tried & kept, node, taken)
            rejected = (tried & ~kept)[:, None]
            left = torch.where(rejected, _normalised(residual(left, proposed)), left)
            proposed = torch.where(rejected, _normalised(proposed.scatter(1, token, 0.0)), proposed)
        alive = alive & (taken >= 0)
        at = torch.where(alive, taken + 1, at)
        weights = torch.where(alive[:, None], _normalised(p[rows, at].double()), left)
        path.append(taken)
    return _verdict(rows, path, lambda accepted: draw(weights, token_uniform.gather(1, accepted[:, None])[:, 0]))


def _normalised(weights: Tensor) -> Tensor:
    """Return weights [n, V] divided by their sum; a row without mass stays as it is."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def _walk(
    tokens: Tensor, parents: Tensor, open_: Tensor | None, depth: int, choose: Callable[[Tensor, int], Tensor]
) -> TreeVerdict:
    """Go down to the child that has the target's token; `choose(at [n], level)` is that token after index `at`."""
    rows = torch.arange(len(tokens), device=tokens.device)
    at = torch.zeros_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    following, path = choose(at, 0), []
    for level in range(depth):
        match = (parents == (at - 1)[:, None]) & (tokens == following[:, None]) & alive[:, None]
        if open_ is not None:
            match = match & open_
        found, node = match.long().max(dim=1) if tokens.shape[1] else (torch.zeros_like(rows), rows)
        alive = found.bool()
        path.append(torch.where(alive, node, -1))
        at = torch.where(alive, node + 1, at)
        following = torch.where(alive, choose(at, level + 1), following)
    return _verdict(rows, path, lambda _: following)


def _verdict(rows: Tensor, path: list[Tensor], following: Callable[[Tensor], Tensor]) -> TreeVerdict:
    nodes = torch.stack(path, dim=1) if path else rows.new_zeros(len(rows), 0)
    accepted = (nodes >= 0).sum(dim=1)
    return TreeVerdict(nodes, accepted, following(accepted))
