"""Random numbers of decoding: a pure function of seed, stream, request and position.

Without speculation and with deterministic drafts, a drawn token therefore does not depend on which other requests share the
batch, on how many rounds were needed or on what was drafted before. With drawn drafts it depends on where the request's rounds
begin, because a token is a draft token in one place and the target's own in another: with a fixed K that is the request's own
affair; a policy that chooses K for the whole batch changes the text, never its distribution. SplitMix64
(Steele, Lea, Flood 2014) is used as the mixing function.

Reusing a position's draft number in a later round is sound where a draft token that was thrown away unverified had no
influence on what was accepted before it: rejection sampling, token by token. Block verification looks at the whole draft
before it accepts a part of it, so its draft and acceptance numbers are other ones in each round.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15


class Stream(IntEnum):
    """What a number is used for; streams are independent."""

    DRAFT = 1
    ACCEPT = 2
    TOKEN = 3  # the residual or bonus token, and every token without speculation


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(_GAMMA)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def uniforms(
    seeds: int | list[int], stream: Stream, requests: list[int], starts: list[int], width: int, device: torch.device | str = "cpu",
    lanes: int = 0, rounds: list[int] | None = None,
) -> Tensor:
    """Return uniforms in [0, 1) for positions `starts[i] .. starts[i] + width - 1` of request `requests[i]`.

    `seeds`: one for all, or one per request. float64 [n, width] with 52 random bits each; with `lanes`, so many
    independent numbers per position: [n, width, lanes]. `rounds[i]`: numbers that are other ones in each round.
    """
    with np.errstate(over="ignore"):
        state = _mix(_mix(np.atleast_1d(np.array(seeds, dtype=np.uint64))[:, None]) ^ np.uint64(stream))
        state = _mix(state ^ np.array(requests, dtype=np.uint64)[:, None])
        if rounds is not None:
            state = _mix(state ^ np.array(rounds, dtype=np.uint64)[:, None])
        positions = np.array(starts, dtype=np.uint64)[:, None] + np.arange(width, dtype=np.uint64)
        mixed = _mix(state ^ positions)
        if lanes:
            mixed = _mix(mixed[:, :, None] ^ np.arange(1, lanes + 1, dtype=np.uint64))
        bits = mixed >> np.uint64(12)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-52).to(device)
