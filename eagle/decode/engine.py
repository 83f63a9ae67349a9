"""The reference engine: plain and speculative decoding of ragged, continuous batches, one loop for both.

It owns the target, its KV memory and the drafter; `eagle.decode.batching.Decoding` is the loop. K = 0 is
autoregressive decoding with the same code, caches and kernels. The target runs through transformers' own modules with
`eagle.decode.cache`'s KV memory and attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle.decode.batching import Decoding
from eagle.decode.cache import Branches, KeyValueStore, MaskMaker, TargetCache, ragged_attention
from eagle.decode.control import FixedLength, LengthPolicy
from eagle.decode.drafting import EagleDrafter
from eagle.decode.judge import Judge, Verification
from eagle.decode.proposal import MAX_DRAFT_TOKENS, Drafter
from eagle.decode.requests import Answer, Request
from eagle.decode.sampling import SamplingParams
from eagle.decode.stats import DecodeStats
from eagle.draft.model import DraftModel
from eagle.errors import ConfigError
from eagle.target.taps import HiddenTaps


@dataclass
class DecodeResult:
    """`tokens[i]`: what prompt i got (the stop token included); `finish[i]`: why it ended; `stats`: see DecodeStats.

    `accepted[i]`: how many draft tokens each round of prompt i accepted, counted as the stats are.
    """

    tokens: list[list[int]]
    finish: list[Literal["stop", "length"]]
    accepted: list[list[int]]
    stats: DecodeStats


class Engine:
    """Decodes up to `batch` requests at once, each of at most `max_length` tokens with its answer.

    `draft` is a trained DraftModel (drafted from as a chain), another `Drafter`, or None. All memory is allocated
    here. `compiled` compiles the step of a DraftModel. `reach`: how many positions a draft may write beyond the end,
    at least `draft`'s own number; engines that share this one's memory may need more.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel | Drafter | None,
        *,
        max_length: int,
        batch: int,
        compiled: bool = False,
        reach: int = MAX_DRAFT_TOKENS,
    ) -> None:
        config = target.config.get_text_config()
        _refuse_length_dependent_rope(config, max_length)
        if isinstance(draft, DraftModel):
            draft = EagleDrafter.beside(target, draft, batch=batch, max_length=max_length, compiled=compiled)
        self.drafter: Drafter | None = draft
        self._reach = max(reach, draft.max_nodes if draft else 0)
        room = max_length + 1 + self._reach
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.target, self.batch, self.max_length = target, batch, max_length
        self.store = KeyValueStore(
            config.num_hidden_layers, batch, room, config.num_key_value_heads, head_dim, target.dtype, target.device
        )
        self._cache = TargetCache(self.store)
        self._mask = MaskMaker(config, target.dtype)

    def sharing(self, draft: Drafter) -> Engine:
        """Return an engine with another drafter on the same target and KV memory. Only one of them may be decoding."""
        if draft.max_nodes > self._reach:
            raise ValueError(f"the drafter proposes up to {draft.max_nodes} tokens, this engine has room for {self._reach}")
        twin = copy.copy(self)
        twin.drafter = draft
        return twin

    @contextmanager
    def decoding(
        self,
        policy: int | LengthPolicy = 0,
        *,
        chunk: int = 0,
        carry: bool = False,
        verification: Verification = "rejection",
        batch: int | None = None,
    ) -> Iterator[Decoding]:
        """Yield a run to submit requests to.

        `policy`: draft tokens per round, fixed (0: none) or chosen each round. `chunk`: tokens per verification pass of
        a fixed length, 0 = all at once; `carry`: a draft's next chunk waits for the next step. `verification`: of drawn
        chains. `batch`: most requests at once (default: the engine's own). Raises ValueError for values that are out
        of range or do not go together.
        """
        size = self.batch if batch is None else batch
        if not 1 <= size <= self.batch:
            raise ValueError(f"batch must be 1..{self.batch}")
        drafter = None if policy == 0 else self.drafter
        if isinstance(policy, int):
            if not 0 <= policy <= MAX_DRAFT_TOKENS or chunk < 0:
                raise ValueError(f"draft_tokens must be 0..{MAX_DRAFT_TOKENS} and chunk >= 0")
            policy = FixedLength(policy, chunk)
        elif chunk:
            raise ValueError("chunk goes with a fixed draft length: a policy chooses its own")
        if carry and verification == "block":
            raise ValueError("block verification judges a draft as a whole: chunks cannot be carried over")
        tapping = HiddenTaps(self.target, drafter.aux_layers) if drafter and drafter.aux_layers else nullcontext()
        with torch.inference_mode(), ragged_attention(self.target), tapping as taps:
            yield Decoding(self, drafter, taps, policy, Judge(verification, self.target.device), size, carry)

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int | Sequence[int],
        draft_tokens: int | LengthPolicy,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: AbstractSet[int] = frozenset(),
        ignore_eos: bool = False,
        batch: int | None = None,
        chunk: int = 0,
        carry: bool = False,
        verification: Verification = "rejection",
        done: Callable[[int], None] | None = None,
    ) -> DecodeResult:
        """Continue each prompt (token ids) by at most `max_new_tokens` tokens (one number, or one a prompt), drafting
        `draft_tokens` a round.

        `draft_tokens` 0, or no draft: autoregressive. `temperature` 0: greedy. `stop` ids end an answer unless
        `ignore_eos`. At most `batch` prompts are in work at once; the next begins as soon as one ends. At temperature
        > 0 the random numbers depend on `seed`, the prompt's index and the position only. `done` is called after each step in
        which prompts were finished, with their number. The rest as in `decoding`.
        Raises ValueError for an empty prompt, one that does not fit, or settings out of range.
        """
        params = SamplingParams(temperature, top_k, top_p, seed)
        stops = frozenset() if ignore_eos else stop
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        pairs = zip(prompts, limits, strict=True)
        requests = [Request(prompt, limit, params, stops, index) for index, (prompt, limit) in enumerate(pairs)]
        with self.decoding(draft_tokens, chunk=chunk, carry=carry, verification=verification, batch=batch) as run:
            answers = [run.submit(request) for request in requests]
            began = run.clock()
            left = len(answers)
            while run.busy:
                run.step()
                if done is not None and (now := run.open) < left:
                    done(left - now)
                    left = now
            run.stats.seconds = run.clock() - began
        run.stats.ttft_seconds /= max(len(prompts), 1)
        return DecodeResult([a.tokens for a in answers], [_ended(a) for a in answers], [a.accepted for a in answers], run.stats)

    def forward(
        self, tokens: Tensor, starts: list[int], rows: list[int], keep: Tensor | int = 0, branches: Branches | None = None
    ) -> Tensor:
        """Run the target over tokens [n, T] of batch slots `rows` from positions `starts` on; returns logits [n, T or kept, V]."""
        positions = self.store.plan(starts, tokens.shape[1], rows, branches)
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


def _ended(answer: Answer) -> Literal["stop", "length"]:
    if answer.finish is None:
        raise RuntimeError("a request is not finished")
    return answer.finish


def _refuse_length_dependent_rope(config: Any, max_length: int) -> None:
    """Some rope types turn all positions by another angle once any row is long: a batch would change its rows' text."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope.get("rope_type", "default"), str) else "default"
    known = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind in ("dynamic", "longrope") and max_length > known:
        raise ConfigError(
            f"target.model: rope type '{kind}' beyond {known} positions is not supported by the reference engine; "
            f"{max_length} were asked for: use shorter prompts and answers"
        )
