"""The single source of configuration: keys, types, defaults, bounds and help. `eagle.profiles` reads it from files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DType = Literal["float32", "bfloat16"]
Method = Literal[
    "none",
    "ngram",
    "lookahead",
    "medusa",
    "eagle2",
    "eagle31-distilled",
    "eagle31",
    "eagle31-tree",
    "eagle31-drawn",
    "eagle31-pid",
    "eagle31-chunks",
]
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
    replay_from: str | None = Field(
        None, min_length=1, description="dataset folder of another run whose training rows are mixed in; null = none"
    )
    replay_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.3, description="share of the training rows that comes from replay_from"
    )


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

    warm_start: str | None = Field(
        None, min_length=1, description="draft to go on from: a folder, models:/NAME@champion or models:/NAME/3; null = a fresh one"
    )
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
    objective: Literal[
        "soft_cross_entropy", "forward_kl", "total_variation", "negative_log_overlap", "lk_hybrid", "dpace"
    ] = Field("soft_cross_entropy", description="what stage 1 minimises; formulas and sources: eagle/train/objectives.py")
    lk_eta: Annotated[float, Field(ge=0.0, le=100.0)] = Field(3.0, description="lk_hybrid: KL's weight is exp(-eta overlap)")
    dpace_smoothing: Fraction = Field(0.5, description="dpace: a of its weights; 0 = expected accepted length itself")
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="weight of training-time-test step k is decay^k (dpace has its own weights)"
    )
    head_rows: PositiveInt = Field(
        8192, description="logits of at most this many positions are held at once; more are made again for the gradient"
    )
    top_k: Annotated[int, Field(ge=1, le=1024)] = Field(32, description="target probabilities kept per position")
    autocast: bool = Field(True, description="bf16 matrix products; losses and norms stay fp32")
    init_from_target: bool = Field(True, description="head rows and final norm start from the target's")
    output_init_scale: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.3, description="scale of o_proj and down_proj at start")
    eval_every: PositiveInt = Field(100, description="optimiser steps between validations")
    eval_sequences: PositiveInt = Field(64, description="held-out sequences per validation")
    eval_tokens: Annotated[int, Field(ge=1, le=16)] = Field(3, description="draft tokens K of the measured acceptance length")
    checkpoint_every: PositiveInt = Field(50, description="optimiser steps between checkpoints")


class PolicyConfig(Section):
    """Stage 2: policy gradient of the expected accepted length."""

    method: Literal["exact", "group", "naive"] = Field(
        "exact",
        description="exact gradient; group = REINFORCE over sampled drafts; naive = accept bits taken as a given reward, which is "
        "biased at temperature > 0: for ablations only",
    )
    group_size: Annotated[int, Field(ge=1, le=64)] = Field(4, description="group, naive: sampled drafts per anchor")
    baseline: Literal["leave_one_out", "adjacent", "reference"] = Field(
        "leave_one_out", description="group, naive: other drafts of the anchor, the neighbouring anchors', or the stage-1 draft's"
    )
    clip_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.2, description="group, naive: PPO's bound of q / q_old - 1")
    updates: Annotated[int, Field(ge=1, le=16)] = Field(1, description="group, naive: optimiser updates on the same rollouts")
    token_cost: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="accepted tokens that a proposed one costs; acts at temperature > 0, where a draft may end its text early"
    )
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

    @model_validator(mode="after")
    def _sampled(self) -> PolicyConfig:
        if self.method == "exact" and self.updates > 1:
            raise ValueError(f"updates ({self.updates}) above 1 need method group or naive: the exact gradient holds for one only")
        if self.method != "exact" and self.baseline == "leave_one_out" and self.group_size < 2:
            raise ValueError("group_size 1 leaves no other draft for baseline leave_one_out; use adjacent, or 2 and more drafts")
        return self


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


class RivalsConfig(Section):
    """Our implementations of rival drafts, trained by hand for the comparison: `eagle step rivals`. The rest is as in distill."""

    medusa_heads: Annotated[int, Field(ge=1, le=8)] = Field(4, description="heads, one further token each")
    medusa_nodes: Annotated[int, Field(ge=1, le=64)] = Field(16, description="nodes of the tree that the heads' tokens form")
    medusa_steps: PositiveInt = Field(1200, description="optimiser steps")
    medusa_minutes: Annotated[float, Field(gt=0.0)] = Field(9.0, description="budget of training time, as distill.max_minutes")
    medusa_learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-3
    eagle2_steps: PositiveInt = Field(1200, description="optimiser steps")
    eagle2_minutes: Annotated[float, Field(gt=0.0)] = Field(9.0, description="budget of training time, as distill.max_minutes")
    eagle2_feature_weight: Annotated[float, Field(ge=0.0)] = Field(
        10.0, description="weight of the distance between the draft's and the target's states; the cross-entropy's is 1"
    )


class AblateConfig(Section):
    """`eagle ablate`: training methods side by side, with seeds."""

    seeds: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(
        default_factory=lambda: [0, 1, 2], min_length=1, description="every arm is trained once per seed, compared seed by seed"
    )
    minutes: Annotated[float, Field(gt=0.0)] = Field(
        3.0, description="training time of what follows stage 1, the same for every arm; stage 1 itself: distill.max_minutes"
    )
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = Field(2e-4, description="peak rate of what follows stage 1, all arms")
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = Field(4, description="K of training in stage 2 and of the evaluation")
    sequences: PositiveInt = Field(128, description="held-out sequences of the evaluation, at each temperature")
    prompts: PositiveInt = Field(16, description="held-out prompts counted by vLLM (--vllm)")


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


class ServeConfig(Section):
    """`eagle serve`: the server, and who sets the draft length in it."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 = every one of this machine's")
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    control: Literal["pid", "schedule", "fixed"] = Field(
        "pid", description="draft length: the controller, vLLM's own table of measured lengths by batch size, or one length"
    )
    max_draft_tokens: Annotated[int, Field(ge=1, le=16)] = Field(5, description="largest draft length of the controller")
    stop_timeout_s: Annotated[float, Field(ge=0.0, le=3600.0)] = Field(10.0, description="seconds before vLLM is killed at the end")


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
