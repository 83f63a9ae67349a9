"""Medusa heads as a drafter: the tree's choice against enumeration, proposals against the heads themselves, files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle.decode.medusa import MedusaDrafter, MedusaHeads, choose_paths, load_medusa, save_medusa
from eagle.errors import BundleError

PATHS = ((0,), (1,), (0, 0), (2,), (0, 2), (1, 0), (0, 0, 1), (0, 0, 0))


def make_heads(heads: int = 3, size: int = 12, vocab: int = 20, seed: int = 0) -> MedusaHeads:
    """Lively random heads over 20 of 60 target ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(60, generator=generator)[:vocab].sort().values
    made = MedusaHeads(heads, torch.rand(size, generator=generator) + 0.5, 1e-5, ids, 4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    made.paths = PATHS
    made.accuracies = [[0.5, 0.25, 0.125]] * heads
    return made


def ranked(heads: MedusaHeads, head: int, aux: Tensor) -> list[int]:
    """Target ids of a head at one position, likeliest first, spelled out from the weights."""
    state = heads.state_dict()
    hidden = aux / (aux.pow(2).mean() + heads.eps).sqrt() * state["norm"]
    block = hidden @ state[f"heads.{head}.block.weight"].T + state[f"heads.{head}.block.bias"]
    logits = (hidden + block * torch.sigmoid(block)) @ state[f"heads.{head}.lm_head.weight"].T
    return state["ids"][logits.argsort(descending=True)].tolist()


def test_the_tree_holds_each_heads_likeliest_tokens_at_the_last_position() -> None:
    heads = make_heads()
    drafter = MedusaDrafter(heads, batch=3, dtype=torch.float32)
    assert drafter.aux_layers == (4,)
    assert drafter.max_nodes == len(PATHS)
    assert drafter.deterministic
    aux = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    drafter.extend([0, 2], torch.zeros(2, 5, dtype=torch.int64), aux, [0, 0], [5, 3])
    proposal = drafter.draft([0, 2], 3, None)
    assert proposal.parents is not None
    assert proposal.tokens.dtype == proposal.parents.dtype == torch.int64
    assert proposal.open_ is None
    for row, last in enumerate((aux[0, 4], aux[1, 2])):
        best = [ranked(heads, head, last) for head in range(3)]
        assert proposal.tokens[row].tolist() == [best[len(path) - 1][path[-1]] for path in PATHS]
        assert proposal.parents[row].tolist() == [-1, -1, 0, -1, 0, 1, 2, 2]


def test_length_cuts_the_tree_and_no_length_exceeds_the_heads() -> None:
    drafter = MedusaDrafter(make_heads(), batch=1, dtype=torch.float32)
    aux = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(2))
    drafter.extend([0], torch.zeros(1, 1, dtype=torch.int64), aux, [7], [1])
    whole, most = drafter.draft([0], 3, None), drafter.draft([0], 16, None)
    assert torch.equal(whole.tokens, most.tokens)
    two = drafter.draft([0], 2, None)
    assert two.parents is not None
    assert two.parents.tolist() == [[-1, -1, 0, -1, 0, 1]]
    assert two.tokens.tolist() == whole.tokens[:, :6].tolist()
    one = drafter.draft([0], 1, None)
    assert one.tokens.tolist() == [whole.tokens[0, [0, 1, 3]].tolist()]


def test_a_row_moves_with_its_hidden_state() -> None:
    drafter = MedusaDrafter(make_heads(), batch=3, dtype=torch.float32)
    aux = torch.randn(3, 1, 12, generator=torch.Generator().manual_seed(3))
    drafter.extend([0, 1, 2], torch.zeros(3, 1, dtype=torch.int64), aux, [0, 0, 0], [1, 1, 1])
    before = drafter.draft([0, 1, 2], 3, None).tokens
    assert not torch.equal(before[0], before[2])
    drafter.move(2, 0)
    assert torch.equal(drafter.draft([0, 1], 3, None).tokens, before[[2, 1]])
    assert drafter.weight_bytes == 4 * 3 * (12 * 12 + 12 + 20 * 12)
    assert drafter.state_bytes == 4 * 3 * 12
    with pytest.raises(ValueError, match="hidden state"):
        drafter.extend([0], torch.zeros(1, 1, dtype=torch.int64), None, [0], [1])


def test_a_head_starts_as_the_targets_head() -> None:
    heads = MedusaHeads(2, torch.ones(6), 1e-5, torch.arange(9), 3)
    hidden = torch.randn(4, 6)
    for number, head in enumerate(heads.heads):
        assert torch.allclose(head(hidden), F.linear(hidden, heads.state_dict()[f"heads.{number}.lm_head.weight"]))


@given(
    st.lists(st.lists(st.floats(0.01, 0.5), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(1, 6),
)
def test_no_other_tree_of_as_many_nodes_is_accepted_further(accuracies: list[list[float]], nodes: int) -> None:
    def worth(paths: tuple[tuple[int, ...], ...]) -> float:
        total = 0.0
        for path in paths:
            chance = 1.0
            for level, rank in enumerate(path):
                chance *= accuracies[level][rank]
            total += chance
        return total

    every = [p for depth in range(1, len(accuracies) + 1) for p in itertools.product(*(range(len(a)) for a in accuracies[:depth]))]
    chosen = choose_paths(accuracies, nodes)
    assert len(chosen) == min(nodes, len(every))
    for place, path in enumerate(chosen):
        assert len(path) == 1 or path[:-1] in chosen[:place]
    best = sorted((worth((path,)) for path in every), reverse=True)[: len(chosen)]  # no tree can be worth more
    assert worth(chosen) == pytest.approx(sum(best))


def test_a_tree_needs_a_node_and_a_head_and_leaves_out_what_is_never_right() -> None:
    assert choose_paths([[0.5, 0.0], [0.0, 0.0]], 4) == ((0,),)
    assert choose_paths([[0.0]], 4) == ((0,),)
    for accuracies, nodes in (([[0.5]], 0), ([], 3)):
        with pytest.raises(ValueError, match="at least 1 node and 1 head"):
            choose_paths(accuracies, nodes)


@pytest.mark.parametrize("paths", [((0,), (1, 0)), ((0,), (0,)), ((0, 0), (0,))])
def test_a_tree_without_its_parents_is_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    heads = make_heads()
    heads.paths = paths
    with pytest.raises(ValueError, match="is there twice, or its parent"):
        MedusaDrafter(heads, batch=1, dtype=torch.float32)


def test_saved_heads_come_back_the_same(tmp_path: Path) -> None:
    heads = make_heads()
    save_medusa(tmp_path / "medusa", heads)
    assert sorted(p.name for p in (tmp_path / "medusa").iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_medusa(tmp_path / "medusa")
    assert loaded.paths == heads.paths
    assert loaded.accuracies == heads.accuracies
    assert (loaded.aux_layer, loaded.eps) == (4, 1e-5)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_what_is_not_medusa_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no Medusa heads can be read"):
        load_medusa(tmp_path)
    save_medusa(tmp_path, make_heads())
    state, about = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    save_file({name: t for name, t in state.items() if name != "heads.1.block.bias"}, tmp_path / "model.safetensors")
    with pytest.raises(BundleError, match="incomplete"):
        load_medusa(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**about, "format": "eagle"}))
    with pytest.raises(BundleError, match="not the configuration of Medusa heads"):
        load_medusa(tmp_path)
