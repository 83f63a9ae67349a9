"""Trains a draft with `speculators`' own model and loss: `PYTHON speculators_worker.py JOB.json`, under its own interpreter.

Imports nothing of this project. JOB.json: data (a folder that `benchmarks.peers.data` wrote), target, layers, heads, kv_heads,
head_dim, intermediate_size, aux_layers, depth (its ttt_steps), learning_rate, minutes, tokens_per_step, threads, seed, out (null:
the draft is not kept). Steps are as in its trainer: bf16 autocast, AdamW, gradient norm 1, a linear rate after a warm-up.
Prints one JSON line: steps, tokens, seconds (training alone), tokens_per_second, parameters (trained ones), loss.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import AutoConfig

WARMUP = 0.02
NAMES = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids", "document_ids")


class Shards:
    """The exported rows, memory-mapped; batches are rows one after the other, as its collator packs them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tokens, self.mask = np.load(folder / "tokens.npy"), np.load(folder / "mask.npy")
        self.aux = np.load(folder / "aux.npy", mmap_mode="c")
        self.last = np.load(folder / "last.npy", mmap_mode="c")
        self.rows = np.load(folder / "rows.npy")  # [n, 2]: start, length
        self.random = np.random.default_rng(seed)
        self.order: list[int] = []

    def batch(self, room: int) -> dict[str, torch.Tensor]:
        """Return rows of `room` tokens or less (at least one row), aligned as its `shift_batch` does: (x1, g0, y1, l1)."""
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        used, document = 0, 0
        while True:
            if not self.order:
                self.order = self.random.permutation(len(self.rows)).tolist()
            start, length = self.rows[self.order[-1]]
            if document and used + length > room:
                break
            self.order.pop()
            span = slice(start, start + length)
            aux = torch.from_numpy(self.aux[span]).view(torch.bfloat16)
            last = torch.from_numpy(self.last[span]).view(torch.bfloat16)
            parts["input_ids"].append(torch.from_numpy(self.tokens[span].astype(np.int64))[1:])
            parts["hidden_states"].append(aux[:-1])
            parts["verifier_last_hidden_states"].append(last[1:])
            parts["loss_mask"].append(torch.from_numpy(self.mask[span])[1:])
            parts["position_ids"].append(torch.arange(1, length))
            parts["document_ids"].append(torch.full((length - 1,), document))
            used, document = used + length, document + 1
        return {name: torch.cat(found)[None] for name, found in parts.items()}


def build(job: dict[str, Any]) -> Eagle3DraftModel:
    """Return its draft of the size that the job names, on the job's vocabulary map."""
    config = AutoConfig.from_pretrained(job["target"])
    config.num_hidden_layers = job["layers"]
    config.num_attention_heads, config.num_key_value_heads = job["heads"], job["kv_heads"]
    config.head_dim, config.intermediate_size = job["head_dim"], job["intermediate_size"]
    d2t = torch.from_numpy(np.load(Path(job["data"]) / "d2t.npy"))
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    return Eagle3DraftModel.from_training_args(
        verifier_config=config, target_layer_ids=list(job["aux_layers"]), draft_attn_impl="sdpa", fc_norm=True, norm_output=True,
        norm_before_residual=False, t2d=t2d, d2t=d2t, draft_vocab_size=len(d2t), ttt_steps=job["depth"],
        verifier_name_or_path=job["target"],
    )  # fmt: skip


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Train for the job's minutes."""
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    model = build(job).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job["learning_rate"])
    loss_config = resolve_loss_config("kl_div", "eager")
    shards, budget = Shards(Path(job["data"]), job["seed"]), 60.0 * job["minutes"]
    steps = tokens = 0
    spent, said, loss_value = 0.0, 0.0, float("nan")
    while spent < budget:
        began = time.monotonic()
        done = spent / budget
        for group in optimizer.param_groups:
            group["lr"] = job["learning_rate"] * min(done / WARMUP, (1.0 - done) / (1.0 - WARMUP)) if done else 0.0
        batch = shards.batch(job["tokens_per_step"])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, _ = model(**batch, ttt_steps=job["depth"], ttt_step_loss_decay=1.0, loss_config=loss_config)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        loss_value = float(loss.detach())
        steps, tokens = steps + 1, tokens + int(batch["input_ids"].numel())
        spent += time.monotonic() - began
        if spent - said > 5.0:
            said = spent
            rate = tokens / spent
            sys.stderr.write(f"speculators: {spent:.0f} of {budget:.0f} s, step {steps}, loss {loss_value:.3f}, {rate:.0f} tok/s\n")
            sys.stderr.flush()
    if job["out"]:
        model.save_pretrained(job["out"])
    return {
        "steps": steps, "tokens": tokens, "seconds": round(spent, 2), "tokens_per_second": tokens / spent, "loss": loss_value,
        "parameters": sum(p.numel() for p in trained),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))) + "\n")
