"""What a draft is and how it is trained: data, network, the two stages, rivals, ablations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eagle.config.base import Fraction, PositiveInt, Section


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
    patience: PositiveInt | None = Field(
        4, description="validations in a row without a gain of flat_gain that end a stage; null = train to the end"
    )
    flat_gain: Annotated[float, Field(ge=0.0, le=1.0)] = Field(0.005, description="acceptance length that counts as a gain")
    checkpoint_every: PositiveInt = Field(50, description="optimiser steps between checkpoints")


class PolicyConfig(Section):
    """Stage 2: policy gradient of the expected accepted length."""

    method: Literal["exact", "group", "naive"] = Field(
        "exact",
        description="exact gradient; group = REINFORCE over sampled drafts; naive = accept bits taken as a given reward, which is "
        "biased at temperature > 0: for ablations only",
    )
    path: Literal["drafts", "answers"] = Field(
        "drafts",
        description="exact: drafts = rounds along drafts sampled from q, judged by the target; answers = along the target's own "
        "answers at temperatures 0 and 1, without the target",
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
        if self.path == "answers":
            if self.method != "exact":
                raise ValueError(f"path answers needs method exact, not {self.method}: no draft is sampled there")
            other = [share.temperature for share in self.temperatures if share.temperature not in (0.0, 1.0)]
            if other:
                raise ValueError(f"path answers knows the target's probabilities at temperatures 0 and 1, not {other[0]:g}")
        if self.method != "exact" and self.baseline == "leave_one_out" and self.group_size < 2:
            raise ValueError("group_size 1 leaves no other draft for baseline leave_one_out; use adjacent, or 2 and more drafts")
        return self


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
