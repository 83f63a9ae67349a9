"""Continuous batching: requests come and go; each step drafts, verifies and emits for those that are in the batch.

A slot whose request has x_0 .. x_L known holds positions 0 .. L-1 in the target's cache; x_L is pending. A pass feeds
the pending token and draft tokens, and decides as many draft tokens as there are logits. Decided tokens are emitted;
the last of them is pending then. A draft may be verified in one pass or in chunks ("batch-sequential"): of a chunk of
w tokens, the first is the pending one, and a request goes on to its next chunk once all w decisions were acceptances.
Synchronously, only those requests take the further passes of a round; carried over, their next chunk shares the next
step's pass with everybody's first.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle.decode.backlog import Backlog
from eagle.decode.cache import Branches
from eagle.decode.control import LengthPolicy, Plan
from eagle.decode.intake import Traffic
from eagle.decode.judge import Judge
from eagle.decode.proposal import MAX_DRAFT_TOKENS, Drafter, Draws, Proposal
from eagle.decode.randomness import Stream, uniforms
from eagle.decode.requests import Answer, Left, Request, Slot
from eagle.decode.sampling import Warp
from eagle.decode.stats import DecodeStats
from eagle.target.taps import HiddenTaps

if TYPE_CHECKING:
    from eagle.decode.engine import Engine

_Resolved = dict[int, list[int]]  # draft length -> accepted draft tokens of each draft that was decided
_PREFILL_ROWS = 8  # rows per prefill pass: bounds the logits, which are computed at every row's last position


class Decoding:
    """One run of an engine; see `Engine.decoding`. `submit` requests, `step` while `busy`."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        taps: HiddenTaps | None,
        policy: LengthPolicy,
        judge: Judge,
        limit: int,
        carry: bool,
    ) -> None:
        self.engine, self.drafter, self.policy, self.limit, self.carry = engine, drafter, policy, limit, carry
        self.stats = DecodeStats()
        self._taps, self._judge = taps, judge
        self._device = engine.target.device
        self._backlog = Backlog(engine.batch, self._device)
        self._waiting: deque[Answer] = deque()
        self._slots: list[Slot] = []
        self._warp: Warp | None = None
        self._ended, self._taken_in, self._intake_seconds = 0, 0, 0.0  # since the policy was last told

    @property
    def busy(self) -> bool:
        """Whether any request waits or is in the batch."""
        return bool(self._waiting or self._slots)

    @property
    def batch(self) -> int:
        """How many requests are in the batch."""
        return len(self._slots)

    @property
    def open(self) -> int:
        """How many requests wait or are in the batch."""
        return len(self._waiting) + len(self._slots)

    def clock(self) -> float:
        """Return the time in seconds, after all work queued on an accelerator is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def submit(self, request: Request) -> Answer:
        """Queue a request. Raises ValueError for an empty prompt or one that does not fit with its answer."""
        length = len(request.prompt)
        if not length or request.max_new_tokens < 0 or length + request.max_new_tokens > self.engine.max_length:
            raise ValueError(
                f"prompt {request.key}: {length} + {request.max_new_tokens} tokens do not fit 1..{self.engine.max_length}"
            )
        if request.key < 0:
            raise ValueError(f"a request's key must be 0 or more, not {request.key}")
        answer = Answer(request)
        if request.max_new_tokens:
            self._waiting.append(answer)
        else:
            answer.finish = "length"
        return answer

    def step(self) -> None:
        """Take in waiting requests as far as there is room, then do one round for all in the batch."""
        while self._waiting and len(self._slots) < self.limit:
            self._prefill(min(len(self._waiting), self.limit - len(self._slots), _PREFILL_ROWS))
        if not self._slots:
            return
        wanted, count = self._wanted(), len(self._slots)
        plan = wanted if self._useful(wanted) else Plan(0, wanted.chunk)
        began = self.clock()
        proposal = self._draft(plan.length, plan.rows) if plan.length else None
        drafted = self.clock()
        resolved: _Resolved = defaultdict(list)
        if proposal is not None and proposal.parents is not None:
            self._tree_pass(proposal, plan.length, resolved)
        else:
            going = self._pass(list(range(count)), plan.chunk, resolved)
            while going and not self.carry:
                going = self._pass(going, plan.chunk, resolved)
        decided = self.clock()
        decisions = [accepted for found in resolved.values() for accepted in found]
        self.stats.record(count, plan.length if proposal else 0, decisions, drafted - began, decided - drafted)
        for length, accepted in resolved.items():  # drafts that were carried over may have another length than this step's
            self.policy.observe(count, Plan(length, plan.chunk), accepted, self._traffic())
        if not wanted.length and not resolved:
            self.policy.observe(count, plan, [], self._traffic())
        self._leave()

    def _traffic(self) -> Traffic:
        """Return what came and went since the last call."""
        found = Traffic(self._ended, self._taken_in, self._intake_seconds)
        self._ended, self._taken_in, self._intake_seconds = 0, 0, 0.0
        return found

    def _wanted(self) -> Plan:
        """Return what the policy wants."""
        plan = Plan(0) if self.drafter is None else self.policy.plan(len(self._slots))
        if not 0 <= plan.length <= MAX_DRAFT_TOKENS or plan.chunk < 0:
            raise ValueError(f"the policy asked for {plan}; 0..{MAX_DRAFT_TOKENS} draft tokens are possible")
        return plan

    def _useful(self, plan: Plan) -> bool:
        """Whether a draft makes sense: not where every request lacks just one token."""
        # A drawn tree is drafted for all rows or none: whether it is may not depend on who else is in the batch.
        drawn_tree = self.drafter is not None and self.drafter.lanes > 0
        return not plan.length or drawn_tree or max(slot.open_tokens for slot in self._slots) > 1

    def _warps(self) -> Warp:
        if self._warp is None:
            self._warp = Warp.of([slot.answer.request.sampling for slot in self._slots], self._device)
        return self._warp

    def _streams(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Return seeds and keys of the rows' random streams."""
        requests = [self._slots[row].answer.request for row in rows]
        return [r.sampling.seed for r in requests], [r.key for r in requests]

    def _prefill(self, count: int) -> None:
        """Run the prompts of the next `count` requests (right-padded) and emit each one's first token."""
        began = self.clock()
        answers = [self._waiting.popleft() for _ in range(count)]
        prompts = [list(answer.request.prompt) for answer in answers]
        lengths, first = [len(p) for p in prompts], len(self._slots)
        longest = max(lengths)
        padded = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=self._device)
        ends = sorted({length - 1 for length in lengths})
        rows = list(range(first, first + count))
        kept = self.engine.forward(padded, [0] * count, rows, torch.tensor(ends, device=self._device))
        logits = kept[torch.arange(count), [ends.index(length - 1) for length in lengths]]
        params = [answer.request.sampling for answer in answers]
        seeds, keys = [p.seed for p in params], [answer.request.key for answer in answers]
        tokens = self._judge.first(logits, Warp.of(params, self._device), seeds, keys, lengths)
        now = self.clock()
        states = self._taps.concat() if self._taps else None
        for i, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
            self._slots.append(Slot(answer, lengths[i], token, now))
            answer.first_token = now
            self._backlog.begin(rows[i])
            if self.drafter:
                self._backlog.add(rows[i], prompts[i][1:] + [token], None if states is None else states[i, : lengths[i]].clone())
            self._emit(self._slots[-1], [token], now)
        self._warp = None
        self.stats.prefill_seconds += now - began
        self.stats.ttft_seconds += (now - began) * count
        self._leave()

    def _draft(self, length: int, most: int) -> Proposal | None:
        """Draft for the slots that have no draft left and lack more than one token (a tree: for all slots).

        At most `most` of them (0: all), those first that the drafter knows already.
        """
        assert self.drafter is not None  # noqa: S101 -- for the type checker
        all_rows = self.drafter.branches
        rows = [row for row, slot in enumerate(self._slots) if all_rows or (slot.left is None and slot.open_tokens > 1)]
        if most and not all_rows:
            rows = sorted(sorted(rows, key=self._backlog.waiting)[:most])
        if not rows:
            return None
        fresh = [row for row in rows if self._backlog.fresh(row)]
        known = [row for row in rows if not self._backlog.fresh(row)]
        # Few rows a pass where there is much to take in: prompts, or what a long rest has left.
        size = _PREFILL_ROWS if any(self._backlog.waiting(row) > 2 * MAX_DRAFT_TOKENS for row in known) else max(len(known), 1)
        began = self.clock() if fresh else 0.0
        for group in (fresh[i : i + _PREFILL_ROWS] for i in range(0, len(fresh), _PREFILL_ROWS)):
            self.drafter.extend(group, *self._backlog.take(group))
        if fresh:
            self._taken_in += len(fresh)
            self._intake_seconds += self.clock() - began
        for group in (known[i : i + size] for i in range(0, len(known), size)):
            self.drafter.extend(group, *self._backlog.take(group))
        draws = None
        warp = self._warps()
        if not warp.greedy and not self.drafter.deterministic:
            seeds, keys = self._streams(rows)
            places = [self._slots[row].length + 1 for row in rows]
            salt = [len(self._slots[row].answer.accepted) for row in rows] if self._judge.fresh_numbers else None
            numbers = uniforms(seeds, Stream.DRAFT, keys, places, length, self._device, self.drafter.lanes, salt)
            draws = Draws(warp.take(rows), numbers)
        proposal = self.drafter.draft(rows, length, draws)
        if proposal.parents is None:
            for i, (row, tokens) in enumerate(zip(rows, proposal.tokens.tolist(), strict=True)):
                self._slots[row].left = Left(proposal, i, tokens)
        return proposal

    def _pass(self, rows: list[int], chunk: int, resolved: _Resolved) -> list[int]:
        """Feed each row's pending token and the next part of its draft; return the rows whose next part may follow.

        `resolved` gets the drafts that are decided now.
        """
        slots = [self._slots[row] for row in rows]
        # With as many drafts as a chunk holds tokens, the chunk's logits decide them all; the bonus takes one pass more.
        full = [bool(chunk and slot.left and len(slot.left.rest) >= chunk) for slot in slots]
        decide = [(s.left.rest[:chunk] if f else s.left.rest) if s.left else [] for s, f in zip(slots, full, strict=True)]
        fed = [[slot.pending, *(d[:-1] if f else d)] for slot, d, f in zip(slots, decide, full, strict=True)]
        width = max(map(len, fed))
        block = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in fed], device=self._device)
        starts = [slot.length for slot in slots]
        logits = self.engine.forward(block, starts, rows)
        self.stats.saw_logits(logits)
        seeds, keys = self._streams(rows)
        warp = self._warps() if len(rows) == len(self._slots) else self._warps().take(rows)
        rounds = [len(slot.answer.accepted) for slot in slots]
        accepted, following = self._judge.chains(logits, decide, [slot.left for slot in slots], warp, seeds, keys, starts, rounds)
        now = self.clock()
        aux = self._taps.concat() if self._taps else None
        going = []
        for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            passed = full[i] and accepted[i] == chunk
            tokens = decide[i][: accepted[i]] + ([] if passed else [following[i]])
            if slot.left:
                slot.left.at += accepted[i]
                if passed:
                    going.append(row)
                else:
                    self._resolve(slot, resolved)
            self._gain(row, tokens, None if aux is None else aux[i, : len(tokens)].clone(), now)
            if slot.left and slot.answer.finish:
                self._resolve(slot, resolved)
        return [row for row in going if self._slots[row].left]

    def _resolve(self, slot: Slot, resolved: _Resolved) -> None:
        """A row's draft is decided: count it."""
        assert slot.left is not None  # noqa: S101 -- for the type checker
        self.stats.observe([slot.left.at], len(slot.left.tokens))
        slot.answer.accepted.append(slot.left.at)
        resolved[len(slot.left.tokens)].append(slot.left.at)
        slot.left = None

    def _tree_pass(self, proposal: Proposal, depth: int, resolved: _Resolved) -> None:
        """Verify a tree per row in one pass; the accepted branch becomes the row's line."""
        assert self.drafter is not None  # noqa: S101 -- for the type checker
        assert proposal.parents is not None  # noqa: S101 -- for the type checker
        rows = list(range(len(self._slots)))
        starts = [slot.length for slot in self._slots]
        pending = torch.tensor([[slot.pending] for slot in self._slots], device=self._device)
        visible = ancestors(proposal.parents)
        depths = visible.sum(dim=-1) - 1
        base = torch.tensor(starts, device=self._device)[:, None]
        logits = self.engine.forward(
            torch.cat([pending, proposal.tokens], dim=1), starts, rows, branches=Branches(starts, base + depths, visible)
        )
        self.stats.saw_logits(logits)
        seeds, keys = self._streams(rows)
        verdict = self._judge.tree(logits, proposal, depth, self._warps(), seeds, keys, starts)
        if self.drafter.learns:
            self.drafter.digest(rows, proposal, logits.argmax(dim=-1))
        taken = torch.arange(verdict.path.shape[1], device=self._device) < verdict.accepted[:, None]
        line = torch.arange(1, verdict.path.shape[1] + 1, device=self._device)
        places = torch.where(taken, verdict.path + 1, line)
        self.engine.store.keep(rows, base + places, [start + 1 for start in starts])
        tokens = torch.cat([proposal.tokens.gather(1, verdict.path.clamp_min(0)), verdict.following[:, None]], dim=1).tolist()
        accepted = verdict.accepted.tolist()
        now = self.clock()
        aux = None
        if self._taps:
            aux = self._taps.concat()
            order = torch.cat([torch.zeros_like(places[:, :1]), places], dim=1).clamp_max(aux.shape[1] - 1)
            aux = aux.gather(1, order[:, :, None].expand(-1, -1, aux.shape[-1]))
        for row, slot in enumerate(self._slots):
            gained = tokens[row][: accepted[row]] + tokens[row][-1:]
            self.stats.observe([accepted[row]], depth)
            slot.answer.accepted.append(accepted[row])
            resolved[depth].append(accepted[row])
            self._gain(row, gained, None if aux is None else aux[row, : len(gained)].clone(), now)

    def _gain(self, row: int, tokens: list[int], aux: Tensor | None, now: float) -> None:
        """A row's text goes on by `tokens`: the target's cache holds all but the last of them and what was pending."""
        slot = self._slots[row]
        if self.drafter:
            self._backlog.add(row, tokens, aux)
        slot.length += len(tokens)
        slot.pending = tokens[-1]
        self._emit(slot, tokens, now)

    def _emit(self, slot: Slot, tokens: list[int], now: float) -> None:
        """Append tokens to a request's answer up to a stop token or the limit, and note whether it is finished."""
        answer = slot.answer
        before = len(answer.tokens)
        for token in tokens:
            answer.tokens.append(token)
            if token in answer.request.stop:
                answer.finish = "stop"
                break
            if len(answer.tokens) >= answer.request.max_new_tokens:
                answer.finish = "length"
                break
        gained = len(answer.tokens) - before
        if before:
            self.stats.token_seconds.extend([(now - slot.since) / gained] * gained)
        self.stats.tokens += gained
        slot.since = now
        if answer.finish:
            answer.finished = now

    def _leave(self) -> None:
        """Let finished requests go: the last slots move into the gaps."""
        if all(slot.answer.finish is None for slot in self._slots):
            return
        slot = 0
        while slot < len(self._slots):
            if self._slots[slot].answer.finish is None:
                slot += 1
                continue
            last = len(self._slots) - 1
            moved = self._slots.pop()
            self._ended += 1
            self._backlog.begin(slot)
            if slot != last and moved.answer.finish is None:
                self.engine.store.move(last, slot, moved.length)
                if self.drafter and not self._backlog.fresh(last):
                    self.drafter.move(last, slot)
                self._backlog.move(last, slot)
            if slot != last:
                self._slots[slot] = moved
        self._warp = None


def ancestors(parents: Tensor) -> Tensor:
    """Return which of the pending token and N nodes each of them follows or is: bool [n, 1+N, 1+N], of parents [n, N]."""
    count, nodes = parents.shape
    step = torch.eye(nodes + 1, device=parents.device).repeat(count, 1, 1)
    step[:, 1:].scatter_(2, (parents + 1)[:, :, None], 1.0)
    reach = step
    for _ in range(max(nodes - 1, 1).bit_length()):
        reach = (reach @ reach).clamp_max(1.0)
    return reach > 0
