"""Drawn trees: the draws are what the verifier is told, and the text keeps the target's distribution."""

from __future__ import annotations

import pytest
import torch

from eagle.decode.drafting import EagleDrafter
from eagle.decode.drawn_tree import DrawnTreeDrafter
from eagle.decode.engine import Engine
from eagle.decode.proposal import Draws
from eagle.decode.randomness import Stream, uniforms
from eagle.decode.sampling import SamplingParams, Warp
from tests.decode.models import draft, greedy, prompts, surprise, target


def test_each_level_is_drawn_from_the_chain_drafts_distribution() -> None:
    model = target()
    net, embed = draft(model, vocab=12), model.get_input_embeddings().weight
    tokens, aux = torch.randint(0, 64, (2, 6)), torch.randn(2, 6, 3 * 32)
    warp = Warp.of([SamplingParams(0.9), SamplingParams(0.7, top_k=4)], "cpu")
    widths = (2, 3, 1)
    with torch.no_grad():
        tree = DrawnTreeDrafter(net, embed, batch=2, max_length=30, widths=widths)
        tree.extend([0, 1], tokens, aux, [0, 0], [6, 4])
        numbers = uniforms(3, Stream.DRAFT, [0, 1], [7, 5], 3, "cpu", 3)
        found = tree.draft([0, 1], 3, Draws(warp, numbers))
        assert found.widths == widths
        assert found.parents is not None
        assert found.probabilities is not None
        assert found.parents[0].tolist() == [-1, -1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7]
        for node in range(2, 8):  # a chain through this node's parent sees the same distributions
            chain = EagleDrafter(net, embed, batch=2, max_length=30)
            chain.extend([0, 1], tokens, aux, [0, 0], [6, 4])
            parent = int(found.parents[0, node])
            # Numbers in the middle of the wanted tokens' intervals make the chain draw this path.
            lined = chain.draft([0, 1], 1, Draws(warp, torch.full((2, 1), 0.5)))
            assert lined.probabilities is not None
            assert torch.allclose(lined.probabilities[:, 0], found.probabilities[:, 0], atol=1e-6)
            state = chain.forward([0, 1], found.tokens[:, parent][:, None], chain._feedback[[0, 1]][:, None], [6, 4])[0]
            logits = net.logits(state[:, 0])
            q = torch.softmax(logits[0] / 0.9, -1)
            assert torch.allclose(q, found.probabilities[0, 1 + parent], atol=1e-5)
        siblings = found.tokens[:, 2:5]
        assert all(len(set(row.tolist())) == 3 for row in siblings)


@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_text_is_the_targets(batch: int) -> None:
    model = target(scale=1.0)
    questions = prompts([3, 12, 7, 1])
    drafter = DrawnTreeDrafter(draft(model, vocab=64), model.get_input_embeddings().weight, batch=batch, max_length=40)
    result = Engine(model, drafter, max_length=40, batch=batch).generate(questions, max_new_tokens=20, draft_tokens=4)
    assert result.tokens == [greedy(model, q, 20) for q in questions]


def test_sampled_text_chi_square() -> None:
    """The second and third token of 4000 answers to one prompt, against the exact distribution."""
    vocab, count = 24, 4000
    model = target(vocab=vocab, scale=1.0)
    prompt = prompts([6], vocab)[0]
    drafter = DrawnTreeDrafter(draft(model, vocab=15), model.get_input_embeddings().weight, batch=500, max_length=16, widths=(3, 2))
    engine = Engine(model, drafter, max_length=16, batch=500)
    result = engine.generate([prompt] * count, max_new_tokens=3, draft_tokens=2, temperature=0.8, seed=11)
    assert 0 < result.stats.accepted < result.stats.drafted
    observed = torch.zeros(vocab, vocab)
    for _, second, third in result.tokens:
        observed[second, third] += 1
    with torch.no_grad():
        texts = torch.tensor([[*prompt, a, b] for a in range(vocab) for b in range(vocab)])
        p = torch.softmax(model(texts).logits[:, -3:].double() / 0.8, -1).view(vocab, vocab, 3, vocab)
    exact = torch.einsum("a,ab,abc->bc", p[0, 0, 0], p[:, 0, 1], p[:, :, 2])
    assert surprise(observed, exact * count) < 4


def test_the_text_does_not_depend_on_the_batch() -> None:
    model = target()
    questions = prompts([3, 12, 7, 1])
    embed = model.get_input_embeddings().weight
    found = []
    for batch in (1, 3):
        drafter = DrawnTreeDrafter(draft(model), embed, batch=batch, max_length=40)
        engine = Engine(model, drafter, max_length=40, batch=batch)
        found.append(engine.generate(questions, max_new_tokens=9, draft_tokens=3, temperature=1.0, top_p=0.9, seed=2).tokens)
    assert found[0] == found[1]


def test_widths_are_checked() -> None:
    model = target()
    for widths in ((), (2, 0), (2, 99)):
        with pytest.raises(ValueError, match="children a node"):
            DrawnTreeDrafter(draft(model), model.get_input_embeddings().weight, batch=1, max_length=9, widths=widths)
