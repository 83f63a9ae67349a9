"""On-policy rollouts: where real rounds start, what the draft proposes there, and what the target thinks of it.

Index convention (vLLM's EAGLE): a round starts after the last emitted token n. The draft's step 0 at position n-1 takes
(embedding of token n, tapped states of token n-1) and predicts token n+1; draft step j takes its own previous token
and state at position n-1+j and predicts token n+1+j. The target judges the token at n+1 by its state at token n.
Rounds of all rows of a batch are run together, flat: `rows` [N] and `anchors` [N], the index of each round's token n.

Temperature 0: while drafts are accepted, draft and target walk the row's own greedy tokens, so a round is the row itself
and needs no target forward. Temperature > 0: drafts are sampled from q and judged in one target forward with a tree mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle.draft.attention import ChainAttention, PrefixAttention
from eagle.draft.model import DraftModel
from eagle.train import objectives
from eagle.train.batches import Batch

HEAD_BYTES = 64 << 20  # target logits made at once, fp32


@dataclass(frozen=True)
class Origin:
    """Where rounds were run: `batch`, rows [N], anchors [N], and the target ids [N, K] that were fed, step by step."""

    batch: Batch
    rows: Tensor
    anchors: Tensor
    path: Tensor


@dataclass(frozen=True)
class Rounds:
    """N rounds of K draft steps. A position is live until the draft has ended (end of text, end of row, unusable token).

    logits: K tensors [N, Vd], at the rollout's temperature, differentiable. token [N, K] draft ids (-1 = not in the draft
    vocabulary). live [N, K] bool. The target's side is `dense` [N, K, Vd] (its softmax at the temperature, sliced to the
    draft vocabulary, exact) or `topk_index` [N, K, k] (draft ids or -1) with `topk_prob` [N, K, k].
    At temperature 0, `token` is the target's greedy path; else it is the draft's sampled prefix. `origin` runs them again.
    """

    temperature: float
    logits: tuple[Tensor, ...]
    token: Tensor
    live: Tensor
    dense: Tensor | None = None
    topk_index: Tensor | None = None
    topk_prob: Tensor | None = None
    origin: Origin | None = None


class DraftPass:
    """Draft step 0 over a batch of rows, from which rounds are started at any anchors."""

    def __init__(self, model: DraftModel, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.ids, self.index = model.draft_ids(), model.target_to_draft()
        positions = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device).expand(len(batch.tokens), -1)
        self.attention = PrefixAttention()
        self.normed, self.feedback = model.step(batch.tokens[:, 1:], model.fuse(batch.aux[:, :-1]), positions, self.attention)

    def chain(self, rows: Tensor, anchors: Tensor) -> Chain:
        """Start N rounds in `rows` [N] after their token `anchors` [N] (int64, >= 1)."""
        return Chain(self, rows, anchors)

    def row_tokens(self, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows' own tokens at `at` (shapes broadcast) and whether the rows are that long."""
        return self.batch.tokens[rows, at.clamp_max(self.batch.tokens.shape[1] - 1)], at < self.batch.lengths[rows]


class Chain:
    """Rounds under way: `normed` [N, H] gives the logits of the next token, `advance` feeds the token that was taken."""

    def __init__(self, start: DraftPass, rows: Tensor, anchors: Tensor) -> None:
        self._model, self._positions = start.model, anchors - 1
        self.normed, self._feedback = start.normed[rows, anchors - 1], start.feedback[rows, anchors - 1]
        self._attend = ChainAttention(start.attention, rows, anchors - 1)

    def logits(self) -> Tensor:
        """Return the draft's logits of the next token, [N, Vd], in the compute dtype."""
        return self._model.logits(self.normed)

    def advance(self, tokens: Tensor) -> None:
        """Take `tokens` [N] (target ids) as the next token of every round."""
        self._positions = self._positions + 1
        normed, feedback = self._model.step(tokens[None], self._feedback[None], self._positions[None], self._attend)
        self.normed, self._feedback = normed[0], feedback[0]

    def keep(self, which: Tensor) -> None:
        """Go on with the rounds `which` (bool [N]) only."""
        self.normed, self._feedback, self._positions = self.normed[which], self._feedback[which], self._positions[which]
        self._attend.keep(which)


@torch.no_grad()
def accepted_along_rows(
    start: DraftPass, rows: Tensor, anchors: Tensor, k: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Return [N] int64: how many of K drafts a round at each anchor gets accepted, given that the row was emitted.

    At temperature 0 draft i counts while the draft's argmax equals the row's token. At T > 0 this is the exact conditional
    law of chain rejection sampling given its output: an emitted y came from an accepted draft with probability
    min(p, q)(y) / p(y) = min(1, q(y)/p(y)), and the accepted prefix is the row itself. p(y) is the cached one; at other
    temperatures than 1 it is tempered over the kept tokens, and a y that was not kept gets the least kept probability.
    """
    count = torch.zeros_like(anchors)
    alive = torch.arange(len(anchors), device=anchors.device)  # rounds with no rejection yet
    chain = start.chain(rows, anchors)
    for i in range(k):
        y, inside = start.row_tokens(rows[alive], anchors[alive] + 1 + i)
        logits = chain.logits().float()
        if temperature == 0:
            hit = start.ids[logits.argmax(1)] == y
        else:
            q = objectives.path_probability(logits / temperature, start.index[y])
            p = cached_probability(start.batch, rows[alive], anchors[alive] + i, y, temperature)
            hit = torch.rand(q.shape, generator=generator).to(q.device) * p < q
        hit = hit & inside
        alive, y = alive[hit], y[hit]
        count[alive] += 1
        if i == k - 1 or not len(alive):
            break
        chain.keep(hit)
        chain.advance(y)
    return count


def cached_probability(batch: Batch, rows: Tensor, at: Tensor, token: Tensor, temperature: float) -> Tensor:
    """Return [N]: the target's probability at `temperature` > 0 of the rows' own `token` after position `at`.

    Exact at temperature 1; else tempered over the kept probabilities, the least of them for a token that was not kept.
    """
    at = at.clamp_max(batch.tokens.shape[1] - 1)
    if temperature == 1.0:
        return batch.own[rows, at].exp()
    kept, same = batch.topk_prob[rows, at].float(), batch.topk_index[rows, at] == token[:, None]
    kept = kept.clamp_min(torch.finfo(kept.dtype).tiny) ** (1.0 / temperature)
    kept = kept / kept.sum(1, keepdim=True)
    return torch.where(same.any(1), (kept * same).sum(1), kept.amin(1))


@dataclass(frozen=True)
class Stretch:
    """Where to walk: `batch` cut behind the last token that is needed, the answer's first token `begin` [B], a random
    `offset` [B] in the answer, both int64 on the CPU, and the number of positions from there on, `span`."""

    batch: Batch
    begin: Tensor
    offset: Tensor
    span: int


def draw_stretch(batch: Batch, rounds: int, k: int, mean_advance: float, generator: torch.Generator) -> Stretch:
    """Draw the part of each answer in which up to `rounds` rounds of K drafts will be run.

    `mean_advance` (tokens a round) sizes it; an offset before the answer becomes its first token, else the beginning, which
    every served answer has, would be seen too seldom. Each row needs two answer tokens.
    """
    span = max(2, min(int(1.25 * mean_advance * (rounds + 1)) + k, (k + 1) * (rounds + 1)))
    begin = batch.loss_mask.long().argmax(1).cpu()  # the first answer token
    last = batch.lengths.cpu() - 2  # a round needs a token of the row behind its anchor
    low = begin - span // 2
    offset = (low + (torch.rand(len(low), generator=generator) * (last + 1 - low)).long()).maximum(begin).minimum(last)
    return Stretch(_cut(batch, int((offset + span + k).max())), begin, offset, span)


def _cut(batch: Batch, until: int) -> Batch:
    """Return the batch without the tokens from `until` on: nothing before them depends on them."""
    if until >= batch.tokens.shape[1]:
        return batch
    names = ("tokens", "aux", "loss_mask", "topk_index", "topk_prob", "own")
    return replace(batch, lengths=batch.lengths.clamp_max(until), **{name: getattr(batch, name)[:, :until] for name in names})


def walk_rounds(
    start: DraftPass, stretch: Stretch, rounds: int, k: int, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return (rows [N], anchors [N]) int64: up to `rounds` rounds a row, those that serving would run.

    The draft walks each answer: a round at n, the next at n + accepted + 1, from the offset on, whose own round is only
    walked, not kept (an arbitrary position is easier than one where a round has just failed), unless the offset is
    the first answer token, where a real first round starts.
    """
    device = start.batch.tokens.device
    last = start.batch.lengths.cpu() - 2
    window = stretch.offset[:, None] + torch.arange(stretch.span)
    rows, column = (window <= last[:, None]).nonzero(as_tuple=True)
    accepted = torch.zeros_like(window)
    anchors = window[rows, column].to(device)
    accepted[rows, column] = accepted_along_rows(start, rows.to(device), anchors, k, temperature, generator).cpu()
    kept: list[tuple[int, int]] = []
    ends = zip(stretch.offset.tolist(), stretch.begin.tolist(), last.tolist(), accepted.tolist(), strict=True)
    for row, (first, begin, end, counts) in enumerate(ends):
        at = first if first <= begin else first + counts[0] + 1
        taken = 0
        while taken < rounds and begin <= at <= end and at - first < stretch.span:
            kept.append((row, at))
            at, taken = at + counts[at - first] + 1, taken + 1
    if not kept:  # answers so short that the first rounds end them
        kept = list(enumerate(stretch.offset.tolist()))
    flat = torch.tensor(kept, dtype=torch.long, device=device)
    return flat[:, 0], flat[:, 1]


class TreeVerifier:
    """The target's next-token probabilities along many chains that branch off the same rows, in one forward."""

    def __init__(self, target: PreTrainedModel, vocabulary: Tensor) -> None:
        """`vocabulary` [Vd] int64: target ids of the draft vocabulary, the slice of the softmax that is returned."""
        self.vocabulary = vocabulary
        self._body, self._head = target.get_decoder(), target.get_output_embeddings()

    @torch.no_grad()
    def probabilities(
        self, tokens: Tensor, rows: Tensor, anchors: Tensor, chains: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Judge the chains [N, K-1] (target ids) that follow token `anchors` [N] of row `rows` [N, ascending] in `tokens` [B, S].

        Returns p [N, K, Vd] float32 at `temperature` > 0 and the argmax over the whole vocabulary [N, K] int64, after the
        anchor and after each chain token. One forward on S + (chain tokens) positions a row: a chain token sees its row
        up to the anchor and its own chain, at the positions it would have in the text.
        """
        batch, length, steps = len(tokens), tokens.shape[1], chains.shape[1]
        count = torch.bincount(rows, minlength=batch)
        slot = torch.arange(len(rows), device=rows.device) - (count.cumsum(0) - count)[rows]
        slots = int(count.max()) if len(rows) else 0
        branch = torch.zeros(batch, slots, steps, dtype=torch.long, device=tokens.device)
        root = torch.ones(batch, slots, dtype=torch.long, device=tokens.device)
        branch[rows, slot], root[rows, slot] = chains, anchors
        at = length + (slot[:, None] * steps + torch.arange(steps, device=tokens.device))
        with torch.autocast(tokens.device.type, enabled=False):  # the draft's arithmetic must not round a fp32 target
            hidden = self._body(
                input_ids=torch.cat([tokens, branch.flatten(1)], 1), use_cache=False, **_tree_arguments(root, length, steps)
            ).last_hidden_state
            return self._distributions(hidden[rows[:, None], torch.cat([anchors[:, None], at], 1)], temperature)

    def _distributions(self, hidden: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        flat = hidden.flatten(0, 1)
        out = torch.empty(len(flat), len(self.vocabulary), dtype=torch.float32, device=flat.device)
        best = torch.empty(len(flat), dtype=torch.long, device=flat.device)
        slab = max(1, HEAD_BYTES // (4 * self._head.weight.shape[0]))
        for begin in range(0, len(flat), slab):
            logits = self._head(flat[begin : begin + slab]).float()
            best[begin : begin + slab] = logits.argmax(1)
            logits /= temperature
            out[begin : begin + slab] = (logits[:, self.vocabulary] - logits.logsumexp(1, keepdim=True)).exp_()
        return out.view(*hidden.shape[:2], -1), best.view(hidden.shape[:2])

    def greedy_paths(self, tokens: Tensor, rows: Tensor, anchors: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the target's own K greedy tokens after each anchor, [N, K], and p [N, K, Vd] at temperature 1 along them.

        K forwards: only for rows that were not answered greedily.
        """
        path = torch.zeros(len(rows), 0, dtype=torch.long, device=tokens.device)
        for _ in range(k):
            prob, path = self.probabilities(tokens, rows, anchors, path, 1.0)
        return path, prob


def _tree_arguments(root: Tensor, length: int, steps: int) -> dict[str, Tensor]:
    """Return attention_mask [B, 1, L, L] bool and position_ids [B, L] for rows of `length` with chains behind `root` [B, n]."""
    own = torch.arange(root.shape[1] * steps, device=root.device)
    chain, depth = own // max(steps, 1), own % max(steps, 1)
    before = torch.arange(length, device=root.device)
    position = torch.cat([before.expand(len(root), -1), root[:, chain] + 1 + depth], 1)
    mask = torch.zeros(len(root), 1, position.shape[1], position.shape[1], dtype=torch.bool, device=root.device)
    mask[:, :, :length, :length] = before[:, None] >= before
    mask[:, 0, length:, :length] = before <= root[:, chain][:, :, None]
    mask[:, :, length:, length:] = (chain[:, None] == chain) & (depth[:, None] >= depth)
    return {"attention_mask": mask, "position_ids": position}


def greedy_rounds(
    start: DraftPass, rows: Tensor, anchors: Tensor, k: int, ends: Tensor, verifier: TreeVerifier | None = None
) -> Rounds:
    """Rounds at temperature 0 along the target's greedy path from each anchor. `ends` [*] int64: end-of-text ids.

    Without `verifier` the rows were answered at temperature 0 and are their own path: no target forward, and the kept
    probabilities serve the cross-entropy. With it the path is generated.
    """
    steps = torch.arange(k, device=anchors.device)
    dense: Tensor | None = None
    if verifier is None:
        path, inside = start.row_tokens(rows[:, None], anchors[:, None] + 1 + steps)
    else:
        path, dense = verifier.greedy_paths(start.batch.tokens, rows, anchors, k)
        inside = torch.ones_like(path, dtype=torch.bool)
    origin = Origin(start.batch, rows, anchors, path)
    logits = along(start, origin, 0.0)
    token = start.index[path]
    live = inside & _before_end(torch.isin(path, ends) | (token < 0))
    if dense is not None:
        return Rounds(0.0, logits, token, live, dense=dense, origin=origin)
    at = (anchors[:, None] + steps).clamp_max(start.batch.tokens.shape[1] - 1)
    kept = start.index[start.batch.topk_index[rows[:, None], at]]
    kept_prob = start.batch.topk_prob[rows[:, None], at]
    return Rounds(0.0, logits, token, live, topk_index=kept, topk_prob=kept_prob, origin=origin)


def along(start: DraftPass, origin: Origin, temperature: float) -> tuple[Tensor, ...]:
    """Return K logits [N, Vd] of rounds that are fed the tokens of `origin`, divided by a temperature > 0."""
    chain = start.chain(origin.rows, origin.anchors)
    logits = []
    for i in range(origin.path.shape[1]):
        if i:
            chain.advance(origin.path[:, i - 1])
        logits.append(chain.logits().float() / temperature if temperature else chain.logits())
    return tuple(logits)


def sampled_rounds(
    start: DraftPass, rows: Tensor, anchors: Tensor, k: int, ends: Tensor, verifier: TreeVerifier, temperature: float,
    generator: torch.Generator,
) -> Rounds:
    """Rounds at `temperature` > 0: K tokens sampled from q at every anchor, judged by the target in one forward."""
    logits: list[Tensor] = []
    drawn: list[Tensor] = []
    chain = start.chain(rows, anchors)
    for i in range(k):
        if i:
            chain.advance(start.ids[drawn[-1]])
        logits.append(chain.logits().float() / temperature)
        drawn.append(sample(logits[-1].detach(), generator).squeeze(1))
    token = torch.stack(drawn, 1)
    path = start.ids[token]
    dense, _ = verifier.probabilities(start.batch.tokens, rows, anchors, path[:, :-1], temperature)
    live, origin = _before_end(torch.isin(path, ends)), Origin(start.batch, rows, anchors, path)
    return Rounds(temperature, tuple(logits), token, live, dense=dense, origin=origin)


def _before_end(over: Tensor) -> Tensor:
    """Return [N, K] bool: no position before this one ended the text (the one that ends it still counts)."""
    return over.cumsum(1) - over.long() == 0


def sample(logits: Tensor, generator: torch.Generator, draws: int = 1) -> Tensor:
    """Draw draft ids, [N, draws], from softmax(logits [N, Vd] float32), by inversion of the distribution function."""
    mass = logits.softmax(1).cumsum(1, dtype=torch.float64)
    point = torch.rand(len(mass), draws, generator=generator, dtype=torch.float64).to(mass.device) * mass[:, -1:]
    return torch.searchsorted(mass, point, right=True).clamp_max(mass.shape[1] - 1)
