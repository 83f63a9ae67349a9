"""A run's cached features in the form that a peer's trainer takes: tapped states, the target's last state, tokens, mask, map.

The last hidden states (before the final norm) are not among this project's features, which keep the target's likeliest
probabilities instead; they are computed here once and kept, so that neither trainer runs the target while it trains.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from eagle import manifest
from eagle.progress import Track
from eagle.target.load import load_target
from eagle.target.taps import HiddenTaps
from eagle.train.features import FeatureStore

DONE = "data.json"


def export(store: FeatureStore, target: Path, dtype: str, draft_ids: torch.Tensor, folder: Path) -> Path:
    """Write the training rows of `store` and the vocabulary map of `draft_ids` [Vd] into `folder`, once; returns it.

    tokens.npy int32 [T], mask.npy bool [T], aux.npy and last.npy uint16 (bf16 bits) [T, A*Ht] and [T, Ht], rows.npy int64
    [n, 2] (start, length), d2t.npy int64 [Vd] (target id minus draft id).
    """
    rows = store.select("train")
    about = {"features": store.folder.name, "rows": len(rows), "draft_vocab": len(draft_ids)}
    if (folder / DONE).is_file() and manifest.read_json(folder / DONE) == about:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [store.rows[i].length for i in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    total, width = sum(lengths), store.aux(rows[0]).shape[1]
    model = load_target(target, dtype)
    hidden, layers = int(model.config.get_text_config().hidden_size), int(model.config.get_text_config().num_hidden_layers)
    shapes = {"aux": (total, width), "last": (total, hidden)}
    files = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.uint16, shape=shape)
        for name, shape in shapes.items()
    }
    with Track("peers: last states", total, "tokens") as track, torch.inference_mode(), HiddenTaps(model, [layers]) as taps:
        for row, start, length in zip(rows, starts.tolist(), lengths, strict=True):
            model.model(torch.from_numpy(store.tokens(row).astype(np.int64))[None])
            last = taps.concat()[0].to(torch.bfloat16)
            files["last"][start : start + length] = last.view(torch.uint16).numpy()
            files["aux"][start : start + length] = store.aux(row).view(torch.uint16).numpy()
            track.advance(length)
    for file in files.values():
        file.flush()
    np.save(folder / "tokens.npy", np.concatenate([store.tokens(row) for row in rows]))
    np.save(folder / "mask.npy", np.concatenate([store.loss_mask(row) for row in rows]))
    np.save(folder / "rows.npy", np.stack([starts, np.array(lengths)], axis=1).astype(np.int64))
    np.save(folder / "d2t.npy", (draft_ids - torch.arange(len(draft_ids))).numpy().astype(np.int64))
    manifest.write_json(folder / DONE, about)
    return folder
