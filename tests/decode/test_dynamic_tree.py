"""The dynamic tree: its nodes are the most promising ones, computed one path at a time from scratch."""

from __future__ import annotations

import pytest
import torch

from eagle.decode.cache import CachedAttention, KeyValueStore
from eagle.decode.drafting import EagleDrafter
from eagle.decode.dynamic_tree import EagleTreeDrafter, TreeShape
from eagle.decode.engine import Engine
from eagle.draft.model import DraftModel
from tests.decode.models import draft, greedy, prompts, target


def log_probabilities(net: DraftModel, text: list[int], states: torch.Tensor, path: list[int]) -> torch.Tensor:
    """The draft's log probabilities over its vocabulary after `path`, without a cache."""
    tokens, hidden = torch.tensor([text]), states
    for token in [*path, None]:
        store = KeyValueStore(net.spec.num_layers, 1, 60, net.spec.num_kv_heads, net.spec.head_dim, torch.float32, "cpu")
        normed, feedback = net.step(tokens, hidden, store.plan([0], tokens.shape[1]), CachedAttention(store, 2, torch.float32))
        if token is None:
            return torch.log_softmax(net.logits(normed[0, -1]).double(), -1)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
        hidden = torch.cat([hidden, feedback[:, -1:]], 1)
    raise AssertionError


SHAPES = [(3, TreeShape(3, 9, 4)), (4, TreeShape(2, 30, 4)), (6, TreeShape(4, 7, 2)), (1, TreeShape(5, 3))]


@pytest.mark.parametrize(("length", "shape"), SHAPES)
def test_nodes_are_the_most_promising(length: int, shape: TreeShape) -> None:
    model = target()
    net = draft(model, vocab=12)
    drafter = EagleTreeDrafter(net, model.get_input_embeddings().weight, batch=3, max_length=30, shape=shape)
    tokens, aux, counts = torch.randint(0, 64, (2, 9)), torch.randn(2, 9, 3 * 32), [9, 5]
    with torch.no_grad():
        drafter.extend([0, 2], tokens, aux, [0, 0], counts)
        found = drafter.draft([0, 2], length, None)
        assert found.parents is not None
        for row, count in enumerate(counts):
            text, states = tokens[row, :count].tolist(), net.fuse(aux[row : row + 1, :count])
            level: list[tuple[float, list[int]]] = [(0.0, [])]
            everything: list[tuple[float, list[int]]] = []
            for _ in range(min(length, shape.deepest)):
                children = []
                for score, path in level:
                    best = log_probabilities(net, text, states, path).topk(shape.top_k)
                    ids = net.to_target(best.indices).tolist()
                    children += [(score + v, [*path, t]) for v, t in zip(best.values.tolist(), ids, strict=True)]
                everything += children
                level = sorted(children, reverse=True)[: shape.top_k]
            wanted = {tuple(path) for _, path in sorted(everything, reverse=True)[: shape.nodes]}
            paths: list[list[int]] = []
            for token, parent in zip(found.tokens[row].tolist(), found.parents[row].tolist(), strict=True):
                paths.append([*(paths[parent] if parent >= 0 else []), token])
            assert {tuple(path) for path in paths} == wanted


def test_decoding_with_a_tree_is_lossless_and_accepts_more() -> None:
    model = target(scale=1.0)
    net = draft(model, vocab=64)
    questions = prompts([3, 12, 7, 1])
    embed = model.get_input_embeddings().weight
    wanted = [greedy(model, q, 20) for q in questions]
    chain = Engine(model, EagleDrafter(net, embed, batch=4, max_length=40), max_length=40, batch=4)
    plain = chain.generate(questions, max_new_tokens=20, draft_tokens=3)
    for batch in (1, 4):
        tree = EagleTreeDrafter(net, embed, batch=batch, max_length=40, shape=TreeShape(8, 40, 4))
        result = Engine(model, tree, max_length=40, batch=batch).generate(questions, max_new_tokens=20, draft_tokens=3)
        assert result.tokens == wanted
        assert result.stats.acceptance_length > plain.stats.acceptance_length


def test_shape_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TreeShape(nodes=0)
