"""Where and how things run: folders, threads, the target, vLLM's process, the flow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eagle.config.base import DType, PositiveInt, Section


class PathsConfig(Section):
    """Where things are kept. Relative paths are taken from the project root (the folder of params.yaml)."""

    cache: str = Field(".cache", description="converted targets and cached target features")
    runs: str = Field("runs", description="outputs of flow runs: runs/<run-id>/<step>/")
    state: str = Field(".state", description="MLflow database and artifacts, Prefect home")


class RuntimeConfig(Section):
    """What every step shares."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="seed of every random stream")
    threads: Annotated[int, Field(ge=0)] = Field(0, description="CPU threads for torch; 0 = all cores of this process")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = cuda when torch sees one")


class TargetConfig(Section):
    """The model that is served, whose tokens the draft must predict."""

    model: str = Field("demo", min_length=1, description="'demo', a local Hugging Face folder, or a hub name")
    revision: str | None = Field(None, description="hub revision, when `model` is a hub name")
    dtype: DType = Field("bfloat16", description="dtype for data generation and feature extraction")
    aux_layers: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="hidden states tapped, vLLM's meaning: 0 = embeddings, i = output of i layers; null = 2, L/2, L-3"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the target")


class VllmConfig(Section):
    """The vLLM process. vLLM always runs under its own interpreter, in its own process."""

    interpreter: str | None = Field(None, description="python that can import vllm; null = .venv-vllm, else this one")
    kv_cache_gib: Annotated[int, Field(ge=1, le=4096)] = Field(2, description="KV cache space on CPU, GiB")
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = Field(128, description="concurrent sequences")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs per engine")
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.85, description="CUDA builds only")
    start_timeout_s: PositiveInt = Field(600, description="seconds an engine may take to start")
    timeout_s: PositiveInt = Field(7200, description="seconds one vLLM job may take in all")


class FlowConfig(Section):
    """How the flow runs the steps."""

    step_timeout_s: PositiveInt = Field(6 * 3600, description="a step that runs longer is ended, with its children")
    retries: Annotated[int, Field(ge=0, le=10)] = Field(1, description="retries of a step that crashed (not of a refused one)")
    retry_delay_s: Annotated[float, Field(ge=0.0, le=3600.0)] = Field(
        10.0, description="seconds before the first retry; each further one waits twice as long"
    )
    max_late_minutes: Annotated[float, Field(gt=0.0)] | None = Field(
        60.0, description="a scheduled run that starts later than this after its time ends at once, skipped; null = never"
    )
    min_free_gib: Annotated[float, Field(ge=0.0)] = Field(4.0, description="free disk that the run asks for before it starts")
