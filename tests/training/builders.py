"""A tiny data set answered by a tiny random target, and its features: what the training tests share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eagle.config import DraftConfig
from eagle.dataset.read import Row, write_shards
from eagle.draft.init import initialise
from eagle.draft.io import target_embedding
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from eagle.draft.vocab import choose_vocab
from eagle.target.load import load_target, target_dims
from eagle.target.taps import default_aux_layers
from eagle.train.features import FeatureStore, ensure_features
from tests.toys import tiny_target

EOS = 2


@dataclass(frozen=True)
class Toy:
    """A target, its data set and the features of it (fp32 target, top 8)."""

    target: Path
    dataset: Path
    cache: Path
    store: FeatureStore


@torch.inference_mode()
def answer(model: torch.nn.Module, prompt: list[int], tokens: int, temperature: float, seed: int) -> list[int]:
    """The target's answer by plain full forwards; ends with EOS when the target says so."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        if temperature == 0.0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        ids.append(token)
        if token == EOS:
            break
    return ids[len(prompt) :]


def write_dataset(folder: Path, target: Path, *, train: int = 12, heldout: int = 4, tokens: int = 24, seed: int = 0) -> Path:
    """Write train and held-out rows with prompts of 3 to 14 random tokens. Every third training row is sampled."""
    random = np.random.default_rng(seed)
    model = load_target(target, "float32")
    vocab = target_dims(target).vocab_size
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("heldout", heldout)):
        rows = []
        for number in range(count):
            prompt = [1, *(int(t) for t in random.integers(3, vocab, size=int(random.integers(2, 14))))]
            temperature = 1.0 if split == "train" and number % 3 == 2 else 0.0
            said = answer(model, prompt, tokens, temperature, number)
            finish = "stop" if said[-1] == EOS else "length"
            name = hashlib.sha256(str(prompt).encode()).hexdigest()
            mask = [0] * len(prompt) + [1] * len(said)
            rows.append(Row(name, "file:toy", "toy", temperature, prompt + said, mask, len(prompt), finish))
        write_shards(folder, split, rows, 1000)  # type: ignore[arg-type]
    return folder


def make_toy(folder: Path, *, layers: int = 4, hidden: int = 64, train: int = 12, heldout: int = 4, tokens: int = 24) -> Toy:
    """Make the whole thing under `folder`."""
    target = tiny_target(folder / "target", layers=layers, hidden=hidden, tie=False)
    dataset = write_dataset(folder / "dataset", target, train=train, heldout=heldout, tokens=tokens)
    store = ensure_features(dataset, target, default_aux_layers(layers), 8, folder / "cache", "float32", batch_tokens=128)
    return Toy(target, dataset, folder / "cache", store)


def make_draft(target: Path, *, seed: int = 0, ids: np.ndarray | None = None, **changes: object) -> DraftModel:
    """A random draft for `target` with lively weights; `changes` are keys of the draft section of the config."""
    dims = target_dims(target)
    settings: dict[str, object] = {"layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 100, "intermediate_size": 96}
    spec = DraftSpec.from_config(DraftConfig.model_validate(settings | changes), dims, default_aux_layers(dims.num_layers))
    if ids is None:
        counts = np.random.default_rng(seed).integers(0, 1000, size=dims.vocab_size)
        ids = choose_vocab(counts, spec.draft_vocab_size, [EOS])
    model = DraftModel(spec, target_embedding(target, spec), ids)
    initialise(model, output_scale=1.0, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():  # far from the identity, so that a wrong position or mask shows
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            else:
                parameter.mul_(torch.linspace(0.7, 1.3, len(parameter)))
    return model.eval()
