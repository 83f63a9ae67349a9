"""The draft vocabulary: which target tokens a draft can propose. Fixed once per draft; a checkpoint never changes it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle.errors import ConfigError

_EVEN = 64  # a draft vocabulary that is cut is cut to a multiple of this: an even width for matrix products


def fitting_size(counts: NDArray[np.integer], size: int, must: Iterable[int] = ()) -> int:
    """Return `size`, or less when fewer distinct ids occur in counts [V] or `must`: their number, rounded up to 64's multiple.

    An id that never occurs can be neither learned nor accepted, and its head row costs as much as any other. A `size` that
    is the whole vocabulary stays: there is no map then.
    """
    if size >= len(counts):
        return size
    distinct = len(set(np.flatnonzero(counts).tolist()).union(must))
    return min(size, max(_EVEN, -(-distinct // _EVEN) * _EVEN))


def choose_vocab(counts: NDArray[np.integer], size: int, must: Iterable[int] = ()) -> NDArray[np.int64]:
    """Return `size` target ids, ascending: those of `must`, then the most frequent ones.

    counts [V] integer: how often each target id occurs where it must be predicted. Ties go to the lower id; when fewer
    distinct ids occur than `size`, the lowest unused ids fill up, so the result has exactly min(size, V) ids.
    Raises ConfigError when `must` alone is larger than `size` or names an id outside 0..V-1.
    """
    total = int(counts.shape[0])
    size = min(size, total)
    forced = np.unique(np.fromiter(must, dtype=np.int64))
    if forced.size and (forced[0] < 0 or forced[-1] >= total):
        outside = forced[0] if forced[0] < 0 else forced[-1]
        raise ConfigError(f"draft vocabulary: id {outside} is outside the target's 0..{total - 1}")
    if forced.size > size:
        raise ConfigError(f"draft.vocab_size: {size} is smaller than the {forced.size} ids that must be in it (end of text)")
    rank = np.asarray(counts, dtype=np.int64).copy()
    rank[forced] = np.iinfo(np.int64).max
    order = np.argsort(-rank, kind="stable")  # stable: equal counts keep ascending ids
    return np.sort(order[:size]).astype(np.int64)


def to_maps(ids: NDArray[np.int64], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (d2t, t2d) of ascending target ids: d2t [Vd] int64 offsets (target = draft + d2t), t2d [V] bool membership.

    Raises ValueError when the ids are not ascending, distinct and within the vocabulary.
    """
    if ids.ndim != 1 or not ids.size or np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"draft vocabulary ids must be ascending, distinct and within 0..{vocab_size - 1}")
    kept = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(len(kept)), t2d


def coverage(tokens: NDArray[np.integer], ids: NDArray[np.int64]) -> float:
    """Return the share of `tokens` that are in the draft vocabulary `ids` (ascending); 1.0 for no tokens."""
    return float(np.isin(tokens, ids).mean()) if tokens.size else 1.0
