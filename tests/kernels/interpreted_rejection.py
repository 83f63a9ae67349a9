"""The rejection kernel in Triton's interpreter. Not collected by name: `test_rejection.py` runs it as a process of its own
with TRITON_INTERPRET=1, for kernels are interpreter or compiler objects for the life of a process.
"""

from __future__ import annotations

import pytest
import torch

from kernels import eager
from kernels.rejection import BLOCK, rejection, rejection_kernel
from tests.kernels.rejections import check, make


def test_the_kernel_is_interpreted():
    assert type(rejection_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("count", "length", "vocab", "draft_vocab"),
    [(6, 3, 11, 5), (6, 1, 7, None), (4, 2, BLOCK, None), (4, 4, 2 * BLOCK + 1, BLOCK - 3), (3, 2, 3 * BLOCK + 500, None)],
)
def test_any_shape(count, length, vocab, draft_vocab, dtype, bonus, drawn):
    case = make(count, length, vocab, draft_vocab, seed=vocab, bonus=bonus, drawn=drawn, dtype=dtype)
    accepted, following = rejection(*case.arguments())
    assert accepted.dtype == following.dtype == torch.int64
    assert check(case, accepted, following) == 0
    for got, want in zip((accepted, following), eager.rejection(*case.arguments()), strict=True):
        assert torch.equal(got, want)


def test_many_rows_stop_everywhere():
    case = make(60, 3, 40, 20, seed=5)
    accepted, following = rejection(*case.arguments())
    assert set(accepted.tolist()) == {0, 1, 2, 3}
    assert check(case, accepted, following) == 0


@pytest.mark.parametrize("seed", range(4))
def test_edges_and_tokens_without_probability(seed):
    """Uniforms of 0 and 1 - 2^-52, most probabilities 0: never a token of weight 0, and within rounding of the aim."""
    case = make(16, 2, BLOCK + 50, 300 if seed % 2 else None, seed=seed, zeros=0.9, edges=True)
    check(case, *rejection(*case.arguments()))


def test_an_aim_that_no_sum_exceeds_gives_the_last_token_with_weight():
    """What rounding can do to the largest uniform, forced by a uniform of 1."""
    case = make(8, 2, BLOCK + 50, 300, seed=6, zeros=0.9)
    draft, chosen, q, p, ids, accept, token = case.arguments()
    accepted, following = rejection(draft, chosen, q, p, ids, accept, torch.ones_like(token))
    check(case, accepted, rejection(*case.arguments())[1])
    for row in range(8):
        weights = p[row, accepted[row]].clone()
        if accepted[row] < 2:
            weights[ids] -= q[row, accepted[row]]
        assert int(following[row]) == int((weights > 0).nonzero()[-1])


def test_p_equal_to_q_rejected_by_rounding():
    """No mass is left over: the token comes from p."""
    case = make(4, 2, 30, None, seed=1)
    same = torch.full_like(case.q_chosen, 2.0)  # as if the tokens had been drawn with more than their probability
    accept = torch.full_like(case.accept_uniform, 0.999)
    arguments = (case.draft, same, case.p[:, :2].contiguous(), case.p, None, accept, case.token_uniform)
    accepted, following = rejection(*arguments)
    assert accepted.tolist() == [0] * 4
    assert torch.equal(following, eager.rejection(*arguments)[1])


@pytest.mark.parametrize("rows", [0, 1])
def test_no_draft_and_no_rows(rows):
    case = make(5, 0, 40, None, seed=2, bonus=bool(rows))
    for got, want in zip(rejection(*case.arguments()), eager.rejection(*case.arguments()), strict=True):
        assert torch.equal(got, want)
    none = make(0, 2, 40, 10, seed=3)
    assert [t.shape for t in rejection(*none.arguments())] == [(0,), (0,)]


def test_inputs_that_are_not_contiguous_and_uniforms_of_float32():
    case = make(5, 3, 50, 20, seed=4)
    draft, chosen, q, p, ids, accept, token = case.arguments()
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (draft, chosen, q, p)]
    halved = accept.float(), token.float()
    got = rejection(*strided, ids, *halved)
    for a, b in zip(got, eager.rejection(draft, chosen, q, p, ids, *halved), strict=True):
        assert torch.equal(a, b)


def test_what_the_kernel_does_not_take():
    draft, chosen, q, p, ids, accept, token = make(2, 2, 30, 10).arguments()
    for arguments, words in (
        ((draft, chosen, q, p.bfloat16(), ids, accept, token), "p is bfloat16"),
        ((draft.int(), chosen, q, p, ids, accept, token), "draft is int32"),
        ((draft, chosen, q, p[:, :1], ids, accept, token), "p has 1 rows for 2"),
        ((draft, chosen, q, p, None, accept, token), "q has 10 tokens, the draft's vocabulary 30"),
        ((draft, chosen, q, p, ids, accept, token[:, :2]), "token_uniform has 2 numbers for 3"),
    ):
        with pytest.raises(ValueError, match="rejection: ") as caught:
            rejection(*arguments)
        assert words in str(caught.value)
