"""The methods that are compared, on one target in memory: their drafters, draft lengths and length policies.

All are our own implementations in one engine. `eagle31*` draft with the run's own drafts; `medusa` and `eagle2` need
what `eagle step rivals` trains; `ngram` and `lookahead` need no training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from eagle.bench.costs import measure_costs
from eagle.bench.workload import Arm, Workload
from eagle.config import BenchConfig, DType, Method
from eagle.decode.chooser import Chooser
from eagle.decode.control import ControlSettings, LengthPolicy, PidController
from eagle.decode.cost import CostTable
from eagle.decode.drafting import EagleDrafter
from eagle.decode.drawn_tree import WIDTHS, DrawnTreeDrafter
from eagle.decode.dynamic_tree import EagleTreeDrafter, TreeShape
from eagle.decode.engine import Engine
from eagle.decode.lookahead import NGRAM, LookaheadDrafter
from eagle.decode.medusa import MedusaDrafter, load_medusa
from eagle.decode.ngram import NgramDrafter
from eagle.decode.proposal import MAX_DRAFT_TOKENS, Drafter
from eagle.draft.io import load_draft
from eagle.draft.model import DraftModel
from eagle.errors import StepFailed

_ADAPTIVE: dict[Method, type[PidController] | type[Chooser]] = {"eagle31-pid": PidController, "eagle31-chunks": Chooser}
# Methods that decode with another one's drafter.
_SHARES: dict[Method, Method] = {"eagle31-pid": "eagle31", "eagle31-chunks": "eagle31"}


@dataclass(frozen=True)
class Sources:
    """Where the drafts are: folders of the steps `distill` and `policy`, and of `rivals` (None: not trained)."""

    distill: Path | None
    policy: Path
    rivals: Path | None = None

    def available(self, method: Method) -> bool:
        """Whether the method can be measured with what is there."""
        if method in ("medusa", "eagle2"):
            return self.rivals is not None
        return method != "eagle31-distilled" or self.distill is not None


class Lab:
    """A target, and the engines of all methods: they share its weights and KV memory and take turns on it.

    `room`: tokens of the longest prompt with its answer. `compiled`: the Eagle chain drafts' step is compiled. Raises
    StepFailed when one of `bench.methods` has no trained draft.
    """

    def __init__(
        self, model: PreTrainedModel, target: Path, sources: Sources, bench: BenchConfig, control: ControlSettings, *,
        room: int, batch: int, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.bench, self.batch, self.room = bench, batch, room
        self.control = control
        self._target, self._sources, self._compiled = target, sources, compiled
        self._size = {"batch": batch, "max_length": room}
        self._shape = TreeShape(bench.tree_top_k, bench.tree_nodes, bench.tree_depth)
        self._model = model
        drafters = {m: self._drafter(m) for m in dict.fromkeys(_SHARES.get(m, m) for m in bench.methods) if m != "none"}
        reach = max([MAX_DRAFT_TOKENS, *(drafter.max_nodes for drafter in drafters.values())])
        self.plain = Engine(model, None, max_length=room, batch=batch, reach=reach)
        self._engines: dict[Method, Engine] = {m: self.plain.sharing(drafter) for m, drafter in drafters.items()}
        self._engines["none"] = self.plain
        self._policies: dict[Arm, LengthPolicy] = {}
        self._costs: dict[tuple[Method, int], CostTable] = {}

    def engine(self, method: Method) -> Engine:
        """The engine of a method, made at its first use. Raises StepFailed when its draft has not been trained."""
        method = _SHARES.get(method, method)
        if method not in self._engines:
            self._engines[method] = self.plain.sharing(self._drafter(method))
        return self._engines[method]

    def policy(self, arm: Arm) -> int | LengthPolicy:
        """How many tokens the arm drafts: its fixed number, or a controller that lives as long as the lab."""
        return self._policies.get(arm, arm.draft_tokens)

    def prepare(self, arm: Arm, work: Workload) -> None:
        """Measure what an adaptive arm needs to know before it starts."""
        if arm.method not in _ADAPTIVE or arm in self._policies:
            return
        key = (_SHARES[arm.method], arm.batch)
        if key not in self._costs:
            self._costs[key] = measure_costs(self.engine(arm.method), work, arm.batch, arm.draft_tokens)
        self._policies[arm] = _ADAPTIVE[arm.method](self._costs[key], self.control)

    def cost_table(self, arm: Arm) -> CostTable:
        """The table by which a prepared adaptive arm decides."""
        return self._costs[_SHARES[arm.method], arm.batch]

    def costs(self) -> dict[str, CostTable]:
        """The cost tables that were measured, by 'method, batch'."""
        return {f"{method}, batch {batch}": table for (method, batch), table in self._costs.items()}

    def lengths(self, method: Method) -> Sequence[int]:
        """The draft lengths at which a method is measured: chains at each configured K, the others at one."""
        fixed: dict[Method, int | Callable[[], int]] = {
            "none": 0,
            "lookahead": NGRAM - 1,
            "medusa": self._medusa_depth,
            "eagle2": self.bench.tree_depth,
            "eagle31-tree": self.bench.tree_depth,
            "eagle31-drawn": len(WIDTHS),
            "eagle31-pid": self.bench.max_draft_tokens,
            "eagle31-chunks": self.bench.max_draft_tokens,
        }
        if method not in fixed:
            return sorted(set(self.bench.draft_tokens))
        length = fixed[method]
        return [length if isinstance(length, int) else length()]

    def _drafter(self, method: Method) -> Drafter:
        build: dict[Method, Callable[[], Drafter]] = {
            "ngram": lambda: NgramDrafter(self.batch, self.room),
            "lookahead": lambda: LookaheadDrafter(self.batch),
            "medusa": self._medusa,
            "eagle2": lambda: self._tree(self._rivals() / "eagle2" / "draft"),
            "eagle31-distilled": lambda: self._chain(self._distilled() / "draft"),
            "eagle31": lambda: self._chain(self._sources.policy / "draft"),
            "eagle31-tree": lambda: self._tree(self._sources.policy / "draft"),
            "eagle31-drawn": self._drawn,
        }
        return build[method]()

    def _chain(self, draft: Path) -> Drafter:
        return EagleDrafter.beside(self._model, self._network(draft), **self._size, compiled=self._compiled)

    def _tree(self, draft: Path) -> Drafter:
        return EagleTreeDrafter.beside(self._model, self._network(draft), **self._size, shape=self._shape)

    def _drawn(self) -> Drafter:
        return DrawnTreeDrafter.beside(self._model, self._network(self._sources.policy / "draft"), **self._size)

    def _network(self, draft: Path) -> DraftModel:
        dtype: DType = "bfloat16" if self._model.dtype == torch.bfloat16 else "float32"
        return load_draft(draft, self._target, device=str(self._model.device), dtype=dtype).eval()

    def _medusa(self) -> Drafter:
        heads = load_medusa(self._rivals() / "medusa")
        return MedusaDrafter(heads, batch=self.batch, dtype=self._model.dtype, device=self._model.device)

    def _medusa_depth(self) -> int:
        drafter = self.engine("medusa").drafter
        assert isinstance(drafter, MedusaDrafter)  # noqa: S101 -- for the type checker
        return min(drafter.depth, self.bench.tree_depth)

    def _rivals(self) -> Path:
        if self._sources.rivals is None:
            raise StepFailed("medusa and eagle2 are not trained for this run; run: eagle step rivals --dir RUN")
        return self._sources.rivals

    def _distilled(self) -> Path:
        if self._sources.distill is None:
            raise StepFailed("the distilled draft is not there; run: eagle step distill --dir RUN")
        return self._sources.distill

