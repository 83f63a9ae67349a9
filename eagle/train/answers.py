"""Stage 2 along the target's own answers: how many rounds serving would need for them, and its gradient.

The text that speculative decoding emits at temperature T has the target's law whatever the draft is, so an answer y that the
target gave at T is a sample of it, and does not depend on the draft. Given y, a draft token that reaches y_i is accepted with
probability a_i = min(1, q_i(y_i) / p_i(y_i)) (T = 0: q_i(y_i), of a draft that samples), because the accepted mass at y_i is
min(p, q)(y_i) of the emitted p(y_i). Hence, with reach_n(k) = prod_{i<=k} a_i of a round that starts at token n,

    s(m) = sum_n s(n) P(round n emits m - n tokens),  P(k accepted) = reach_n(k) - reach_n(k+1),  s(first) = 1,

is the probability that a round starts at m, and R = sum_m s(m) the expected number of rounds for y. Both are differentiable in
q; over y ~ p the mean of R and of its gradient is exact, so no importance weights, no accept bits and no target forward
are needed. What is maximised is the number of tokens a round, (tokens) / (R), of the rows of a step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.config import Config
from eagle.draft.model import DraftModel
from eagle.errors import DataError
from eagle.train import objectives, rollout
from eagle.train.batches import Batch, collate
from eagle.train.features import FeatureStore
from eagle.train.reward import Objective
from eagle.train.rollout import DraftPass, Rounds, Stretch
from eagle.train.visits import MIN_ANSWER, RowOrder, arithmetic, step_generator, temperature_schedule, usable_rows

FLOOR = 0.25  # a round whose probability of coming this far is lower goes on with probability reach / FLOOR


def expected_starts(reach: Tensor) -> Tensor:
    """Return s [B, S]: the probability that a round starts at each of S consecutive tokens; 1 at the first.

    reach [B, S, K]: probability (or an unbiased estimate of it) that the first k + 1 drafts of a round there are accepted.
    """
    batch, span, k = reach.shape
    whole = torch.cat([torch.ones_like(reach[:, :, :1]), reach, torch.zeros_like(reach[:, :, :1])], 2)
    emits = whole[:, :, :-1] - whole[:, :, 1:]  # [B, S, K + 1]: k accepted, k + 1 tokens emitted
    padded = torch.nn.functional.pad(emits, (0, 0, k + 1, 0))
    # into[:, t, a]: how the round that starts a + 1 tokens before t emits just those
    into = torch.stack([padded[:, k - a : k - a + span, a] for a in range(k + 1)], 2)
    before = reach.new_zeros(batch, k + 1)  # s of the k + 1 tokens before t, the last one first
    starts = []
    for t in range(span):
        now = reach.new_ones(batch) if t == 0 else (before * into[:, t]).sum(1)
        starts.append(now)
        before = torch.cat([now[:, None], before[:, :-1]], 1)
    return torch.stack(starts, 1)


@dataclass(frozen=True)
class Answers:
    """Answers of a step: `temperature` they were given at, the rows' cut `stretch`, and the draft's first pass over them."""

    temperature: float
    stretch: Stretch
    start: DraftPass

    def anchors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rows, columns, anchors) [N] int64: every token of the stretch after which a round could start."""
        last = self.stretch.batch.lengths.cpu() - 2
        window = self.stretch.offset[:, None] + torch.arange(self.stretch.span)
        rows, columns = (window <= last[:, None]).nonzero(as_tuple=True)
        device = self.start.batch.tokens.device
        return rows.to(device), columns.to(device), window[rows, columns].to(device)

    @torch.no_grad()
    def some_rounds(self, rows: int, k: int, ends: Tensor) -> Rounds:
        """Return the rounds of the first `rows` rows, without gradient, for comparing drafts along them."""
        at, _, anchors = self.anchors()
        few = at < rows
        found = rollout.greedy_rounds(self.start, at[few], anchors[few], k, ends)
        if not self.temperature:
            return found
        scaled = tuple(z.float() / self.temperature for z in found.logits)
        return Rounds(self.temperature, scaled, found.token, found.live, origin=found.origin)


class AnswerRollouts:
    """Which answers every step looks at: a function of the seed and the step number."""

    def __init__(self, config: Config, store: FeatureStore, model: DraftModel, mean_advance: float) -> None:
        self.config, self.store, self.model, self.mean_advance = config.policy, store, model, mean_advance
        self.seed, self.device = config.runtime.seed, model.lm_head.weight.device
        self._autocast = config.distill.autocast
        self.schedule = temperature_schedule(self.config.temperatures, self.config.steps)
        usable, self.skipped = usable_rows(store)
        self._orders = {t: self._order(usable, t) for t in sorted(set(self.schedule))}
        self.ends = torch.tensor(model.spec.eos_token_id, dtype=torch.long, device=self.device)

    def _order(self, usable: Sequence[int], temperature: float) -> RowOrder:
        rows = [i for i in usable if self.store.rows[i].temperature == temperature]
        if not rows:
            had = ", ".join(f"{t:g}" for t in sorted({self.store.rows[i].temperature for i in usable})) or "none"
            raise DataError(
                f"policy.path answers: no training answer of {MIN_ANSWER} tokens or more was given at temperature {temperature:g} "
                f"(there are: {had}); add it to dataset.temperatures, or set policy.path=drafts"
            )
        lengths = [self.store.rows[i].length for i in rows]
        return RowOrder(rows, lengths, self.config.sequences_per_step, [self.seed, round(1000 * temperature)])

    def at(self, step: int) -> tuple[Answers, torch.Generator]:
        """Run the draft over the answers of `step`, with gradient. Returns them and the step's generator."""
        temperature = self.schedule[step]
        visit = sum(t == temperature for t in self.schedule[:step])
        generator = step_generator(self.seed, step)
        batch = collate(self.store, self._orders[temperature].at(visit), str(self.device))
        n, k = self.config.anchors_per_sequence, self.config.draft_tokens
        stretch = rollout.draw_stretch(batch, n, k, self.mean_advance, generator)
        with arithmetic(self.device, self._autocast):
            return Answers(temperature, stretch, DraftPass(self.model, stretch.batch)), generator

    def objective(self, answers: Answers, generator: torch.Generator) -> Objective:
        """Return -(tokens a round) + weight * anchor on these answers, and what to report of them.

        `expected` and `accepted` are tokens a round without the bonus token: of a draft that samples, and as served (T = 0: the
        draft's argmax). The anchor is the mean soft cross-entropy over the positions that the rounds came to.
        """
        with arithmetic(self.device, self._autocast):
            rows, columns, anchors = answers.anchors()
            walk = _Walk(answers, rows, anchors)
            for _ in range(self.config.draft_tokens):
                if not walk.step(generator):
                    break
        shape = (len(answers.stretch.offset), answers.stretch.span, self.config.draft_tokens)
        place = (rows, columns)
        grid = walk.reach[0].new_zeros(shape).index_put(place, _filled(walk.reach, shape[2]))
        served = grid.detach().new_zeros(shape).index_put(place, _filled(walk.served, shape[2]))
        with torch.no_grad():
            reported = len(rows) / float(expected_starts(served)[place].sum()) - 1.0
        per_round = len(rows) / expected_starts(grid)[place].sum()
        anchor = walk.entropy / max(walk.positions, 1)
        expected = float(per_round.detach()) - 1.0
        reward = expected - self.config.token_cost * self.config.draft_tokens
        return Objective(-per_round + self.config.anchor_weight * anchor, expected, reported, reward, float(anchor.detach()))


def _filled(parts: Sequence[Tensor], k: int) -> Tensor:
    """Return the K columns of `parts` ([N] each) as [N, K], zeros for steps that no round came to."""
    return torch.stack([*parts, *[torch.zeros_like(parts[0])] * (k - len(parts))], 1)


class _Walk:
    """Rounds at every token of the answers, step by step; improbable ones are dropped at random, without bias."""

    def __init__(self, answers: Answers, rows: Tensor, anchors: Tensor) -> None:
        self._answers, self._rows, self._anchors = answers, rows, anchors
        self._batch: Batch = answers.start.batch
        self._chain = answers.start.chain(rows, anchors)
        self._alive = torch.arange(len(rows), device=rows.device)
        self._token = answers.start.batch.tokens[rows, anchors]  # the last one taken
        self._now = torch.ones(len(rows), device=rows.device)
        self._hits = torch.ones(len(rows), device=rows.device)
        self.reach: list[Tensor] = []
        self.served: list[Tensor] = []
        self.entropy: Tensor = torch.zeros((), device=rows.device)
        self.positions = 0

    def step(self, generator: torch.Generator) -> bool:
        """Draft one token in every living round. Returns whether any round goes on."""
        answers, alive, i = self._answers, self._alive, len(self.reach)
        if i:
            self._chain.advance(self._token)
        rows, at = self._rows[alive], self._anchors[alive] + i
        y, inside = answers.start.row_tokens(rows, at + 1)
        draft_id = answers.start.index[y]
        logits = self._chain.logits()
        label = at.clamp_max(self._batch.tokens.shape[1] - 1)
        kept = answers.start.index[self._batch.topk_index[rows, label]]
        entropy = objectives.soft_cross_entropy(logits, kept, self._batch.topk_prob[rows, label])
        self.entropy = self.entropy + (entropy * inside).sum()
        self.positions += int(inside.sum())
        cold = answers.temperature == 0
        q = objectives.path_probability(logits, draft_id).float()
        accept = (q if cold else (q / self._batch.own[rows, label].exp()).clamp_max(1.0)) * inside
        hit = (logits.argmax(1) == draft_id) & inside if cold else accept.detach()
        self._now, self._hits = self._now * accept, self._hits * hit
        self.reach.append(self._back(self._now))
        self.served.append(self._back(self._hits))
        known = self._now.detach()
        chance = (torch.maximum(known, self._hits) / FLOOR).clamp_max(1.0)
        going = torch.rand(chance.shape, generator=generator).to(chance.device) < chance
        self._now, self._hits, self._alive = self._now[going] / chance[going], self._hits[going] / chance[going], alive[going]
        self._token = y[going]
        self._chain.keep(going)
        return bool(len(self._alive))

    def _back(self, values: Tensor) -> Tensor:
        """Return values of the living rounds [n] at their places among all, [N]."""
        return values.new_zeros(len(self._rows)).index_put((self._alive,), values)
