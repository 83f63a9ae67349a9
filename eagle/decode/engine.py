"""The reference engine: plain and speculative decoding of ragged batches, one loop for both.

A row of length L has x_0 .. x_L known; the target's cache covers positions 0 .. L-1. A round feeds x_L and K draft
tokens to the target in one pass, keeps what verification accepts plus one token of the target's own, and lets the
drafter take in the accepted positions. K = 0 is autoregressive decoding with the same code, caches and kernels. The
target runs through transformers' own modules with `eagle.decode.cache`'s KV memory and attention.
"""

from __future__ import annotations

import time
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle.decode.cache import KeyValueStore, MaskMaker, TargetCache, ragged_attention
from eagle.decode.drafting import Drafter, EagleDrafter, Proposal, Sampling
from eagle.decode.randomness import Stream, uniforms
from eagle.decode.stats import DecodeStats
from eagle.decode.verify import Verdict, draw, verify_greedy, verify_sampled
from eagle.draft.model import DraftModel
from eagle.target.taps import HiddenTaps

MAX_DRAFT_TOKENS = 16
_PREFILL_ROWS = 8  # rows per prefill pass: bounds the logits, which are computed at every row's last position


@dataclass
class DecodeResult:
    """`tokens[i]`: what prompt i got (the stop token included); `finish[i]`: why it ended; `stats`: see DecodeStats.

    `accepted[i]`: how many draft tokens each round of prompt i accepted, counted as the stats are.
    """

    tokens: list[list[int]]
    finish: list[Literal["stop", "length"]]
    accepted: list[list[int]]
    stats: DecodeStats


@dataclass(frozen=True)
class _Job:
    """The arguments of one `generate` call."""

    max_new_tokens: int
    draft_tokens: int
    temperature: float
    seed: int
    stop: AbstractSet[int]


@dataclass
class _Wave:
    """Requests that are decoded together. Slot i of the caches holds request `rows[i]` with `lengths[i]` positions."""

    rows: list[int]
    lengths: list[int]
    began: float
    pending: Tensor = field(default_factory=lambda: torch.empty(0))  # [n, 1] x_L, not yet in the target's cache


class Engine:
    """Decodes up to `batch` prompts at once, each of at most `max_length` tokens with its answer.

    `draft` is a trained DraftModel, another `Drafter`, or None. `aux_layers` are the target's tapped states (vLLM's
    ids); they must be the draft's. All memory is allocated here. `compiled` compiles the Eagle draft's step.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel | Drafter | None,
        aux_layers: tuple[int, ...],
        *,
        max_length: int,
        batch: int,
        compiled: bool = False,
    ) -> None:
        config = target.config.get_text_config()
        room = max_length + MAX_DRAFT_TOKENS + 1  # a last draft may reach beyond the end
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.target, self.batch, self.max_length = target, batch, max_length
        self.store = KeyValueStore(
            config.num_hidden_layers, batch, room, config.num_key_value_heads, head_dim, target.dtype, target.device
        )
        self._cache = TargetCache(self.store)
        self._mask = MaskMaker(config, target.dtype)
        if isinstance(draft, DraftModel):
            embed = target.get_input_embeddings().weight
            assert isinstance(embed, Tensor)  # noqa: S101 -- for the type checker
            self.drafter: Drafter | None = EagleDrafter(draft, embed, batch=batch, max_length=room, compiled=compiled)
        else:
            self.drafter = draft
        if self.drafter is not None and tuple(self.drafter.aux_layers) != tuple(aux_layers):
            raise ValueError(f"the draft was trained on hidden states {self.drafter.aux_layers}, not {aux_layers}")

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        draft_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: AbstractSet[int] = frozenset(),
        ignore_eos: bool = False,
        batch: int | None = None,
    ) -> DecodeResult:
        """Continue each prompt (token ids) by at most `max_new_tokens` tokens, drafting `draft_tokens` a round.

        `draft_tokens` 0, or no draft: autoregressive. `temperature` 0: greedy. `stop` ids end an answer unless
        `ignore_eos`. Prompts are taken in waves of `batch` (default: the engine's own); a request that is done leaves
        its wave, and the next wave begins when all are. At temperature > 0 the random numbers depend on `seed`, the
        prompt's index and the position only. Raises ValueError for an empty prompt or one that does not fit.
        """
        if not 0 <= draft_tokens <= MAX_DRAFT_TOKENS or max_new_tokens < 1 or temperature < 0:
            raise ValueError(f"draft_tokens must be 0..{MAX_DRAFT_TOKENS}, max_new_tokens >= 1 and temperature >= 0")
        for index, prompt in enumerate(prompts):
            if not prompt or len(prompt) + max_new_tokens > self.max_length:
                raise ValueError(f"prompt {index}: {len(prompt)} + {max_new_tokens} tokens do not fit 1..{self.max_length}")
        size = self.batch if batch is None else batch
        if not 1 <= size <= self.batch:
            raise ValueError(f"batch must be 1..{self.batch}")
        drafter = self.drafter if draft_tokens else None
        job = _Job(max_new_tokens, draft_tokens if drafter else 0, temperature, seed, frozenset() if ignore_eos else stop)
        tapping = HiddenTaps(self.target, drafter.aux_layers) if drafter else nullcontext()
        with torch.inference_mode(), ragged_attention(self.target), tapping as taps:
            run = _Run(self, job, drafter, taps, prompts)
            began = run.clock()
            for first in range(0, len(prompts), size):
                run.wave(list(range(first, min(first + size, len(prompts)))))
            run.stats.seconds = run.clock() - began
        run.stats.tokens = sum(len(tokens) for tokens in run.outputs)
        run.stats.ttft_seconds /= max(len(prompts), 1)
        return DecodeResult(run.outputs, run.finish, run.accepted, run.stats)

    def forward(self, tokens: Tensor, starts: list[int], first_row: int = 0, keep: Tensor | int = 0) -> Tensor:
        """Run the target over tokens [n, T] from positions `starts` on; returns its logits [n, T or kept, V]."""
        positions = self.store.plan(starts, tokens.shape[1], first_row)
        output = self.target(
            input_ids=tokens,
            attention_mask=self._mask(self.store),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits
        return logits


class _Run:
    """One `generate` call."""

    def __init__(
        self, engine: Engine, job: _Job, drafter: Drafter | None, taps: HiddenTaps | None, prompts: list[list[int]]
    ) -> None:
        self.engine, self.job, self.drafter, self.taps, self.prompts = engine, job, drafter, taps, prompts
        self.device = engine.target.device
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.finish: list[Literal["stop", "length"]] = ["length"] * len(prompts)
        self.accepted: list[list[int]] = [[] for _ in prompts]
        self.stats = DecodeStats()

    def clock(self) -> float:
        """Return the time in seconds, after all work queued on an accelerator is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def wave(self, rows: list[int]) -> None:
        """Decode some requests to their end."""
        wave = _Wave(rows, [len(self.prompts[row]) for row in rows], self.clock())
        proposal = self._prefill(wave)
        while wave.rows:
            proposal = self._round(wave, proposal)

    def _prefill(self, wave: _Wave) -> Proposal | None:
        """Run the prompts (right-padded), emit each request's first token, draft for the first round."""
        longest = max(wave.lengths)
        padded = torch.tensor([self.prompts[r] + [0] * (longest - len(self.prompts[r])) for r in wave.rows], device=self.device)
        logits, states = [], []
        for first in range(0, len(wave.rows), _PREFILL_ROWS):
            group = slice(first, first + _PREFILL_ROWS)
            lengths = wave.lengths[group]
            ends = sorted({length - 1 for length in lengths})
            kept = self.engine.forward(padded[group], [0] * len(lengths), first, torch.tensor(ends, device=self.device))
            logits.append(kept[torch.arange(len(lengths)), [ends.index(length - 1) for length in lengths]])
            if self.taps:
                states.append(self.taps.concat())
        final = torch.cat(logits)
        if self.job.temperature:
            number = uniforms(self.job.seed, Stream.TOKEN, wave.rows, wave.lengths, 1, self.device)[:, 0]
            tokens = draw(self._probabilities(final), number)
        else:
            tokens = final.argmax(dim=-1)
        counts, shifted = wave.lengths, torch.cat([padded[:, 1:], padded[:, :1]], dim=1)
        shifted[torch.arange(len(counts)), [count - 1 for count in counts]] = tokens
        emitted = [[token] for token in tokens.tolist()]
        proposal = self._advance(wave, emitted, shifted, torch.cat(states) if states else None, [0] * len(counts), counts)
        now = self.clock()
        self.stats.ttft_seconds += (now - wave.began) * len(counts)
        self.stats.prefill_seconds += now - wave.began
        return proposal

    def _round(self, wave: _Wave, proposal: Proposal | None) -> Proposal | None:
        """Verify a draft (or decode one token), emit, draft for the next round."""
        began = self.clock()
        block = wave.pending if proposal is None else torch.cat([wave.pending, proposal.tokens], dim=1)
        logits = self.engine.forward(block, wave.lengths)
        verdict = self._verify(wave, proposal, logits)
        # Column t of `shifted` is the token after block position t; beyond the accepted ones it is ignored.
        shifted = verdict.following[:, None]
        if proposal is not None:
            shifted = torch.cat([proposal.tokens, shifted], dim=1).scatter_(1, verdict.accepted[:, None], shifted)
        host = torch.cat([verdict.accepted[:, None], shifted], dim=1).tolist()
        accepted = [row[0] for row in host]
        emitted = [row[1 : row[0] + 2] for row in host]
        decided = self.clock()
        if proposal is not None:
            self.stats.observe(accepted, self.job.draft_tokens)
            for row, number in zip(wave.rows, accepted, strict=True):
                self.accepted[row].append(number)
        self.stats.target_steps += 1
        self.stats.target_seconds += decided - began
        counts = [count + 1 for count in accepted]
        aux = self.taps.concat()[:, : max(counts)] if self.taps else None
        rows = list(wave.rows)
        before = [len(self.outputs[row]) for row in rows]
        proposal = self._advance(wave, emitted, shifted[:, : max(counts)], aux, list(wave.lengths), counts)
        done = self.clock()
        if proposal is not None:
            self.stats.draft_steps += self.job.draft_tokens
            self.stats.draft_seconds += done - decided
        for row, length in zip(rows, before, strict=True):
            gained = len(self.outputs[row]) - length
            self.stats.token_seconds.extend([(done - began) / gained] * gained)
        return proposal

    def _verify(self, wave: _Wave, proposal: Proposal | None, logits: Tensor) -> Verdict:
        """Decide what of the draft stands, and the token after it."""
        draft = wave.pending[:, :0] if proposal is None else proposal.tokens
        if not self.job.temperature:
            return verify_greedy(draft, logits.argmax(dim=-1))
        starts, length = [n + 1 for n in wave.lengths], draft.shape[1]
        accept = uniforms(self.job.seed, Stream.ACCEPT, wave.rows, starts, length, self.device)
        # The number of the token after the draft is that of the position where it will stand.
        token = uniforms(self.job.seed, Stream.TOKEN, wave.rows, starts, length + 1, self.device)
        p = self._probabilities(logits)
        if proposal is None:
            return verify_sampled(draft, accept, None, p, None, accept, token)
        chosen = torch.ones_like(accept) if proposal.chosen is None else proposal.chosen
        return verify_sampled(draft, chosen, proposal.probabilities, p, proposal.ids, accept, token)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / self.job.temperature, dim=-1)

    def _advance(
        self, wave: _Wave, emitted: list[list[int]], shifted: Tensor, aux: Tensor | None, starts: list[int], counts: list[int]
    ) -> Proposal | None:
        """Emit tokens, let finished requests leave, hand the rest's new positions to the drafter.

        Slot i took `counts[i]` new positions from `starts[i]` on; shifted [n, T] and aux [n, T, A*H] as in
        `Drafter.propose`. The wave's lengths and pending tokens are updated.
        """
        wave.lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        open_slots = [slot for slot, row in enumerate(wave.rows) if not self._emit(row, emitted[slot])]
        order = self._compact(wave, open_slots, starts)
        if not order:
            return None
        if order != list(range(len(counts))):
            index = torch.tensor(order, device=self.device)
            shifted, aux = shifted[index], None if aux is None else aux[index]
            starts, counts = [starts[slot] for slot in order], [counts[slot] for slot in order]
        last = torch.tensor(counts, device=self.device)[:, None] - 1
        wave.pending = shifted.gather(1, last)
        if self.drafter is None or aux is None:
            return None
        sampling = None
        if self.job.temperature:
            places = [length + 1 for length in wave.lengths]
            numbers = uniforms(self.job.seed, Stream.DRAFT, wave.rows, places, self.job.draft_tokens, self.device)
            sampling = Sampling(self.job.temperature, numbers)
        return self.drafter.propose(shifted, aux, starts, counts, self.job.draft_tokens, sampling)

    def _emit(self, row: int, tokens: list[int]) -> bool:
        """Append tokens to a request's output up to a stop token or the limit; True when the request is finished."""
        output = self.outputs[row]
        for token in tokens:
            output.append(token)
            if token in self.job.stop:
                self.finish[row] = "stop"
                return True
            if len(output) >= self.job.max_new_tokens:
                return True
        return False

    def _compact(self, wave: _Wave, open_slots: list[int], drafted: list[int]) -> list[int]:
        """Close the gaps that finished requests leave: the last slots move into them. Returns slot -> former slot.

        `drafted[slot]`: positions that the drafter holds, which is not told of this round's yet.
        """
        order = list(range(len(wave.rows)))
        still_open = set(open_slots)
        for slot in range(len(open_slots)):
            if order[slot] in still_open:
                continue
            while order[-1] not in still_open:
                order.pop()
            source = order.pop()
            self.engine.store.move(source, slot, wave.lengths[source])
            if self.drafter and drafted[source]:
                self.drafter.move(source, slot, drafted[source])
            order[slot] = source
        del order[len(open_slots) :]
        wave.rows, wave.lengths = [wave.rows[slot] for slot in order], [wave.lengths[slot] for slot in order]
        return order
