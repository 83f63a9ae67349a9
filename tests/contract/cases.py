"""Which drafts and targets are tried: every combination of flags, depth and width, and every pair of any two settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle.bundle.export import export_draft
from eagle.bundle.validate import check_bundle
from eagle.config import DraftConfig
from eagle.draft.init import init_from_target, initialise
from eagle.draft.io import save_draft, target_embedding
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from eagle.target.load import target_dims
from tests.toys import tiny_target

VOCAB = 320
WIDTH = 64
LAYERS = 4
PRUNED = 200
# Small lengths, so that a context of tens of tokens is well inside what the scaling changes.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 50000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0},
}  # fmt: skip
AUX: dict[int, tuple[int, ...]] = {1: (3,), 2: (1, LAYERS), 3: (1, 2, LAYERS), 4: (0, 1, 3, LAYERS)}


@dataclass(frozen=True)
class Case:
    """A draft in front of a target. `heads` is (heads, key heads, head_dim), `hidden` the draft's width, `aux` tapped states.

    `looks_through` starts the draft as a look through the target's own head, so that some of its tokens are accepted.
    """

    depth: int = 4
    heads: tuple[int, int, int] = (4, 2, 32)
    hidden: int = WIDTH
    vocab: int = PRUNED
    aux: int = 3
    tied: bool = True
    rope: str = "default"
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    looks_through: bool = False

    @property
    def name(self) -> str:
        """A short, unique name."""
        flags = [short for short, on in (("f", self.fc_norm), ("o", self.norm_output), ("r", self.norm_before_residual)) if on]
        n, kv, d = self.heads
        target = "tied" if self.tied else "untied"
        words = [f"d{self.depth}", f"h{n}x{d}kv{kv}", f"w{self.hidden}", f"v{self.vocab}", f"a{self.aux}", target, self.rope]
        return "-".join([*words, "".join(flags) or "plain", *(["accepted"] if self.looks_through else [])])


DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "depth": (1, 4),
    "hidden": (WIDTH, 96, 32),
    "fc_norm": (True, False),
    "norm_output": (True, False),
    "norm_before_residual": (True, False),
    "heads": ((2, 2, 32), (4, 2, 32), (4, 1, 64), (2, 1, 80)),
    "vocab": (VOCAB, PRUNED),
    "aux": tuple(AUX),
    "tied": (True, False),
    "rope": tuple(ROPES),
}
_WHOLE = ("depth", "hidden", "fc_norm", "norm_output", "norm_before_residual")  # of these every combination
TELLING = (
    Case(rope="llama3"),
    Case(depth=1, fc_norm=False, norm_output=False, tied=False, vocab=VOCAB, heads=(4, 1, 64)),
    Case(hidden=96, aux=4, rope="yarn", norm_before_residual=True, heads=(2, 1, 80)),
    Case(depth=1, hidden=32, aux=1, rope="linear", norm_output=False, heads=(2, 2, 32)),
    Case(depth=2, vocab=VOCAB, rope="default", looks_through=True),
)


def pairs(case: Case) -> set[tuple[str, Any, str, Any]]:
    """Return every pair of settings that occurs in a case."""
    held = asdict(case)
    return {(one, held[one], other, held[other]) for one, other in combinations(DIMENSIONS, 2)}


def every_pair() -> set[tuple[str, Any, str, Any]]:
    """Return every pair of settings of two dimensions."""
    return {
        (one, a, other, b) for one, other in combinations(DIMENSIONS, 2) for a, b in product(DIMENSIONS[one], DIMENSIONS[other])
    }


def all_cases() -> list[Case]:
    """Return the telling cases, and after them every combination of flags, depth and width.

    The rest is chosen so that every pair of settings occurs, and then as many triples as can be.
    """
    return [*TELLING, *_covering()]


def _covering() -> Iterator[Case]:
    rest = [name for name in DIMENSIONS if name not in _WHOLE]
    fillings = [dict(zip(rest, values, strict=True)) for values in product(*(DIMENSIONS[name] for name in rest))]
    open_pairs = every_pair()
    seen: set[tuple[Any, ...]] = set()
    for values in product(*(DIMENSIONS[name] for name in _WHOLE)):
        held = dict(zip(_WHOLE, values, strict=True))
        some = [Case(**held, **filling) for filling in fillings]
        best = max(some, key=lambda case: len(pairs(case) & open_pairs))
        if not pairs(best) & open_pairs:
            best = max(some, key=lambda case: len(_triples(case) - seen))
        open_pairs -= pairs(best)
        seen |= _triples(best)
        yield best


def _triples(case: Case) -> set[tuple[Any, ...]]:
    held = asdict(case)
    return {tuple((name, held[name]) for name in names) for names in combinations(DIMENSIONS, 3)}


def make_target(case: Case, folder: Path) -> Path:
    """Make the case's target below `folder`, once for all cases that share it; return its folder."""
    made = folder / f"{case.rope}-{'tied' if case.tied else 'untied'}"
    if not made.is_dir():
        tiny_target(made, layers=LAYERS, hidden=WIDTH, vocab_size=VOCAB, tie=case.tied, rope=ROPES[case.rope], seed=7)
    return made


def make_draft(case: Case, target: Path, folder: Path) -> Path:
    """Save the case's random draft at `folder` and return it; the same case gives the same weights."""
    n, kv, d = case.heads
    section = DraftConfig(
        layers=case.depth, heads=n, kv_heads=kv, head_dim=d, hidden_size=case.hidden, vocab_size=case.vocab,
        fc_norm=case.fc_norm, norm_output=case.norm_output, norm_before_residual=case.norm_before_residual,
    )  # fmt: skip
    spec = DraftSpec.from_config(section, target_dims(target), AUX[case.aux])
    ids = np.sort(np.random.default_rng(5).choice(VOCAB, PRUNED, replace=False)) if spec.reduced_vocab else None
    model = DraftModel(spec, target_embedding(target, spec), ids)
    generator = torch.Generator().manual_seed(11)
    if case.looks_through:
        initialise(model, output_scale=0.3, generator=generator)
        init_from_target(model, target)
    else:
        _randomise(model, generator)
    save_draft(folder, model)
    return folder


def make_bundle(case: Case, target: Path, folder: Path) -> Path:
    """Make and export the case's draft below `folder`; return the bundle, which passes the static check."""
    export_draft(make_draft(case, target, folder / "draft"), folder / "bundle", "float32")
    check_bundle(folder / "bundle", target)
    return folder / "bundle"


def prompts(count: int = 50) -> list[list[int]]:
    """Return random prompts of 4 to 40 tokens."""
    random = np.random.default_rng(3)
    return [random.integers(3, VOCAB, random.integers(4, 41)).tolist() for _ in range(count)]


def _randomise(model: DraftModel, generator: torch.Generator) -> None:
    """Draw weights so large that every part of the network decides which token comes out first."""
    gains = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 4.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                weight.normal_(0.0, gain * weight.shape[1] ** -0.5, generator=generator)
