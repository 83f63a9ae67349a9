"""In-memory targets, drafts and stub drafters for the engine's tests. All random, all tiny, float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from eagle.decode.proposal import MAX_DRAFT_TOKENS, Drafter, Draws, Proposal
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec

AUX = (1, 2, 3)
KINDS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "gemma3": Gemma3TextConfig,
}


def target(kind: str = "llama", vocab: int = 64, seed: int = 0, scale: float = 3.0, **extra: object) -> PreTrainedModel:
    """A random 3-layer model with grouped heads; `scale` sharpens its distributions."""
    torch.manual_seed(seed)
    config = KINDS[kind](
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=vocab,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
        **extra,
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.model.norm.weight.mul_(scale)
    return model


def draft(model: PreTrainedModel, vocab: int = 40, seed: int = 1, **extra: object) -> DraftModel:
    """A random draft with a reduced vocabulary (unless vocab is the target's)."""
    config = model.config
    torch.manual_seed(seed)
    numbers = {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": vocab,
        "aux_layers": AUX,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
    }
    spec = DraftSpec(**{**numbers, **extra})  # type: ignore[arg-type]
    ids = np.sort(np.random.default_rng(seed).permutation(config.vocab_size)[:vocab]).astype(np.int64)
    net = DraftModel(spec, None if spec.own_embedding else model.get_input_embeddings().weight, ids if spec.reduced_vocab else None)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return net.eval().requires_grad_(False)


def prompts(lengths: list[int], vocab: int = 64, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers itself generates."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def cut(tokens: list[int], limit: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The first `limit` tokens, up to and with the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens[:limit]) if token in stop), limit)
    return tokens[:end]


def surprise(observed: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against expected counts, in standard deviations; cells below 5 expected are pooled."""
    big = expected >= 5
    pooled = (observed[~big].sum() - expected[~big].sum()) ** 2 / expected[~big].sum().clamp_min(1e-9)
    freedom = int(big.sum())
    assert freedom > 30
    chi = ((observed - expected)[big] ** 2 / expected[big]).sum() + pooled
    return float((chi - freedom) / (2 * freedom) ** 0.5)


class OracleDrafter(Drafter):
    """Drafts the known answers; every `period`-th position is wrong (0: never, 1: always). Checks what it is handed.

    `tree`: each node has a wrong sibling before it, so that the right branch is never the first.
    """

    aux_layers = AUX
    deterministic = True
    max_nodes = 2 * MAX_DRAFT_TOKENS
    weight_bytes = state_bytes = 0

    def __init__(
        self, questions: list[list[int]], answers: list[list[int]], period: int = 0, vocab: int = 64, tree: bool = False
    ) -> None:
        self.texts = [q + a for q, a in zip(questions, answers, strict=True)]
        self.starts = [len(q) for q in questions]
        self.period, self.vocab, self.branches = period, vocab, tree
        self.slots: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def extend(self, rows: list[int], tokens: Tensor, aux: Tensor | None, starts: list[int], counts: list[int]) -> None:
        assert aux is not None
        assert aux.shape[:2] == tokens.shape
        assert torch.isfinite(aux).all()
        assert rows == sorted(rows)
        for i, (slot, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            given = tokens[i, :count].tolist()
            if start == 0:
                fits = (k for k, text in enumerate(self.texts) if text[1 : count + 1] == given and self.starts[k] <= count)
                self.slots[slot] = next(fits)
            else:
                assert self.lengths[slot] == start
            text = self.texts[self.slots[slot]]
            self.lengths[slot] = start + count
            assert text[start + 1 : start + count + 1] == given, "the drafter must be handed what was accepted"

    def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
        assert draws is None
        found = []
        for slot in rows:
            known = self.lengths[slot] + 1
            ahead = (self.texts[self.slots[slot]][known:] + [0] * length)[:length]
            found.append([self._spoil(token, known - 1 + i) for i, token in enumerate(ahead)])
        tokens = torch.tensor(found).view(len(rows), length)
        if not self.branches:
            return Proposal(tokens)
        both = torch.stack([(tokens + 1) % self.vocab, tokens], dim=2).flatten(1)
        parents = torch.tensor([2 * (i // 2) - 1 for i in range(2 * length)]).expand(len(rows), -1)
        return Proposal(both, parents=parents)

    def _spoil(self, token: int, position: int) -> int:
        return (token + 2) % self.vocab if self.period and position % self.period == 0 else token

    def move(self, source: int, destination: int) -> None:
        self.slots[destination] = self.slots[source]
        self.lengths[destination] = self.lengths[source]
