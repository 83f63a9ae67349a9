"""The single source of configuration: keys, types, defaults, bounds and help.

`params.yaml` at the project root is the default profile (read by DVC too); `profiles/NAME.yaml` overrides it, and
`--set section.key=value` overrides both. Every unknown key, wrong type or value out of bounds is a `ConfigError`
with the file, the key and the closest valid key; nothing is started.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle.errors import ConfigError, closest

DType = Literal["float32", "bfloat16"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable and numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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


class TemperatureShare(Section):
    """One component of the temperature mix of generated answers."""

    temperature: Annotated[float, Field(ge=0.0, le=5.0)]
    weight: Annotated[float, Field(gt=0.0)]


class DatasetConfig(Section):
    """Prompts in, conversations answered by the target out."""

    backend: Literal["auto", "vllm", "transformers"] = Field("auto", description="auto = vllm when it is found")
    prompt_files: list[str] = Field(default_factory=list, description="JSONL: prompt, messages, conversations or turns")
    file_prompts: Annotated[int, Field(ge=0)] = Field(0, description="at most this many prompts per file; 0 = all")
    shipped_prompts: Annotated[int, Field(ge=0)] = Field(1350, description="prompts expanded from data/prompts")
    self_prompts: Annotated[int, Field(ge=0)] = Field(650, description="prompts sampled from the target itself")
    self_prompt_tokens: PositiveInt = Field(64, description="longest self-prompt, tokens")
    self_prompt_temperature: Annotated[float, Field(gt=0.0, le=5.0)] = Field(
        0.8, description="at 1.0 a third of a small target's self-prompts are noise that never ends"
    )
    max_prompt_tokens: PositiveInt = Field(384, description="longer prompts are quarantined")
    max_new_tokens: PositiveInt = Field(128, description="longest answer, tokens")
    min_new_tokens: Annotated[int, Field(ge=1)] = Field(4, description="shorter answers are quarantined")
    temperatures: list[TemperatureShare] = Field(
        default_factory=lambda: [
            TemperatureShare(temperature=0.0, weight=0.7),
            TemperatureShare(temperature=0.8, weight=0.15),
            TemperatureShare(temperature=1.0, weight=0.15),
        ],
        min_length=1,
        description="shares of answers sampled at each temperature; 0 is what greedy serving sees",
    )
    heldout_fraction: Annotated[float, Field(gt=0.0, lt=0.9)] = Field(0.06, description="share of prompts held out, by hash")
    near_duplicate_jaccard: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.85, description="prompts more alike than this (Jaccard of word 3-grams) are dropped; 1 = exact duplicates only"
    )
    shard_rows: PositiveInt = Field(2048, description="rows per Parquet shard")


class DraftConfig(Section):
    """The draft network. Null widths follow the target."""

    layers: Annotated[int, Field(ge=1, le=16)] = 4
    heads: Annotated[int, Field(ge=1)] = 8
    kv_heads: Annotated[int, Field(ge=1)] = 4
    head_dim: Annotated[int, Field(ge=2)] | None = Field(None, description="null = the target's head_dim")
    hidden_size: Annotated[int, Field(ge=1)] | None = Field(None, description="null = the target's hidden size")
    intermediate_size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="null = two thirds of the target's, rounded up to 64: a draft step must be cheap"
    )
    vocab_size: Annotated[int, Field(ge=2)] | None = Field(8192, description="draft vocabulary; null = the target's")
    fc_norm: bool = Field(True, description="one RMSNorm per tapped state before fc (EAGLE 3.1)")
    norm_output: bool = Field(True, description="feed the post-norm hidden state to the next draft step (EAGLE 3.1)")
    norm_before_residual: bool = False

    @model_validator(mode="after")
    def _grouped_heads(self) -> DraftConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class DepthStage(Section):
    """A stretch of stage-1 training at one depth of the training-time test."""

    depth: Annotated[int, Field(ge=1, le=16)] = Field(description="training-time-test steps")
    steps: Annotated[int, Field(ge=1)] = Field(description="optimiser steps")


class DistillConfig(Section):
    """Stage 1: supervised distillation on the target's own outputs."""

    stages: list[DepthStage] = Field(
        default_factory=lambda: [DepthStage(depth=1, steps=400), DepthStage(depth=3, steps=170)], min_length=1
    )
    max_minutes: Annotated[float, Field(gt=0.0)] = Field(9.0, description="budget of training time; the schedule ends with it")
    tokens_per_step: PositiveInt = Field(2048, description="tokens per optimiser step, padding included")
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-3
    min_learning_rate_ratio: Fraction = 0.05
    warmup_steps: Annotated[int, Field(ge=0)] = 40
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.8, description="weight of training-time-test step k is decay^k")
    top_k: Annotated[int, Field(ge=1, le=1024)] = Field(32, description="target probabilities kept per position")
    autocast: bool = Field(True, description="bf16 matrix products; losses and norms stay fp32")
    init_from_target: bool = Field(True, description="head rows and final norm start from the target's")
    output_init_scale: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.3, description="scale of o_proj and down_proj at start")
    eval_every: PositiveInt = Field(100, description="optimiser steps between validations")
    eval_sequences: PositiveInt = Field(64, description="held-out sequences per validation")
    eval_tokens: Annotated[int, Field(ge=1, le=16)] = Field(3, description="draft tokens K of the measured acceptance length")
    checkpoint_every: PositiveInt = Field(50, description="optimiser steps between checkpoints")


class PolicyConfig(Section):
    """Stage 2: exact policy gradient of the expected accepted length."""

    steps: Annotated[int, Field(ge=0)] = Field(30, description="optimiser steps; 0 keeps the distilled draft as it is")
    max_minutes: Annotated[float, Field(gt=0.0)] = 3.0
    sequences_per_step: PositiveInt = 16
    anchors_per_sequence: PositiveInt = Field(48, description="rounds started per sequence")
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = Field(3, description="K, length of a draft")
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 5e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    anchor_weight: Annotated[float, Field(ge=0.0)] = Field(0.2, description="weight of the cross-entropy anchor")
    temperatures: list[TemperatureShare] = Field(
        default_factory=lambda: [TemperatureShare(temperature=0.0, weight=0.75), TemperatureShare(temperature=1.0, weight=0.25)],
        min_length=1,
        description="temperatures of the rollouts: those that will be served",
    )
    eval_every: PositiveInt = 10
    eval_sequences: PositiveInt = 64
    max_drop: Annotated[float, Field(ge=0.0)] = Field(
        0.02, description="relative fall of validation acceptance that stops the stage"
    )
    checkpoint_every: PositiveInt = 10


class TuneConfig(Section):
    """Kernel and device tuning."""

    max_minutes: Annotated[float, Field(gt=0.0)] = 2.0
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
    draft_tokens: list[Annotated[int, Field(ge=1, le=16)]] = Field(
        default_factory=lambda: [3], min_length=1, description="draft lengths K that are measured"
    )
    temperatures: list[Annotated[float, Field(ge=0.0, le=5.0)]] = Field(default_factory=lambda: [0.0, 1.0], min_length=1)
    rounds: Annotated[int, Field(ge=2)] = Field(3, description="interleaved repeats (A B A B ...)")
    dtype: DType = Field("bfloat16", description="dtype of the timed runs; equality is always checked in fp32")
    equality_prompts: PositiveInt = Field(8, description="prompts of the fp32 greedy equality check")


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


class FlowConfig(Section):
    """How the flow runs the steps."""

    step_timeout_s: PositiveInt = Field(6 * 3600, description="a step that runs longer is ended, with its children")
    retries: Annotated[int, Field(ge=0, le=10)] = Field(1, description="retries of a step that crashed (not of a refused one)")
    min_free_gib: Annotated[float, Field(ge=0.0)] = Field(4.0, description="free disk that the run asks for before it starts")


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
    bundle: BundleConfig = Field(default_factory=BundleConfig)
    register_: RegisterConfig = Field(default_factory=RegisterConfig, alias="register")
    flow: FlowConfig = Field(default_factory=FlowConfig)

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


def project_root(start: Path | None = None) -> Path:
    """Return the nearest folder at or above `start` (default: the working directory) that holds params.yaml.

    Raises ConfigError when there is none.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise ConfigError(f"no params.yaml in {here} or above it; run from the project's folder or give --root")


def load_config(root: Path, profile: str = "default", overrides: tuple[str, ...] | list[str] = ()) -> Config:
    """Read params.yaml, lay the profile and the `section.key=value` overrides over it, validate.

    `profile` is 'default', the name of a file in profiles/, or the path of a YAML file.
    Raises ConfigError (one line) for an unreadable file, an unknown key, a wrong type or a value out of bounds.
    """
    origin: dict[tuple[str, ...], str] = {}
    merged: dict[str, Any] = {}
    _overlay(merged, _read_yaml(root / "params.yaml"), "params.yaml", origin)
    if profile != "default":
        path = _profile_path(root, profile)
        name = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
        _overlay(merged, _read_yaml(path), name, origin)
    for item in overrides:
        _overlay(merged, _parse_override(item), f"--set {item}", origin)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def _profile_path(root: Path, profile: str) -> Path:
    named = root / "profiles" / f"{profile}.yaml"
    if named.is_file():
        return named
    if profile.endswith((".yaml", ".yml")) and Path(profile).is_file():
        return Path(profile).resolve()
    names = ["default", *sorted(p.stem for p in (root / "profiles").glob("*.yaml"))]
    raise ConfigError(f"no profile '{profile}'{closest(profile, names)}; profiles here: {', '.join(names)}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except (ValueError, RecursionError) as error:  # a date that does not exist, a hexadecimal number without digits, nesting
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of sections, not a {type(content).__name__}")
    return content


def _parse_override(item: str) -> dict[str, Any]:
    key, sep, text = item.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not sep or not all(parts):
        raise ConfigError(f"--set {item}: must be section.key=value, for example --set distill.learning_rate=1e-3")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--set {item}: the value is not valid YAML") from None
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    nested: Any = value
    for part in reversed(parts):
        nested = {part: nested}
    return dict(nested)


def _overlay(
    base: dict[str, Any], extra: dict[str, Any], name: str, origin: dict[tuple[str, ...], str], at: tuple[str, ...] = ()
) -> None:
    """Merge `extra` into `base` in place, mappings key by key, and remember which file each key came from."""
    if len(at) > 8:  # deeper than any section; an alias that holds itself has no end
        raise ConfigError(f"{name}: '{'.'.join(at[:3])}...' is nested too deep")
    for raw, value in extra.items():
        key = str(raw)
        path = (*at, key)
        origin[path] = name
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _overlay(base[key], value, name, origin, path)
        elif isinstance(value, dict):
            base[key] = {}
            _overlay(base[key], value, name, origin, path)
        else:
            base[key] = value


def _explain(error: ValidationError, origin: dict[tuple[str, ...], str]) -> str:
    problem = error.errors(include_url=False)[0]
    loc = tuple(str(part) for part in problem["loc"])
    source = next((origin[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in origin), "params.yaml")
    key = ".".join(loc) or "(top level)"
    more = f"; {error.error_count() - 1} more" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        valid = _keys_at(loc[:-1])
        parent = ".".join(loc[:-1])
        near = closest(loc[-1], valid) or f" (valid: {', '.join(sorted(valid))})"
        near = near.replace("closest: '", f"closest: '{parent}." if parent else "closest: '")
        return f"{source}: unknown key '{key}'{near}{more}"
    text = problem["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(problem.get("input"), dict | BaseModel) else f", got {problem.get('input')!r}"
    return f"{source}: {key}: {text[0].lower()}{text[1:]}{shown}{more}"


def _keys_at(path: tuple[str, ...]) -> list[str]:
    model: Any = Config
    for part in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
        fields = {(f.alias or n): f for n, f in model.model_fields.items()}
        if part not in fields:
            continue  # a list index
        annotation = fields[part].annotation
        args = getattr(annotation, "__args__", ())
        candidates = [annotation, *args]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return [f.alias or n for n, f in model.model_fields.items()]
