"""`eagle plan --advise`: which depth, width and draft length give the most tokens/s, from what a run has measured.

Measured: seconds of target passes and drafts by batch size and K, acceptance by position. Assumed, and said so, unless
another run on the same data has measured that network: how acceptance changes with depth (`DEPTH_GAIN`) and width
(`WIDTH_GAIN`), and how a draft step's seconds change with both (`cost_factor`). A network of another width is never what is
advised unless it was measured: nothing published says what it accepts.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle.bench.evidence import Evidence, read_evidence, read_others
from eagle.bench.predict import speedup, survival_to
from eagle.decode.cost import CostTable
from eagle.draft.spec import DraftSpec, expected_tensors

DEPTHS = (1, 2, 4)
MOST_TOKENS = 8
# Accepted tokens a round over those of one layer. Meta's Llama drafts, tau 2.75 to 2.79 with one layer and 2.87 with three,
# little beyond; the largest step is that to two layers in DSpark (arXiv 2607.05147). Large targets: small ones may differ.
DEPTH_GAIN: Mapping[int, float] = {1: 1.0, 2: 1.04, 3: 1.056, 4: 1.06}
WIDTH_GAIN: Mapping[int, float] = {1: 1.0, 2: 0.95}  # by what the width is divided; no published number was found
# Of a draft step's seconds what goes into operators other than matrix products, whatever their widths: docs/decoding.md, the
# profile of a 4-layer draft of a 135M target on two cores. It goes with the number of layers, the head counted as one.
OPERATOR_SHARE = 0.14
TIE = 1.02  # less than this is no reason to train again


@dataclass(frozen=True)
class Choice:
    """The best K of a network at one batch size (0: no speculation), and what it is predicted to give."""

    draft_tokens: int
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True)
class Option:
    """A network: its numbers, where its acceptance comes from, and its best K at each batch size.

    `cost_factor`: seconds of its draft step over the present one's. `backed`: by measurement, or by published numbers on depth.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    acceptance_from: str
    cost_factor: float
    current: bool
    backed: bool
    best: dict[int, Choice]

    @property
    def score(self) -> float:
        """Geometric mean of the speed-ups over the batch sizes."""
        return math.exp(sum(math.log(choice.speedup) for choice in self.best.values()) / len(self.best))


@dataclass(frozen=True)
class Advice:
    """All options, the best first; what was measured and assumed, the reasons, and the next command."""

    options: list[Option]
    measured: list[str]
    assumed: list[str]
    reasons: list[str]
    command: str


def advise(base: Path, profile: str) -> Advice:
    """Return the advice for the run folder `base`. Reads results only.

    Raises StepFailed when the run has no draft or no measured speed, naming the step that makes it.
    """
    own = read_evidence(base)
    others = read_others(base, own)
    options = sorted(_options(own, others, 1.0), key=lambda option: (-option.score, option.layers))
    best, current = _advised(options), next(option for option in options if option.current)
    return Advice(
        options,
        own.notes + [f"acceptance of {_network(o.spec)}: {o.name}, trained on the same data" for o in others],
        _assumed(own, others),
        [*_reasons(own, best, current), *_experiment(options, best), _sensitivity(own, others, best)],
        _command(own, best, base, profile),
    )


def _advised(options: Sequence[Option]) -> Option:
    """Return the fastest option that is backed, or the present network where that is hardly slower."""
    best = max((option for option in options if option.backed), key=lambda option: option.score)
    current = next(option for option in options if option.current)
    return best if best.score >= TIE * current.score else current


def step_weights(spec: DraftSpec) -> int:
    """Return how many weights one draft step reads: the layers' and the head's matrices."""
    shapes = ((name, shape) for name, (shape, _) in expected_tensors(spec).items())
    return sum(math.prod(s) for name, s in shapes if len(s) == 2 and name.startswith(("layers.", "lm_head.")))


def cost_factor(spec: DraftSpec, measured: DraftSpec) -> float:
    """Return the assumed seconds of a draft step of `spec` over those of `measured`: by weights read and operators run."""
    weights = step_weights(spec) / step_weights(measured)
    operators = (spec.num_layers + 1) / (measured.num_layers + 1)
    return (1.0 - OPERATOR_SHARE) * weights + OPERATOR_SHARE * operators


def _networks(spec: DraftSpec) -> list[tuple[DraftSpec, int]]:
    """Return the networks that are weighed, with what their width is divided by; the run's own is the first."""
    found = [(spec, 1)]
    for layers in DEPTHS:
        for divisor in WIDTH_GAIN:
            narrow = replace(
                spec, num_layers=layers, hidden_size=_divided(spec.hidden_size, divisor),
                intermediate_size=_divided(spec.intermediate_size, divisor),
            )  # fmt: skip
            if all(narrow != other for other, _ in found):
                found.append((narrow, divisor))
    return found


def _divided(width: int, divisor: int) -> int:
    """Return the width over the divisor, rounded up to a multiple of 64 where the width is larger than that."""
    return width if divisor == 1 else min(width, -(-width // (divisor * 64)) * 64)


def depth_gain(layers: int) -> float:
    """Return the assumed accepted tokens a round with `layers` layers over those with one; flat beyond the last known depth."""
    return DEPTH_GAIN.get(layers, DEPTH_GAIN[max(DEPTH_GAIN)])


def _options(own: Evidence, others: Sequence[Evidence], effect: float) -> Iterable[Option]:
    """Yield every network with its best K; `effect`: how much of the assumed change of acceptance is taken (0: none)."""
    measured = {_network(other.spec): other for other in others}
    for spec, divisor in _networks(own.spec):
        current = spec == own.spec
        factor, known = cost_factor(spec, own.spec), current or _network(spec) in measured
        if known:
            source = own if current else measured[_network(spec)]
            by_position, where = source.by_position, "measured" if current else f"measured ({source.name})"
        else:
            gain = (depth_gain(spec.num_layers) * WIDTH_GAIN[divisor] / depth_gain(own.spec.num_layers)) ** effect
            by_position, where = [min(1.0, gain * share) for share in own.by_position], "assumed"
            if divisor > 1:
                where = "assumed, no source"
        costs = _scaled(own.costs, factor)
        best = {batch: _best(costs, by_position, batch) for batch in own.batches}
        backed = known or divisor == 1
        yield Option(spec.num_layers, spec.hidden_size, spec.intermediate_size, where, factor, current, backed, best)


def _network(spec: DraftSpec) -> str:
    return f"{spec.num_layers} layers, width {spec.hidden_size}, MLP {spec.intermediate_size}"


def _scaled(costs: CostTable, factor: float) -> CostTable:
    return CostTable(costs.target, {key: factor * seconds for key, seconds in costs.draft.items()}, costs.overhead)


def _best(costs: CostTable, by_position: Sequence[float], batch: int) -> Choice:
    plain = batch / costs.target_seconds(batch, 1)
    found = [Choice(0, plain, 1.0)]
    for length in range(1, MOST_TOKENS + 1):
        gain = speedup(costs, survival_to(by_position, length), batch, length)
        found.append(Choice(length, gain * plain, gain))
    return max(found, key=lambda choice: choice.speedup)


def _assumed(own: Evidence, others: Sequence[Evidence]) -> list[str]:
    gains = ", ".join(f"{layers}: {gain:g}" for layers, gain in DEPTH_GAIN.items())
    known = f" (not for {len(others)} measured network{'s' if len(others) > 1 else ''})" if others else ""
    return [
        f"accepted tokens a round by depth, over one layer's{known}: {gains} (Meta's Llama drafts, DSpark; targets far larger "
        "than a small one)",
        f"half the width accepts {WIDTH_GAIN[2]:g} of the tokens: no published number was found",
        f"{100 * OPERATOR_SHARE:.0f} % of a draft step's seconds go with the number of layers, the rest with the weights it reads "
        "(a profile on two CPU cores, docs/decoding.md)",
        f"beyond K={own.measured_tokens} each further token is accepted as often as the last measured one was",
    ]


def _reasons(own: Evidence, best: Option, current: Option) -> list[str]:
    lines = []
    for batch in own.batches:
        step, one = own.costs.draft_seconds(batch, 1), own.costs.target_seconds(batch, 1)
        wide = own.costs.target_seconds(batch, 4) / one
        lines.append(f"batch {batch}: one draft token costs {step / one:.2f} target steps, verifying 3 draft tokens {wide:.2f}")
        choice = current.best[batch]
        if choice.draft_tokens == 0:
            need = _needed(own, batch)
            lines.append(f"batch {batch}: no K pays with the present draft; the first draft token would have to be accepted {need}")
    if best is not current:
        needed = _needed_gain(own, best, current)
        lines.append(
            f"a step of {_named(best)} takes {100 * best.cost_factor:.0f} % of the present one's time; it stays ahead as long as "
            f"at least {100 * needed:.0f} % as many of its tokens are accepted"
        )
    else:
        lines.append("no other backed network is predicted to be more than 2 % faster over these batch sizes: keep this one")
    if not any(choice.draft_tokens for choice in best.best.values()):
        lines.append("no K pays at any of these batch sizes: serve without speculation until a better draft is trained")
    return lines


def _named(option: Option) -> str:
    return f"{option.layers} layer{'s' if option.layers > 1 else ''} of width {option.hidden_size}"


def _experiment(options: Sequence[Option], best: Option) -> list[str]:
    """Say which network would be faster still if its acceptance, which nothing backs, were as assumed."""
    top = max(options, key=lambda option: option.score)
    if top.backed or top.score < TIE * best.score:
        return []
    return [f"{_named(top)} would be {100 * (top.score / best.score - 1):.0f} % faster if it accepted as assumed: an experiment"]


def _needed(own: Evidence, batch: int) -> str:
    share = own.costs.round_seconds(batch, 1) / own.costs.target_seconds(batch, 1) - 1.0
    return f"{100 * share:.0f} % of the time, measured are {100 * own.by_position[0]:.0f} %" if share <= 1.0 else "more than always"


def _needed_gain(own: Evidence, best: Option, current: Option) -> float:
    """Return the share of the present draft's acceptance at which `best` is only as fast as `current`, by bisection."""
    costs, low, high = _scaled(own.costs, best.cost_factor), 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        shares = [min(1.0, middle * share) for share in own.by_position]
        score = sum(math.log(_best(costs, shares, batch).speedup) for batch in own.batches) / len(own.batches)
        low, high = (low, middle) if math.exp(score) >= current.score else (middle, high)
    return high


def _sensitivity(own: Evidence, others: Sequence[Evidence], best: Option) -> str:
    """Say whether the choice is the same when depth and width change acceptance not at all, or twice as much as assumed."""
    turned = []
    for effect, words in ((0.0, "did not change acceptance"), (2.0, "changed acceptance twice as much")):
        top = _advised(list(_options(own, others, effect)))
        if (top.layers, top.hidden_size) != (best.layers, best.hidden_size):
            turned.append(f"{_named(top)} if depth and width {words}")
    if turned:
        return f"the choice turns to {' and to '.join(turned)}"
    return "the choice is the same if depth and width change acceptance not at all, or twice as much"


def _command(own: Evidence, best: Option, base: Path, profile: str) -> str:
    batch = min(own.batches)
    tokens = best.best[batch].draft_tokens
    if tokens == 0:
        return f"eagle bench --suite heldout --dir {shlex.quote(str(base))}" if profile == "full" else "make run PROFILE=full"
    named = "" if profile == "default" else f" --profile {shlex.quote(profile)}"
    if best.current:
        return f"eagle{named} --set bundle.draft_tokens={tokens} step bundle --dir {shlex.quote(str(base))}"
    run = f"{base.name}-{best.layers}x{best.hidden_size}"
    said = {
        "draft.layers": best.layers, "draft.hidden_size": best.hidden_size, "draft.intermediate_size": best.intermediate_size,
        "bench.draft_tokens": f"[{tokens}]", "bundle.draft_tokens": tokens,
    }  # fmt: skip
    if best.hidden_size == own.spec.hidden_size:
        said.pop("draft.hidden_size")
        said.pop("draft.intermediate_size")
    sets = " ".join(f"--set {key}={value}" for key, value in said.items())
    target = "" if profile == "default" else f" PROFILE={shlex.quote(profile)}"
    return f"make run{target} ARGS={shlex.quote(f'--run-id {run} {sets}')}"
