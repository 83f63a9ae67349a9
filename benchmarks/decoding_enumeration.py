"""F3.2: what every verifier emits, by exact enumeration on a toy of 8 tokens and drafts of 3."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Measured
from eagle.decode.sampling import SamplingParams
from eagle.decode.trees import verify_tree_coupled, verify_tree_greedy
from eagle.decode.verify import verify_block, verify_coupled, verify_greedy, verify_sampled

Emit = Callable[[Tensor], tuple[Tensor, Tensor]]  # uniforms [n, D] -> tokens [n, D] and how many of them were emitted [n]


def enumeration() -> Measured:
    """F3.2: the largest total variation between what a verifier emits and the target, V=8, K=3, of all verifiers and options.

    Every draft is enumerated, and the verifiers themselves are measured as functions of their uniforms, by the helpers of
    the tests (`tests/decode/exact.py`, which says how).
    """
    exact: Any = importlib.import_module("tests.decode.exact")  # at run time: the type checker's scope leaves tests out
    chains: Any = importlib.import_module("tests.decode.test_verify")
    trees: Any = importlib.import_module("tests.decode.test_trees")
    runs: list[dict[str, Any]] = []

    def add(masses: list[Tensor], p: list[Tensor], verifier: str, **about: Any) -> None:
        distance = exact.distance(exact.continued(masses, p), exact.target_joint(p))
        runs.append({"verifier": verifier, **about, "total_variation": distance})

    for number, (name, params) in enumerate(chains.SETTINGS.items()):
        seed = 10 * number  # as the tests: with these every draft has a chance
        for verify in (verify_sampled, verify_block):
            for size, ids in (("full", None), ("small", chains.SMALL)):
                for drawn in (True, False):
                    for bonus in (True, False):
                        round_ = chains.Round(verify, seed, params, ids, bonus=bonus, drawn=drawn)
                        masses = round_.measure(block=verify is verify_block)[1]
                        about = {"sampling": name, "draft_vocabulary": size, "drawn": drawn, "bonus": bonus}
                        add(masses, round_.p, verify.__name__, **about)
        for widths, size in (((2, 1, 1), "full"), ((2, 2, 1), "small"), ((3, 1, 1), "small")):
            tree = trees.DrawnTree(widths, chains.V, params, chains.SMALL if size == "small" else None, seed)
            add(tree.measure(), tree.p, "verify_tree_drawn", sampling=name, draft_vocabulary=size, widths=widths)
    for name, params in {**chains.SETTINGS, "greedy": SamplingParams(0.0)}.items():
        for seed in range(4):
            p = exact.tables(seed, chains.V, chains.K + 1, params)
            for verifier, masses, used in _deterministic(exact, p, seed, greedy=name == "greedy"):
                add(masses, used, verifier, sampling=name, draft=seed)
    return Measured(max(row["total_variation"] for row in runs), runs)


def _deterministic(exact: Any, p: list[Tensor], seed: int, *, greedy: bool) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Enumerate the verifiers of drafts that draw nothing, on a chain and a tree: (verifier, masses, tables) each."""
    vocab_size, depth = p[0].shape[1], len(p) - 1
    generator = torch.Generator().manual_seed(seed)
    chain = [-1, 0, 1]
    fork = [-1, -1, 0, 0, 1, 2, 3, 4]  # two children, then two and one, then one each
    found = []
    for parents, what in ((chain, "chain"), (fork, "tree")):
        tokens, codes, levels = _drafted(p, parents, generator)
        rows = torch.stack([p[0][0], *(p[level][code] for level, code in zip(levels, codes, strict=True))])[None]
        draft, up = torch.tensor([tokens]), torch.tensor([parents])

        def tree(u: Tensor, draft: Tensor = draft, up: Tensor = up, rows: Tensor = rows) -> tuple[Tensor, Tensor]:
            n = len(u)
            nodes, tops, table = draft.expand(n, -1), up.expand(n, -1), rows.expand(n, -1, -1)
            if greedy:
                verdict = verify_tree_greedy(nodes, tops, None, table.argmax(-1), depth)
            else:
                verdict = verify_tree_coupled(nodes, tops, None, table, u)
            return _emitted(nodes.gather(1, verdict.path.clamp_min(0)), verdict.accepted, verdict.following)

        def line(u: Tensor, width: int, draft: Tensor = draft, rows: Tensor = rows) -> tuple[Tensor, Tensor]:
            n = len(u)
            nodes, table = draft.expand(n, -1), rows[:, :width].expand(n, -1, -1)
            verdict = verify_greedy(nodes, table.argmax(-1)) if greedy else verify_coupled(nodes, table, u)
            return _emitted(nodes, verdict.accepted, verdict.following)

        kind = "greedy" if greedy else "coupled"
        found.append((f"verify_tree_{kind}, {what}", _masses(exact, tree, depth + 1, vocab_size), p))
        if what == "chain":
            for width, bonus in ((depth + 1, "bonus"), (depth, "no bonus")):
                masses = _masses(exact, lambda u, line=line, width=width: line(u, width), width, vocab_size)  # type: ignore[misc]
                found.append((f"verify_{kind}, {bonus}", masses, p[:width]))
    return found


def _drafted(p: list[Tensor], parents: list[int], generator: torch.Generator) -> tuple[list[int], list[int], list[int]]:
    """Draft a token for each node, different from its siblings' and likely under `p`; return tokens, histories and depths."""
    tokens, codes, levels = list[int](), list[int](), list[int]()
    for node, parent in enumerate(parents):
        code, level = (codes[parent], levels[parent]) if parent >= 0 else (0, 0)
        weights = p[level][code] + 0.02
        for sibling in range(node):
            if parents[sibling] == parent:
                weights[tokens[sibling]] = 0.0
        token = int(torch.multinomial(weights, 1, generator=generator))
        tokens.append(token)
        codes.append(code * p[0].shape[1] + token)
        levels.append(level + 1)
    return tokens, codes, levels


def _emitted(kept: Tensor, accepted: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Join accepted tokens [n, D] and the one after them (-1: none); return tokens [n, D + 1] and counts [n]."""
    tokens = torch.cat([kept, kept.new_zeros(len(kept), 1)], 1).scatter(1, accepted[:, None], following.clamp_min(0)[:, None])
    return tokens, accepted + (following >= 0)


def _masses(exact: Any, emit: Emit, depth: int, vocab_size: int) -> list[Tensor]:
    """Return masses as `exact.continued` takes them, by following every token that the function emits at each place."""
    masses = [torch.zeros(vocab_size ** (level + 1), dtype=torch.float64) for level in range(depth)]
    u = torch.zeros(1, depth, dtype=torch.float64)
    history, weight = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    for level in range(depth):

        def token_at(x: Tensor, u: Tensor = u, level: int = level) -> Tensor:
            numbers = u.clone()
            numbers[:, level] = x
            return emit(numbers)[0][:, level]

        lengths: Tensor = exact.token_masses(token_at, len(u), vocab_size)
        u = u.repeat_interleave(vocab_size, 0)
        u[:, level] = (lengths.cumsum(1) - lengths / 2).flatten()
        history = (history[:, None] * vocab_size + torch.arange(vocab_size)).flatten()
        weight = (weight[:, None] * lengths).flatten()
        ends = emit(u)[1] == level + 1
        masses[level].index_add_(0, history[ends], weight[ends])
        going = ~ends & (weight > 0)
        u, history, weight = u[going], history[going], weight[going]
        if not len(u):
            break
    return masses
