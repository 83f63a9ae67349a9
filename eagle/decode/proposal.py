"""What a drafter is to the engine: it takes in positions that are known, and proposes tokens to verify.

Position t of a row is known when token t is; the target's hidden state exists for all known positions but the last
(the pending token). A drafter is told of position t with the token *after* it, because that is what an EAGLE draft
takes as its input there (vLLM, v1/spec_decode/llm_base_proposer.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from eagle.decode.sampling import Warp

MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True)
class Draws:
    """How a round's draft tokens are drawn at temperature > 0: `warp` of the n rows, `uniforms` [n, K] in [0, 1), float64.

    For a drafter with `lanes`, `uniforms` is [n, K, lanes].
    """

    warp: Warp
    uniforms: Tensor


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one round: a chain per row, or a tree per row.

    `tokens` [n, N]: target ids (int64). A chain: token i follows token i - 1, N = K. A tree: `parents` [n, N] (int64)
    holds the index of each node's parent, which is smaller than its own, or -1 for a child of the pending token;
    `open_` [n, N] (bool), if given, is False at nodes that only want the target's opinion and are never accepted.
    For a chain that was drawn: `chosen` [n, K], the probability each token was drawn with, and `probabilities`
    [n, K, Vd] over the draft's vocabulary, whose target ids are `ids` [Vd] (None = the target's own vocabulary).
    `probabilities` None means a deterministic draft. A tree that was drawn: `probabilities` [n, 1 + N, Vd], what the
    children of the pending token and of each node were drawn from, and `widths`, the children of a node by depth.
    """

    tokens: Tensor
    parents: Tensor | None = None
    open_: Tensor | None = None
    chosen: Tensor | None = None
    probabilities: Tensor | None = None
    ids: Tensor | None = None
    widths: tuple[int, ...] | None = None


class Drafter(ABC):
    """A method of drafting. `rows` are the engine's batch slots, in ascending order.

    `aux_layers`: the target's hidden states that it wants (vLLM's ids), ascending; () = none. `max_nodes`: the most
    nodes that one proposal can have. `deterministic`: it never draws at random. `branches`: it proposes trees. `learns`:
    it wants `digest`. `lanes`: random numbers per position that it draws with, 0 = one.
    """

    aux_layers: tuple[int, ...] = ()
    max_nodes: int = MAX_DRAFT_TOKENS
    deterministic: bool = False
    branches: bool = False
    learns: bool = False
    lanes: int = 0

    @abstractmethod
    def extend(self, rows: list[int], tokens: Tensor, aux: Tensor | None, starts: list[int], counts: list[int]) -> None:
        """Take in new positions: row `rows[i]` has `counts[i]` of them from `starts[i]` on.

        tokens [n, T] (int64): the token after each position; aux [n, T, A*H]: the target's hidden states there, None
        when `aux_layers` is (). What lies beyond a row's count is to be ignored. `starts[i]` = 0 begins a new request.
        """

    @abstractmethod
    def draft(self, rows: list[int], length: int, draws: Draws | None) -> Proposal:
        """Propose `length` >= 1 tokens after what `extend` told last (a tree: of that depth). `draws` None = greedily."""

    def digest(self, rows: list[int], proposal: Proposal, choices: Tensor) -> None:  # noqa: B027 -- most need nothing
        """Learn the target's arg max `choices` [n, 1 + N] after the pending token and after each node of `proposal`."""

    @abstractmethod
    def move(self, source: int, destination: int) -> None:
        """Row `source` takes the place of row `destination`; `source` is free afterwards."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of the weights that it adds to the target's."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of its caches, at the engine's maximum batch and length."""
