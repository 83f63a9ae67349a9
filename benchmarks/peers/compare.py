"""Figures F2.6 and F2.8: our training against `speculators` on the same rows, draft size, map, threads and wall clock.

The run that `benchmarks/decoding_run.py` finds gives data set and settings; ours is `distill` and then `policy` with its shares of
MINUTES, from scratch. The peer gets MINUTES at each of RATES, and its best draft counts. Both are counted by the same vLLM on the
same prompts (GSM8K's evaluation file, the kind of traffic trained on; MT-bench beside it). `make peers` makes its environment.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoding_run import Run, find_run
from benchmarks.figures import ROOT, Figure, Measured
from benchmarks.peers.data import export
from benchmarks.quality import GSM8K
from benchmarks.spine import MT_BENCH, first_turns, vllm_acceptance
from eagle import manifest
from eagle.bundle.export import export_draft
from eagle.config import Config, DepthStage
from eagle.draft.io import load_draft, read_spec
from eagle.progress import say
from eagle.steps import run_step
from eagle.target.load import setup_torch
from eagle.train import distill
from eagle.train.features import FeatureStore, ensure_features

PYTHON = ROOT / ".venv-peers" / "bin" / "python"
WORKER = Path(__file__).with_name("speculators_worker.py")
MINUTES, POLICY_SHARE = 8.0, 0.2
RATES = (3e-4, 1e-3)
DEPTH, K, TOKENS, PROMPTS = 3, 4, 96, 64  # test-time-training steps of F2.8 and of the peer; drafts, tokens, prompts in vLLM
PEER_TOKENS = 1024  # of its steps: its attention is dense over a packed step, so longer ones would cost it more
WINDOW_MINUTES, PAIRS = 0.4, 5  # of F2.8


def folder() -> Path:
    """Where the peers' data and drafts are kept."""
    return ROOT / "build" / "figures-peers"


def _missing() -> str | None:
    return None if PYTHON.is_file() else "the peers' environment is not there: make peers"


@cache
def _data() -> tuple[Run, FeatureStore, Path]:
    """Return the run, its features and the peer's copy of them."""
    run = find_run()
    spec = read_spec(run.base / "distill" / "draft")
    store = ensure_features(
        run.base / "dataset", run.target, spec.aux_layers, run.config.distill.top_k, run.root / run.config.paths.cache,
        run.config.target.dtype,
    )  # fmt: skip
    ids = load_draft(run.base / "distill" / "draft", run.target, "cpu").draft_ids()
    return run, store, export(store, run.target, run.config.target.dtype, ids, folder() / "data")


def train_peer(minutes: float, rate: float, out: Path | None) -> dict[str, Any]:
    """Train the peer's draft of the run's size; returns what its worker says. Exits when the worker fails."""
    run, _, data = _data()
    spec = read_spec(run.base / "distill" / "draft")
    job = {
        "data": str(data), "target": str(run.target), "layers": spec.num_layers, "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "intermediate_size": spec.intermediate_size,
        "aux_layers": list(spec.aux_layers), "depth": DEPTH, "learning_rate": rate, "minutes": minutes,
        "tokens_per_step": PEER_TOKENS, "threads": torch.get_num_threads(), "seed": run.seed,
        "out": str(out) if out else None,
    }  # fmt: skip
    file = folder() / "job.json"
    manifest.write_json(file, job)
    say(f"peers: speculators, {minutes:g} min at rate {rate:g}")
    done = subprocess.run([str(PYTHON), "-P", str(WORKER), str(file)], cwd=folder(), stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"error: the peer's training ended with {done.returncode}; its output is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"learning_rate": rate, **found}


def budgeted(config: Config) -> Config:
    """Return the run's configuration with stage 1 and stage 2 sharing MINUTES."""
    changes = {"distill": {"max_minutes": MINUTES * (1.0 - POLICY_SHARE)}, "policy": {"max_minutes": MINUTES * POLICY_SHARE}}
    return config.model_copy(update={name: getattr(config, name).model_copy(update=new) for name, new in changes.items()})


def train_ours(run: Run, data: Path) -> Path:
    """Train our draft from scratch in MINUTES; returns its folder."""
    base, config = folder() / "ours", budgeted(run.config)
    base.mkdir(parents=True, exist_ok=True)
    place = base / "dataset"
    if not place.exists():
        place.symlink_to(run.base / "dataset", target_is_directory=True)
    for step in ("distill", "policy"):
        run_step(step, config, run.root, base)
    return base / "policy" / "draft"


def count(run: Run, draft: Path, title: str) -> dict[str, Any]:
    """Return vLLM's acceptance of a draft folder on the prompts that are at hand, by file."""
    found = {}
    for path in (GSM8K, MT_BENCH):
        if path.is_file():
            prompts = first_turns(path, run.target)[:PROMPTS]
            found[path.name] = vllm_acceptance(
                prompts, run.config, run.target, draft, k=K, max_new_tokens=TOKENS, work=folder(), title=f"{title}: {path.name}"
            )
    return found


def acceptance() -> Measured:
    """F2.6: our accepted tokens a round over the peer's best, own kind of traffic."""
    if why := _missing() or (None if GSM8K.is_file() else f"{GSM8K.name} is not at hand"):
        return Measured(None, [], why)
    run, _, data = _data()
    setup_torch(run.config.runtime.threads, run.seed)
    rows = []
    for rate in RATES:
        out = folder() / f"speculators-{rate:g}"
        trained = train_peer(MINUTES, rate, out)
        rows.append({"who": "speculators 0.9.0", **trained, "vllm": count(run, out, f"F2.6: speculators, rate {rate:g}")})
    ours = train_ours(run, data)
    export_draft(ours, folder() / "ours" / "bundle", "float32")
    spec = manifest.read_json(folder() / "ours" / "distill" / manifest.METRICS)
    rows.append({
        "who": "ours", "minutes": MINUTES, "steps": spec["steps"], "parameters": spec["parameters"],
        "vllm": count(run, folder() / "ours" / "bundle", "F2.6: ours"),
    })  # fmt: skip

    def accepted(row: dict[str, Any], name: str) -> float:
        return float(row["vllm"][name]["acceptance_length"]) - 1.0

    best = max(rows[:-1], key=lambda row: accepted(row, GSM8K.name))
    told = [f"{name}: ours {1 + accepted(rows[-1], name):.2f}, theirs {1 + accepted(best, name):.2f}" for name in rows[-1]["vllm"]]
    told.append(f"theirs at rate {best['learning_rate']:g}, the better of {len(RATES)}")
    about = {"minutes": MINUTES, "threads": torch.get_num_threads(), "draft_tokens": K}
    return run.measured(round(accepted(rows[-1], GSM8K.name) / accepted(best, GSM8K.name), 3), [about, *rows], "; ".join(told))


def our_throughput(seconds: float) -> tuple[float, int]:
    """Return (tokens a second, trained parameters) of our stage 1 at DEPTH over a stretch of training, loading included."""
    run, store, _ = _data()
    model = load_draft(run.base / "distill" / "draft", run.target, "cpu", "float32").train()
    stages = [DepthStage(depth=DEPTH, steps=1_000_000)]
    config = run.config.distill.model_copy(update={"stages": stages, "eval_every": 1_000_000, "checkpoint_every": 1_000_000})
    trainer = distill.Trainer(model, store, config, run.seed, folder())
    trainer.step()  # the first one allocates
    began, before = time.monotonic(), trainer.state.tokens
    while time.monotonic() - began < seconds:
        trainer.step()
    spent = time.monotonic() - began
    return (trainer.state.tokens - before) / spent, sum(p.numel() for p in model.parameters() if p.requires_grad)


def throughput() -> Measured:
    """F2.8: tokens/s times depth times trained parameters, ours over the peer's, median of interleaved pairs."""
    if why := _missing():
        return Measured(None, [], why)
    run, _, _ = _data()
    setup_torch(run.config.runtime.threads, run.seed)
    pairs = []
    for _ in range(PAIRS):
        tokens, parameters = our_throughput(60.0 * WINDOW_MINUTES)
        peer = train_peer(WINDOW_MINUTES, RATES[0], None)
        ours, theirs = tokens * DEPTH * parameters, peer["tokens_per_second"] * DEPTH * peer["parameters"]
        pairs.append({
            "ours_tokens_per_second": round(tokens, 1), "peer_tokens_per_second": round(peer["tokens_per_second"], 1),
            "ours_parameters": parameters, "peer_parameters": peer["parameters"], "ratio": round(ours / theirs, 3),
        })  # fmt: skip
    about = {"depth": DEPTH, "threads": torch.get_num_threads(), "autocast": "bfloat16", "features": "cached, both"}
    return run.measured(round(statistics.median(pair["ratio"] for pair in pairs), 3), [about, *pairs])


FIGURES = (
    Figure("F2.6", "accepted tokens a round in vLLM, over those of speculators' draft", "x", ">=", 1.25, acceptance),
    Figure("F2.8", "training throughput (tokens/s x depth x parameters) over speculators'", "x", ">=", 1.5, throughput),
)
