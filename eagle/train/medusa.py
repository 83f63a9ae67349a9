"""Training of Medusa-1 heads, a rival of the draft, on the data and features that the draft is trained on.

Cai et al. 2024, arXiv 2401.10774, sections 2.1 and 2.2.1: the target is frozen, head k learns the token k places after the
target's own next one by cross-entropy, weighted by 0.8^k. The heads start as the target's own head.

Heads for a finished run folder, `base` with `base/dataset`, and the target folder `target`:

    layers = (target_dims(target).num_layers,)
    store = ensure_features(base / "dataset", target, layers, 1, cache, "bfloat16")
    trained = train_medusa(store, target, MedusaSettings(max_minutes=9.0))
    save_medusa(folder, trained.heads)

`cache`, the dtype and the device as `distill` has them (config.cache, target.dtype); a cache keeps two feature stores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.config import DepthStage
from eagle.decode.medusa import MedusaHeads, choose_paths
from eagle.draft.io import target_tensor
from eagle.errors import ConfigError, StepFailed
from eagle.progress import Track, say
from eagle.target.load import target_dims
from eagle.train.batches import Batch, BatchPlan, collate, trainable
from eagle.train.distill import draft_vocabulary
from eagle.train.features import FeatureStore
from eagle.train.schedule import Pace, learning_rate
from eagle.train.validate import heldout_rows


@dataclass(frozen=True)
class MedusaSettings:
    """How heads are made and trained.

    `vocab_size`: tokens that the heads know, the most frequent of the training answers, as for the draft; `nodes`: of the
    tree; `ranks`: likeliest tokens per head that the tree may use; `decay`: head k's loss weighs decay^k. Training ends after
    `steps` optimiser steps or `max_minutes`, whichever is first, and the learning rate with it. `autocast`: matrix products
    in bf16. `eval_sequences`: held-out rows that the accuracies are measured on.
    """

    heads: int = 4
    vocab_size: int = 8192
    nodes: int = 16
    ranks: int = 10
    decay: float = 0.8
    steps: int = 600
    max_minutes: float = 9.0
    tokens_per_step: int = 2048
    learning_rate: float = 1e-3
    min_learning_rate_ratio: float = 0.05
    warmup_steps: int = 40
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    eval_sequences: int = 64
    autocast: bool = True
    seed: int = 0


@dataclass(frozen=True)
class TrainedMedusa:
    """`heads` with accuracies and tree; `losses`: the loss of each optimiser step; `tokens`: trained on, prompts included."""

    heads: MedusaHeads
    losses: list[float]
    tokens: int


def train_medusa(store: FeatureStore, target: Path, settings: MedusaSettings, device: str = "cpu") -> TrainedMedusa:
    """Train heads on the features `store` of the target in `target`, which must be those of its last layer alone.

    Not resumable: a killed run starts again. Repeatable for a seed as long as the time budget does not bind.
    Raises ConfigError for features of other layers or a target without a usable head and norm, DataError for a data set
    without training or held-out answers, StepFailed when the loss is not finite.
    """
    heads = new_heads(store, target, settings).to(device)
    heldout = heldout_rows(store, settings.eval_sequences)
    rows = trainable(store, store.select("train"))
    plan = BatchPlan(rows, [store.rows[i].length for i in rows], settings.tokens_per_step, settings.seed)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    pace = Pace([DepthStage(depth=1, steps=settings.steps)], settings.max_minutes * 60)
    draft_of = _places(heads, store.vocab_size)
    losses: list[float] = []
    tokens = 0
    with Track("medusa", pace.total, "steps") as track:
        while not pace.done:
            began = time.monotonic()
            rate = learning_rate(
                pace.step, pace.progress, base=settings.learning_rate, min_ratio=settings.min_learning_rate_ratio,
                warmup=settings.warmup_steps,
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = collate(store, plan.at(pace.step), device)
            optimizer.zero_grad(set_to_none=True)
            losses.append(backward(heads, batch, draft_of, settings.decay, autocast=settings.autocast))
            norm = float(torch.nn.utils.clip_grad_norm_(heads.parameters(), settings.clip_norm))
            if not (math.isfinite(losses[-1]) and math.isfinite(norm)):
                raise StepFailed(f"medusa: loss {losses[-1]}, gradient norm {norm} at step {pace.step}; lower the learning rate")
            optimizer.step()
            tokens += int(batch.lengths.sum())
            pace.step_done(time.monotonic() - began)
            track.advance(1, f"loss {losses[-1]:.3f}  lr {rate:.1e}")
    heads.accuracies = measure_accuracies(heads, store, heldout, settings.ranks, autocast=settings.autocast)
    heads.paths = choose_paths(heads.accuracies, settings.nodes)
    shown = " ".join(f"{ranks[0]:.2f}" for ranks in heads.accuracies)
    say(f"medusa: {pace.step} steps; held-out top-1 accuracy of the heads: {shown}; a tree of {len(heads.paths)} nodes")
    return TrainedMedusa(heads, losses, tokens)


def new_heads(store: FeatureStore, target: Path, settings: MedusaSettings) -> MedusaHeads:
    """Return heads (fp32, CPU) that each predict what the target's own head does, within their vocabulary."""
    dims = target_dims(target)
    if store.aux_layers != (dims.num_layers,):
        raise ConfigError(f"medusa: the features are those of layers {store.aux_layers}, heads need ({dims.num_layers},)")
    ids = draft_vocabulary(store, settings.vocab_size, dims)
    head = _tensor(target, ("lm_head.weight", "model.embed_tokens.weight"), (dims.vocab_size, dims.hidden_size))
    norm = _tensor(target, ("model.norm.weight",), (dims.hidden_size,))
    heads = MedusaHeads(settings.heads, norm, dims.rms_norm_eps, torch.from_numpy(ids), dims.num_layers)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            if name.endswith("lm_head.weight"):
                parameter.copy_(head[heads.ids])
    return heads


def _tensor(target: Path, names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    """Return the first of the target's tensors `names` that it has (a tied head is the embedding)."""
    found = next((tensor for tensor in (target_tensor(target, name) for name in names) if tensor is not None), None)
    if found is None or tuple(found.shape) != shape:
        got = "nothing" if found is None else tuple(found.shape)
        raise ConfigError(f"target.model: {names[0]} should have shape {shape}, found {got}; Medusa heads cannot start from it")
    return found


def _places(heads: MedusaHeads, vocab_size: int) -> Tensor:
    """Return the place of every target id in the heads' vocabulary, [V] int64, -1 where it has none."""
    table = torch.full((vocab_size,), -1, dtype=torch.int64, device=heads.ids.device)
    table[heads.ids] = torch.arange(len(heads.ids), device=table.device)
    return table


def questions(heads: MedusaHeads, batch: Batch, draft_of: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (hidden [N, H] after the final norm, label [N] int64) for each head: the positions whose label is an answer's token.

    Head k at position t has the label x[t+1+k], as its place in the heads' vocabulary, -1 where it has none.
    """
    rows, cols = batch.anchors()
    hidden = heads.normed(batch.aux[rows, cols])
    width = batch.tokens.shape[1]
    for k in range(1, len(heads.heads) + 1):
        at = cols + 1 + k
        inside = (at < batch.lengths[rows]) & batch.loss_mask[rows, at.clamp_max(width - 1)]
        yield hidden[inside], draft_of[batch.tokens[rows[inside], at[inside]]]


def backward(heads: MedusaHeads, batch: Batch, draft_of: Tensor, decay: float, *, autocast: bool = False) -> float:
    """Add the gradients of one batch; return its loss, sum over heads k of decay^k times the mean cross-entropy.

    One head after the other, so that only one head's logits are in memory. Labels outside the vocabulary do not count.
    """
    total = 0.0
    for k, (head, (hidden, label)) in enumerate(zip(heads.heads, questions(heads, batch, draft_of), strict=True), start=1):
        if not bool((label >= 0).any()):
            continue
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=autocast):
            logits = head(hidden)
        loss = decay**k * F.cross_entropy(logits.float(), label, ignore_index=-1)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


@torch.inference_mode()
def measure_accuracies(
    heads: MedusaHeads, store: FeatureStore, rows: list[int], ranks: int, *, autocast: bool = False
) -> list[list[float]]:
    """Return [K][R]: the share of the answers' tokens in `rows` that were head k's likeliest, second likeliest, ...

    A token outside the heads' vocabulary counts as missed; a head without any token to predict has zeros.
    """
    draft_of = _places(heads, store.vocab_size)
    count = len(heads.heads)
    hits = torch.zeros(count, min(ranks, len(heads.ids)), dtype=torch.float64)
    tokens = torch.zeros(count, dtype=torch.float64)
    for row in rows:
        batch = collate(store, [row], str(heads.ids.device))
        for k, (head, (hidden, label)) in enumerate(zip(heads.heads, questions(heads, batch, draft_of), strict=True)):
            with torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=autocast):
                best = head(hidden).topk(hits.shape[1], dim=-1).indices
            hits[k] += (best == label[:, None]).sum(dim=0).cpu()
            tokens[k] += len(label)
    shares: list[list[float]] = (hits / tokens.clamp_min(1)[:, None]).tolist()
    return shares
