"""Lookahead decoding: our implementation of a rival, so that it can be measured in the same engine as the draft.

Fu et al. 2024, arXiv 2402.02057. Beside the text, the target continues a window of W guesses by Jacobi iteration; the
n-grams on its trajectory are collected, and those that begin with the pending token are verified. There is no draft
model. The paper's two branches are one tree here: window nodes are never accepted, and each has the ancestors that
the paper's attention mask lets it see. Verification makes it lossless, as every deterministic draft.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle.decode.proposal import Drafter, Draws, Proposal

NGRAM = 4  # tokens of the n-grams that are collected; candidates are one less deep

_TUPLE_BYTES = 150  # of a tuple of ints, without its items, and its place in a dict
_INT_BYTES = 40  # of an int and the reference to it


class NgramPool:
    """N-grams by their first token: at most `per_token` for each and `tokens` first tokens; what was used least recently goes."""

    def __init__(self, tokens: int, per_token: int) -> None:
        self._tokens, self._per_token = tokens, per_token
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # dicts keep their order: the oldest comes first

    def add(self, ngram: list[int]) -> None:
        """Add an n-gram, or make it the newest one."""
        first, tail = ngram[0], tuple(ngram[1:])
        tails = self._tails.pop(first, {})
        tails.pop(tail, None)
        tails[tail] = None
        self._tails[first] = tails
        if len(tails) > self._per_token:
            del tails[next(iter(tails))]
        if len(self._tails) > self._tokens:
            del self._tails[next(iter(self._tails))]

    def tails(self, first: int) -> list[tuple[int, ...]]:
        """Return what follows `first` in the pool's n-grams, newest first; counts as a use of them."""
        tails = self._tails.pop(first, None)
        if tails is None:
            return []
        self._tails[first] = tails
        return list(reversed(tails))


class _Row:
    """One request. Level j of column i of `window` is a guess of the token i + j + 1 places after the pending token.

    `steps`: Jacobi steps made; the window's topmost levels, one per step, are the target's own, the others still the first guess.
    """

    def __init__(self, window: NDArray[np.int64], pool: NgramPool) -> None:
        self.text: list[int] = []
        self.steps = 0
        self.window, self.pool = window, pool

    def learn(self, choices: NDArray[np.int64]) -> None:
        """Take the target's tokens [W] after the last level: n-grams into the pool, the lowest level out of the window."""
        trajectory = np.concatenate([self.window, choices[None]])
        if self.steps >= len(self.window) - 1:
            for column in trajectory.T.tolist():
                self.pool.add(column)
        self.window = trajectory[1:]
        self.steps += 1


class LookaheadDrafter(Drafter):
    """Lookahead decoding with a window of N - 1 levels by W columns, n-grams of N tokens, and at most G candidates.

    A proposal's first W (N - 1) nodes are the window (`open_` False): node j W + i is level j of column i; its parent is
    column i - 1 of level 0 where j = 0 (-1 for column 0), else level j - 1 of the same column. They are up to W + N - 2
    levels deep, whatever `length` is. After them come the candidates, `open_`: the tree of the at most G newest n-grams
    that begin with the pending token, without that token, cut to `length` levels. Rows with fewer nodes are filled up with
    children of the pending token that are not open.

    `digest` drops the lowest level and puts the target's tokens on top, one place per round however many tokens the round
    accepted: the default of the authors' code. A round that is not told by `digest` leaves the window as it was. An n-gram is
    taken once all of it but its first token is the target's own. `prompt`: the prompt's n-grams go into the pool at first. The
    first window is random tokens of the prompt; the random numbers depend on `seed` only. The first prompt token is not
    known (see `Drafter.extend`).

    The defaults are small, for targets that compute on CPUs; `pool` is the number of first tokens kept per row.
    Raises ValueError for a size out of range.
    """

    deterministic = True
    branches = True
    learns = True

    def __init__(
        self, batch: int, *, window: int = 8, ngram: int = NGRAM, candidates: int = 8, pool: int = 4096, prompt: bool = True,
        seed: int = 0,
    ) -> None:
        if window < 1 or ngram < 2 or candidates < 1 or pool < 1:
            raise ValueError(f"window, candidates and pool are >= 1, ngram >= 2; got {window}, {candidates}, {pool}, {ngram}")
        self.window, self.ngram, self.candidates = window, ngram, candidates
        self.max_nodes = (window + candidates) * (ngram - 1)
        self._pool, self._prompt, self._seed = pool, prompt, seed
        chain = np.arange(-1, window - 1)
        self._parents = np.concatenate([chain, np.arange(window * (ngram - 2))]).tolist()
        self._rows = [self._new_row() for _ in range(batch)]
        self._device = torch.device("cpu")

    def _new_row(self) -> _Row:
        return _Row(np.zeros((self.ngram - 1, self.window), dtype=np.int64), NgramPool(self._pool, self.candidates))

    def extend(self, rows: list[int], tokens: Tensor, aux: Tensor | None, starts: list[int], counts: list[int]) -> None:
        """See `Drafter.extend`. Raises ValueError when a row's positions do not follow those that it has."""
        self._device = tokens.device
        for slot, new, start, count in zip(rows, tokens.tolist(), starts, counts, strict=True):
            if start == 0:
                self._rows[slot] = self._new_row()
            row = self._rows[slot]
            if start != len(row.text):
                raise ValueError(f"row {slot} has {len(row.text)} positions, the new ones start at {start}")
            row.text.extend(new[:count])
            if start == 0:
                self._begin(row)

    def _begin(self, row: _Row) -> None:
        """Make a new request's first window, and its pool from the prompt."""
        places = np.random.default_rng(self._seed).integers(0, len(row.text), size=row.window.shape)
        row.window = np.asarray(row.text)[places]
        if self._prompt:
            for at in range(len(row.text) - self.ngram + 1):
                row.pool.add(row.text[at : at + self.ngram])

    def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
        """See `Drafter.draft`; `draws` is not used."""
        tokens, parents = [], []
        for slot in rows:
            row = self._rows[slot]
            grown, above = self._candidates(row, length)
            tokens.append(row.window.flatten().tolist() + grown)
            parents.append(self._parents + above)
        closed = len(self._parents)
        open_ = [[False] * closed + [True] * (len(line) - closed) for line in tokens]
        longest = max(len(line) for line in tokens)
        for slot, line, above, may in zip(rows, tokens, parents, open_, strict=True):
            missing = longest - len(line)
            line.extend([self._rows[slot].text[-1]] * missing)
            above.extend([-1] * missing)
            may.extend([False] * missing)
        nodes, origin, may_be = (torch.tensor(part, device=self._device) for part in (tokens, parents, open_))
        return Proposal(nodes, parents=origin, open_=may_be)

    def _candidates(self, row: _Row, length: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the candidates' tree; equal beginnings share their nodes."""
        first = len(self._parents)
        tokens: list[int] = []
        parents: list[int] = []
        nodes: dict[tuple[int, int], int] = {}
        for tail in row.pool.tails(row.text[-1]):
            parent = -1
            for token in tail[:length]:
                node = nodes.get((parent, token))
                if node is None:
                    node = nodes[parent, token] = first + len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                parent = node
        return tokens, parents

    def digest(self, rows: list[int], proposal: Proposal, choices: Tensor) -> None:
        """See `Drafter.digest`: only the choices after the window's last level are used."""
        last = 1 + self.window * (self.ngram - 2)
        found = choices[:, last : last + self.window].cpu().numpy().astype(np.int64)
        for slot, line in zip(rows, found, strict=True):
            self._rows[slot].learn(line)

    def move(self, source: int, destination: int) -> None:
        """See `Drafter.move`."""
        self._rows[destination], self._rows[source] = self._rows[source], self._new_row()

    @property
    def weight_bytes(self) -> int:
        """0: it has no weights."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of windows and full pools on the host, an upper estimate as Python objects; the texts are not counted."""
        entry = _TUPLE_BYTES + _INT_BYTES * (self.ngram - 1)
        pool = self._pool * (_TUPLE_BYTES + _INT_BYTES + self.candidates * entry)
        return len(self._rows) * (pool + 8 * self.window * self.ngram)
