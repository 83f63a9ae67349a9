"""Tuning and measuring in the reference engine, and the controllers of the draft length."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eagle.config.base import DType, Fraction, Method, PositiveInt, Section


class TuneConfig(Section):
    """Kernel and device tuning."""

    max_minutes: Annotated[float, Field(gt=0.0)] = 2.0
    kernel_minutes: Annotated[float, Field(gt=0.0, le=600.0)] = Field(
        5.0, description="budget for the launches of the Triton kernels on a GPU, or the direct calls on CPU; what is done is kept"
    )
    repeats: Annotated[int, Field(ge=3)] = 15
    batch_sizes: list[PositiveInt] = Field(default_factory=lambda: [1, 8], min_length=1)
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = Field(
        3, description="K of the timed round: K draft steps, then a verification"
    )
    try_compile: bool = Field(False, description="also time torch.compile (the first call takes tens of seconds)")
    aot_targets: list[Annotated[int, Field(ge=70, le=130)]] = Field(
        default_factory=lambda: [90], description="CUDA compute capabilities compiled ahead of time as a check"
    )


class BenchConfig(Section):
    """Paired, interleaved measurement in the reference engine."""

    prompts: PositiveInt = Field(8, description="held-out prompts")
    max_new_tokens: PositiveInt = 48
    batch_sizes: list[PositiveInt] = Field(default_factory=lambda: [1, 8], min_length=1)
    methods: list[Method] = Field(
        default_factory=lambda: list[Method](["eagle31"]), min_length=1, description="what is compared with no speculation"
    )
    draft_tokens: list[Annotated[int, Field(ge=1, le=16)]] = Field(
        default_factory=lambda: [3], min_length=1, description="draft lengths K at which chains of a fixed length are measured"
    )
    max_draft_tokens: Annotated[int, Field(ge=1, le=16)] = Field(8, description="largest K of the methods that choose it")
    tree_depth: Annotated[int, Field(ge=1, le=8)] = Field(4, description="levels of the tree methods")
    tree_top_k: Annotated[int, Field(ge=1, le=16)] = Field(4, description="nodes expanded per level of a dynamic tree")
    tree_nodes: Annotated[int, Field(ge=1, le=64)] = Field(12, description="tree nodes verified per round")
    temperatures: list[Annotated[float, Field(ge=0.0, le=5.0)]] = Field(default_factory=lambda: [0.0, 1.0], min_length=1)
    rounds: Annotated[int, Field(ge=2)] = Field(3, description="interleaved repeats (A B A B ...)")
    dtype: DType = Field("bfloat16", description="dtype of the timed runs; equality is always checked in fp32")
    equality_prompts: PositiveInt = Field(8, description="prompts of the fp32 greedy equality check")
    load_rates: list[Annotated[float, Field(gt=0.0, le=1e6)]] = Field(
        default_factory=lambda: [0.5, 1.0, 2.0, 4.0], min_length=1, description="arrivals per second of the suite 'load'"
    )
    load_requests: PositiveInt = Field(32, description="requests at each of these rates")
    load_ttft_ms: Annotated[float, Field(gt=0.0)] = Field(1000.0, description="limit of time to first token for goodput")
    load_itl_ms: Annotated[float, Field(gt=0.0)] = Field(200.0, description="limit of the mean inter-token latency for goodput")


class ControlConfig(Section):
    """The controllers of the draft length; see `eagle.decode.control.ControlSettings`, whose defaults these are."""

    memory: Annotated[float, Field(ge=1.0)] = Field(32.0, description="rounds that the survival estimate remembers")
    prior_acceptance: Fraction = Field(0.5, description="per-token acceptance before any evidence")
    beta: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.2, description="smoothing of the hit rate, the PID's measured variable")
    kp: Annotated[float, Field(ge=0.0)] = Field(2.0, description="draft tokens per unit of hit rate")
    ki: Annotated[float, Field(ge=0.0)] = 0.15
    kd: Annotated[float, Field(ge=0.0)] = Field(0.5, description="acts on the measurement")
    trim_limit: Annotated[float, Field(ge=0.0)] = Field(1.0, description="bound of the PID's correction, draft tokens")
    dead_band: Annotated[float, Field(ge=0.5, lt=1.0)] = Field(0.75, description="change of the trim that moves K, draft tokens")
    surprise: Annotated[float, Field(gt=0.0)] = Field(1.7, description="standard deviations of the hit rate that make it forget")
    speculation_margin: Annotated[float, Field(ge=0.0)] = Field(0.02, description="gain promised before speculation begins")
    probe_every: PositiveInt = Field(5, description="rounds without speculation before it is tried again")
    probe_budget: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.015, description="share of the time that probes may cost")
