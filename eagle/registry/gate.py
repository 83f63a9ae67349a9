"""The promotion gate: a pure function from measured figures to a verdict with reasons. Imports no MLflow.

The first model of a name has nothing to be compared with: absolute floors only. Later ones must also hold the
champion's acceptance length, measured on the same prompts with the same draft length.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from eagle.config import GateConfig
from eagle.errors import StepFailed


@dataclass(frozen=True)
class Candidate:
    """What the gate looks at.

    acceptance_length: tokens per target step at temperature 0 counted by vLLM, bonus token included; None = not measured.
    equal_tokens: share in 0..1 of greedy fp32 tokens equal to the target's own, the worse of vLLM and the reference engine.
    memory_overhead: bytes of draft weights and draft KV cache over the target's.
    validated: vLLM loaded the bundle and the bundle step's own checks held.
    measured_on: digest of the prompts and decoding settings behind acceptance_length; two figures compare only if equal.
    """

    acceptance_length: float | None
    equal_tokens: float
    memory_overhead: float
    validated: bool
    measured_on: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Candidate:
        """Read what `to_dict` wrote; StepFailed names a field that is missing or unknown."""
        names = {f.name for f in fields(cls)}
        odd = sorted(names.symmetric_difference(value))
        if odd:
            raise StepFailed(f"registry: the recorded figures of a model version lack or do not know '{odd[0]}'; register it again")
        return cls(**value)


@dataclass(frozen=True)
class Reason:
    """One check: its name, the measured value, the bound, which side of the bound is good, and whether it held."""

    name: str
    value: float | None
    bound: float
    better: Literal["higher", "lower"]
    ok: bool
    note: str = ""

    def line(self) -> str:
        """Return the check as one line of text, for example `acceptance_length 1.62 >= 1.3  ok`."""
        shown = "not measured" if self.value is None else f"{self.value:.4g}"
        sign = ">=" if self.better == "higher" else "<="
        end = f" ({self.note})" if self.note else ""
        return f"{self.name} {shown} {sign} {self.bound:.4g}  {'ok' if self.ok else 'FAILED'}{end}"


@dataclass(frozen=True)
class Verdict:
    """The gate's answer; `passed` is true when every reason is ok."""

    passed: bool
    reasons: tuple[Reason, ...]

    @property
    def word(self) -> str:
        """`passed` or `rejected`, as it is recorded."""
        return "passed" if self.passed else "rejected"

    def failures(self) -> tuple[Reason, ...]:
        """Return the reasons that did not hold."""
        return tuple(reason for reason in self.reasons if not reason.ok)


def evaluate(candidate: Candidate, champion: Candidate | None, gate: GateConfig) -> Verdict:
    """Judge `candidate` by the floors of `gate` and, when there is one, against `champion`.

    Monotone: a figure that gets better never turns a pass into a rejection. Absent and non-finite figures fail.
    """
    reasons = [
        _check("validated_in_vllm", float(candidate.validated), 1.0, "higher"),
        _check("acceptance_length", candidate.acceptance_length, gate.min_acceptance_length, "higher"),
        _check("equal_tokens", candidate.equal_tokens, gate.min_equal_tokens, "higher"),
        _check("memory_overhead", candidate.memory_overhead, gate.max_memory_overhead, "lower"),
    ]
    if champion is not None:
        reasons.append(_against(candidate, champion, gate.min_relative_acceptance))
    return Verdict(all(reason.ok for reason in reasons), tuple(reasons))


def _against(candidate: Candidate, champion: Candidate, bound: float) -> Reason:
    name = "acceptance_over_champion"
    if champion.measured_on != candidate.measured_on:
        return Reason(name, None, bound, "higher", False, "the champion was measured on other prompts or settings")
    if candidate.acceptance_length is None or not champion.acceptance_length:
        return Reason(name, None, bound, "higher", False)
    return _check(name, candidate.acceptance_length / champion.acceptance_length, bound, "higher")


def _check(name: str, value: float | None, bound: float, better: Literal["higher", "lower"]) -> Reason:
    if value is None or not math.isfinite(value):
        return Reason(name, None, bound, better, False)
    return Reason(name, value, bound, better, value >= bound if better == "higher" else value <= bound)
