"""Losslessness of tree verification: exact distributions of the real functions, and walks against plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle.decode.sampling import SamplingParams
from eagle.decode.trees import TreeVerdict, verify_tree_coupled, verify_tree_drawn, verify_tree_greedy
from eagle.decode.verify import draw, verify_coupled, verify_greedy, verify_sampled
from tests.decode.exact import TOP, continued, distance, edge, tables, target_joint, token_masses


class DrawnTree:
    """All draws of a tree of fixed widths along the accepted path, each put to `verify_tree_drawn` as it is.

    The tree's other branches, and everything below the depth at hand, hold random tokens and probabilities: if they had
    any influence, the joint would not come out. Rows are kept as (weight, history, place, uniforms that lead there).
    """

    def __init__(
        self,
        widths: Sequence[int],
        vocab_size: int,
        params: SamplingParams,
        ids: Tensor | None,
        seed: int,
        draft: SamplingParams | None = None,
    ) -> None:
        self.widths, self.vocab_size, self.ids, self.seed = widths, vocab_size, ids, seed
        self.p = tables(seed, vocab_size, len(widths) + 1, params)
        self.q = tables(seed, vocab_size, len(widths), draft or params, ids, noise=1.0)
        self.names = torch.arange(vocab_size) if ids is None else ids
        parents: list[int] = []
        level = [-1]
        for width in widths:
            first = len(parents)
            parents += [parent for parent in level for _ in range(width)]
            level = list(range(first, len(parents)))
        self.parents = torch.tensor(parents)
        self.expected = 0.0  # accepted nodes

    def children(self, at: Tensor) -> Tensor:
        """Node indices [m, width] of the children of `at` [m] (0 = the pending token), in order."""
        return torch.stack([(self.parents == int(a) - 1).nonzero()[:, 0] for a in at])

    def draws(self, q: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """All ordered draws without replacement [r, width] and their probability [m, r] under q [m, Vd].

        Where q runs out of mass, the children left over are the first unused ones.
        """
        orders = torch.tensor(list(permutations(range(q.shape[1]), width)))
        weight, left = torch.ones(len(q), len(orders), dtype=torch.float64), q[:, None].repeat(1, len(orders), 1)
        for rank in range(width):
            index = orders[None, :, rank : rank + 1].expand(len(q), -1, 1)
            mass, total = left.gather(2, index)[:, :, 0], left.sum(2)
            used = torch.zeros(len(orders), q.shape[1]).scatter_(1, orders[:, :rank], 1.0)
            first = used.argmin(1) == orders[:, rank]
            weight = weight * torch.where(total > 0, mass / total.clamp_min(1e-300), first.double())
            left = left.scatter(2, index, 0.0)
        return orders, weight

    def measure(self) -> list[Tensor]:
        """Return masses as `exact.continued` takes them."""
        nodes, depth, size = len(self.parents), len(self.widths), self.vocab_size
        generator = torch.Generator().manual_seed(self.seed)
        weight, history, at = torch.ones(1, dtype=torch.float64), torch.zeros(1).long(), torch.zeros(1).long()
        accept = torch.full((1, nodes), TOP, dtype=torch.float64)
        tokens = torch.randint(0, size, (1, nodes), generator=generator)
        p = torch.softmax(torch.randn(1, 1 + nodes, size, generator=generator), -1).double()
        q = torch.softmax(torch.randn(1, 1 + nodes, len(self.names), generator=generator), -1).double()
        masses = []
        for level in range(depth + 1):
            rows = torch.arange(len(at))
            p[rows, at] = self.p[level][history]
            if level < depth:
                q[rows, at] = self.q[level][history]
                orders, odds = self.draws(q[rows, at], self.widths[level])
                source, order = (odds * weight[:, None]).nonzero(as_tuple=True)
                weight, history, at = weight[source] * odds[source, order], history[source], at[source]
                tokens, p, q, accept = tokens[source], p[source], q[source], accept[source]
                children = self.children(at)
                tokens.scatter_(1, children, self.names[orders[order]])

            def verdict(accept: Tensor, last: Tensor, tokens: Tensor = tokens, p: Tensor = p, q: Tensor = q) -> TreeVerdict:
                token = last[:, None].expand(-1, depth + 1)
                return verify_tree_drawn(tokens, self.parents.expand(len(p), -1), self.widths, q, p, self.ids, accept, token)

            going = []
            zero = torch.zeros(len(at), dtype=torch.float64)
            stay = weight
            for rank in range(self.widths[level] if level < depth else 0):
                here = children[:, rank : rank + 1]

                def path(u: Tensor, here: Tensor = here, accept: Tensor = accept) -> Tensor:
                    return verdict(accept.scatter(1, here, u[:, None]), torch.zeros_like(u)).path  # noqa: B023

                kept = edge(lambda u, level=level: path(u)[:, level] == here[:, 0], len(at))  # type: ignore[misc] # noqa: B023
                lead = accept.scatter(1, here, 0.0)
                going.append((stay * kept, history * size + tokens.gather(1, here)[:, 0], here[:, 0] + 1, tokens, p, q, lead))
                stay = stay * (1 - kept)
            live = stay > 1e-14
            assert (verdict(accept, zero).accepted == level)[live].all()
            self.expected += level * float(stay.sum())
            mass = torch.zeros(size ** (level + 1), dtype=torch.float64)
            found = token_masses(lambda u: verdict(accept, u).following, len(at), size) * stay[:, None]  # noqa: B023
            masses.append(mass.index_add_(0, (history[:, None] * size + torch.arange(size)).flatten(), found.flatten()))
            if going:
                weight, history, at, tokens, p, q, accept = (torch.cat(parts) for parts in zip(*going, strict=True))
                keep = weight > 0
                weight, history, at = weight[keep], history[keep], at[keep]
                tokens, p, q, accept = tokens[keep], p[keep], q[keep], accept[keep]
        return masses


@pytest.mark.parametrize(
    ("widths", "size", "params", "ids", "draft"),
    [
        ((2, 2, 1), 5, SamplingParams(1.0), None, None),
        ((2, 2, 1), 5, SamplingParams(0.7, top_k=3), torch.tensor([3, 0, 4]), None),
        ((2, 2, 1), 5, SamplingParams(1.3, top_p=0.8), torch.tensor([0, 1, 2, 4]), None),
        ((3, 1, 2), 5, SamplingParams(1.0), torch.tensor([4, 1, 2]), None),
        ((3, 2), 5, SamplingParams(1.0), None, SamplingParams(1.0, top_k=2)),  # q runs out: 2 tokens for 3 children
    ],
    ids=["full", "top_k", "top_p", "wide", "exhausted"],
)
def test_drawn_trees_are_exactly_the_target(
    widths: tuple[int, ...], size: int, params: SamplingParams, ids: Tensor | None, draft: SamplingParams | None
) -> None:
    """Every draw of the children along the path is enumerated; thresholds and tokens are measured on the real function."""
    tree = DrawnTree(widths, size, params, ids, len(widths) + size, draft)
    masses = tree.measure()
    assert distance(continued(masses, tree.p), target_joint(tree.p)) <= 1e-12
    assert 0.3 < tree.expected < len(widths)


def test_a_second_child_is_worth_something() -> None:
    one, two = (DrawnTree(widths, 5, SamplingParams(1.0), None, seed=1) for widths in ((1, 1), (2, 2)))
    one.measure()
    two.measure()
    assert two.expected > one.expected + 0.05


def test_a_tree_of_width_one_is_a_chain() -> None:
    generator = torch.Generator().manual_seed(0)
    n, k, size = 400, 3, 6
    p, q = (torch.softmax(torch.randn(n, 1 + k, size, generator=generator), -1).double() for _ in range(2))
    draft = torch.stack([draw(q[:, i], torch.rand(n, generator=generator)) for i in range(k)], 1)
    chosen = q[:, :k].gather(2, draft[:, :, None])[:, :, 0]
    accept, token = (torch.rand(n, width, generator=generator, dtype=torch.float64) for width in (k, k + 1))
    parents = torch.arange(-1, k - 1).expand(n, k)
    tree = verify_tree_drawn(draft, parents, (1,) * k, q, p, None, accept, token)
    chain = verify_sampled(draft, chosen, q[:, :k], p, None, accept, token)
    assert tree.accepted.equal(chain.accepted)
    assert tree.following.equal(chain.following)
    greedy = verify_tree_greedy(draft, parents, None, p.argmax(-1), k)
    assert greedy.accepted.equal(verify_greedy(draft, p.argmax(-1)).accepted)
    coupled, plain = verify_tree_coupled(draft, parents, None, p, token), verify_coupled(draft, p, token)
    assert coupled.accepted.equal(plain.accepted)
    assert coupled.following.equal(plain.following)
    assert coupled.path.equal(torch.where(torch.arange(k) < plain.accepted[:, None], torch.arange(k), -1))


def walk(tokens: list[int], parents: list[int], open_: list[bool], choices: list[int], depth: int) -> tuple[list[int], int]:
    """The greedy walk of one row, in plain Python: (path, following)."""
    path: list[int] = []
    at = -1
    while len(path) < depth:
        for node, parent in enumerate(parents):
            if parent == at and open_[node] and tokens[node] == choices[at + 1]:
                path.append(node)
                at = node
                break
        else:
            break
    return path, choices[at + 1]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[bool]], int]:
    rows, nodes = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    tokens = [[draw(st.integers(0, 2)) for _ in range(nodes)] for _ in range(rows)]
    parents = [[draw(st.integers(-1, node - 1)) for node in range(nodes)] for _ in range(rows)]
    open_ = [[draw(st.sampled_from([True, True, True, False])) for _ in range(nodes)] for _ in range(rows)]
    return tokens, parents, open_, nodes


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(0, 5), st.integers(0, 2**16), st.booleans())
def test_any_tree_against_plain_python(
    batch: tuple[list[list[int]], list[list[int]], list[list[bool]], int], depth: int, seed: int, closed: bool
) -> None:
    """Greedy and coupled walks; the coupled one follows the tokens that plain sampling draws with the same uniforms."""
    tokens, parents, open_, nodes = batch
    rows, generator = len(tokens), torch.Generator().manual_seed(seed)
    p = torch.softmax(torch.randn(rows, 1 + nodes, 3, generator=generator), -1)
    u = torch.rand(rows, depth + 1, generator=generator, dtype=torch.float64)
    shape = (rows, nodes)
    tree = torch.tensor(tokens).long().reshape(shape), torch.tensor(parents).long().reshape(shape)
    flags = torch.tensor(open_).bool().reshape(shape) if closed else None
    choices = p.argmax(-1)
    greedy = verify_tree_greedy(*tree, flags, choices, depth)
    coupled = verify_tree_coupled(*tree, flags, p, u)
    for row in range(rows):
        allowed = open_[row] if closed else [True] * nodes
        path, following = walk(tokens[row], parents[row], allowed, choices[row].tolist(), depth)
        assert greedy.path[row].tolist() == path + [-1] * (depth - len(path))
        assert (int(greedy.accepted[row]), int(greedy.following[row])) == (len(path), following)
        kept = int(coupled.accepted[row])
        at, text = -1, []
        for level in range(kept + 1):
            token = int(draw(p[row, at + 1][None], u[row, level][None]))
            text.append(token)
            match = [
                node for node in range(nodes) if parents[row][node] == at and tokens[row][node] == token and allowed[node]
            ]
            if level < kept:
                at = match[0]
                assert int(coupled.path[row, level]) == at
            else:
                assert level == depth or not match
        assert int(coupled.following[row]) == text[-1]
        assert coupled.path[row, kept:].tolist() == [-1] * (depth - kept)
