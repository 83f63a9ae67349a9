"""From the draft to production: bundle, registry and gate, server, drift watch, prompts from traffic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eagle.config.base import DType, Fraction, PositiveInt, Section


class BundleConfig(Section):
    """The vLLM-ready folder and its validation in vLLM itself."""

    draft_tokens: Annotated[int, Field(ge=1, le=16)] = Field(3, description="num_speculative_tokens of the serve command")
    dtype: DType = Field("float32", description="dtype of the weights in the bundle")
    validate_in_vllm: bool = Field(
        True, description="load in vLLM, compare text and acceptance; off = never registered as champion"
    )
    prompts: PositiveInt = Field(16, description="held-out prompts of the validation")
    max_new_tokens: PositiveInt = 64
    max_acceptance_gap: Annotated[float, Field(gt=0.0)] = Field(
        0.05, description="relative gap to the reference engine's acceptance length"
    )


class GateConfig(Section):
    """What a challenger must reach to become champion."""

    min_acceptance_length: Annotated[float, Field(ge=1.0)] = Field(
        1.3, description="absolute floor, counted by vLLM, bonus included"
    )
    min_equal_tokens: Fraction = Field(1.0, description="share of greedy tokens equal to the target's own, fp32")
    max_memory_overhead: Annotated[float, Field(gt=0.0)] = Field(0.35, description="draft weights and KV over the target's")
    min_relative_acceptance: Annotated[float, Field(gt=0.0)] = Field(0.98, description="challenger over champion, same prompts")


class RegisterConfig(Section):
    """MLflow tracking and registry."""

    tracking_uri: str | None = Field(None, description="null = sqlite under paths.state")
    experiment: str = Field("eagle-3.1", min_length=1)
    model_name: str | None = Field(None, description="registered model; null = eagle31-<target name>")
    gate: GateConfig = Field(default_factory=GateConfig)


class ServeConfig(Section):
    """`eagle serve`: the server, and who sets the draft length in it."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 = every one of this machine's")
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    control: Literal["pid", "schedule", "fixed"] = Field(
        "pid", description="draft length: the controller, vLLM's own table of measured lengths by batch size, or one length"
    )
    max_draft_tokens: Annotated[int, Field(ge=1, le=16)] = Field(5, description="largest draft length of the controller")
    draft_sampling: Literal["greedy", "probabilistic"] = Field(
        "greedy", description="how the draft picks tokens for requests that sample; probabilistic: more accepted, seeds do not hold"
    )
    stop_timeout_s: Annotated[float, Field(ge=0.0, le=3600.0)] = Field(10.0, description="seconds before vLLM is killed at the end")


class WatchConfig(Section):
    """The drift watch of a served draft: `eagle watch`. No step reads it."""

    window_s: Annotated[float, Field(ge=1.0, le=86400.0)] = Field(
        120.0, description="shortest window, seconds; longer than nearly all requests last, or neighbours share them"
    )
    min_drafts: Annotated[int, Field(ge=30)] = Field(300, description="a window with fewer drafts stays open: it would say little")
    min_requests: Annotated[int, Field(ge=1)] = Field(8, description="likewise for ended requests: one says little of the others")
    interval_s: Annotated[float, Field(gt=0.0, le=86400.0)] = Field(15.0, description="seconds between two scrapes")
    timeout_s: Annotated[float, Field(gt=0.0, le=600.0)] = Field(5.0, description="seconds a server may take to answer one scrape")
    drifting_tolerance: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.05, description="relative fall below the reference that is no drift"
    )
    degraded_tolerance: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.25, description="relative fall below the reference beyond which the draft is degraded"
    )
    false_alarms_per_month: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.05, description="largest probability of a false alarm in 30 days, while the reference's bound holds"
    )
    reference_confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = Field(
        0.95, description="confidence of the reference's lower bound, from the spread between its prompts"
    )

    @model_validator(mode="after")
    def _degraded_is_worse(self) -> WatchConfig:
        if self.degraded_tolerance <= self.drifting_tolerance:
            raise ValueError(
                f"degraded_tolerance ({self.degraded_tolerance:g}) must be above drifting_tolerance ({self.drifting_tolerance:g})"
            )
        return self


class TrafficConfig(Section):
    """Prompts from request logs: `eagle dataset from-traffic`. No step reads it."""

    max_prompts: Annotated[int, Field(ge=0)] = Field(
        5000, description="at most this many prompts, chosen by hash; 0 = all (memory then grows with the distinct prompts)"
    )
    retention_days: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="older requests, and those without a time, are left out; null = all are used"
    )
    mask: bool = Field(True, description="mask e-mail addresses, phone numbers, keys and tokens, payment cards and IBANs")
