"""The greedy chains of our own draft, computed without any cache: the whole context again at every step, in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from eagle.draft.model import DraftModel
from eagle.target.taps import HiddenTaps


def _causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=True)


@torch.inference_mode()
def greedy_chains(target: PreTrainedModel, draft: DraftModel, contexts: list[list[int]], steps: int) -> tuple[Tensor, Tensor]:
    """Return what the draft proposes after each context: target ids [n, steps], and the gap of the two highest logits.

    A context ends with the token that the target sampled last, whose hidden state is not known yet. Position t takes the
    embedding of token t + 1 and the target's states at t; from the second step on the state is the draft's own feedback.
    """
    lengths = torch.tensor([len(context) for context in contexts])
    rows, width = torch.arange(len(contexts)), int(lengths.max()) + steps
    tokens = torch.zeros(len(contexts), width, dtype=torch.int64)
    for row, context in enumerate(contexts):
        tokens[row, : len(context)] = torch.tensor(context)
    # What stands behind a context is later than all of it: attention is causal, so it changes nothing.
    with HiddenTaps(target, draft.spec.aux_layers) as taps:
        target(input_ids=tokens, use_cache=False)
        hidden = draft.fuse(taps.concat())
    following = tokens.roll(-1, dims=1)
    positions = torch.arange(width).expand(len(contexts), -1)
    chosen, gaps = [], []
    for step in range(steps):
        at = lengths - 2 + step
        normed, feedback = draft.step(following, hidden, positions, _causal)
        best = draft.logits(normed[rows, at], fp32=True).topk(2)
        chosen.append(draft.to_target(best.indices[:, 0]))
        gaps.append(best.values[:, 0] - best.values[:, 1])
        following[rows, at + 1] = chosen[-1]
        hidden[rows, at + 1] = feedback[rows, at]
    return torch.stack(chosen, dim=1), torch.stack(gaps, dim=1)
