"""The single source of configuration: keys, types, defaults, bounds and help. `eagle.profiles` reads it from files."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from eagle.config.base import DType, Fraction, Method, PositiveInt, Section
from eagle.config.decoding import BenchConfig, ControlConfig, TuneConfig
from eagle.config.delivery import BundleConfig, GateConfig, RegisterConfig, ServeConfig, TrafficConfig, WatchConfig
from eagle.config.machine import FlowConfig, PathsConfig, RuntimeConfig, TargetConfig, VllmConfig
from eagle.config.training import (
    AblateConfig,
    DatasetConfig,
    DepthStage,
    DistillConfig,
    DraftConfig,
    PolicyConfig,
    RivalsConfig,
    TemperatureShare,
)

__all__ = [
    "AblateConfig",
    "BenchConfig",
    "BundleConfig",
    "Config",
    "ControlConfig",
    "DType",
    "DatasetConfig",
    "DepthStage",
    "DistillConfig",
    "DraftConfig",
    "FlowConfig",
    "Fraction",
    "GateConfig",
    "Method",
    "PathsConfig",
    "PolicyConfig",
    "PositiveInt",
    "RegisterConfig",
    "RivalsConfig",
    "RuntimeConfig",
    "Section",
    "ServeConfig",
    "TargetConfig",
    "TemperatureShare",
    "TrafficConfig",
    "TuneConfig",
    "VllmConfig",
    "WatchConfig",
]


class Config(Section):
    """A whole profile."""

    paths: PathsConfig = Field(default_factory=PathsConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    target: TargetConfig = Field(default_factory=TargetConfig)
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    draft: DraftConfig = Field(default_factory=DraftConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    tune: TuneConfig = Field(default_factory=TuneConfig)
    bench: BenchConfig = Field(default_factory=BenchConfig)
    rivals: RivalsConfig = Field(default_factory=RivalsConfig)
    ablate: AblateConfig = Field(default_factory=AblateConfig)
    control: ControlConfig = Field(default_factory=ControlConfig)
    bundle: BundleConfig = Field(default_factory=BundleConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    register_: RegisterConfig = Field(default_factory=RegisterConfig, alias="register")
    watch: WatchConfig = Field(default_factory=WatchConfig)
    traffic: TrafficConfig = Field(default_factory=TrafficConfig)
    flow: FlowConfig = Field(default_factory=FlowConfig)

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)
