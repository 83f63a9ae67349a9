"""What issue 3's figures are measured on: a finished run (draft, data set, tuned settings) and how much is measured of it.

The run is that of the profile `full`, under build/figures-full, made by `make run` when it is not there.
FIGURES_PROFILE (make's PROFILE) names another profile; FIGURES_RUN gives the folder of a finished run instead. Results
name the profile that the draft was trained with, never a folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
from transformers import PreTrainedModel

from benchmarks.figures import ROOT, Measured
from benchmarks.spine import MT_BENCH, STATE
from eagle import manifest
from eagle.bench.compare import find_sources
from eagle.bench.methods import Lab, Sources
from eagle.bench.session import Session, make_lab, read_tuned
from eagle.bench.suites import Suite, load_suite
from eagle.bench.workload import Workload
from eagle.config import Config, Method
from eagle.draft.io import read_spec
from eagle.errors import ConfigError
from eagle.profiles import load_config
from eagle.progress import say
from eagle.target.load import ensure_target, load_target, load_tokenizer, pick_device, setup_torch, target_dims
from eagle.target.template import render_prompt

WANTED = "full"  # the profile that the bounds are stated for
K_MAX = 8
FIXED_K = 3


@dataclass(frozen=True)
class Effort:
    """How much is measured. The defaults are those of the committed figures, the tests take less.

    `pairs`: interleaved turns of every timing. `turn_prompts`: prompts of one timed run at small batches (a large batch
    takes one prompt a request). `new_tokens`: of a timed answer at batch 1; `batch_tokens`: the mean over all batch sizes.
    `batches`: of F3.6; the largest is also that of F3.1, F3.3, F3.10, F3.11 and F3.12.
    F3.1: `equality_prompts` in all, `equality_tokens` each, at the largest batch; `option_prompts` of them for variants
    of a method; at batch 1 `single_prompts` of them for everything but eagle31.
    F3.3: `samples` requests of `sample_tokens` tokens. F3.7: `traces`, (suite, batch, prompts) of each recorded stream; F3.8:
    `kind_prompts` prompts a kind; both with `trace_tokens` tokens an answer.
    """

    pairs: int = 5
    turn_prompts: int = 4
    new_tokens: int = 96
    batch_tokens: int = 48
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    equality_prompts: int = 200
    equality_tokens: int = 20
    option_prompts: int = 48
    single_prompts: int = 8
    samples: int = 25_000
    sample_tokens: int = 4
    traces: tuple[tuple[str, int, int], ...] = (
        ("default", 1, 24), ("heldout", 1, 24), ("mixed", 1, 24), ("heldout", 8, 48), ("heldout", 32, 96),
    )  # fmt: skip
    kind_prompts: int = 8
    trace_tokens: int = 48


@dataclass(frozen=True)
class Run:
    """A finished run under `base` of the project at `root`; `profile`: the name of the one it was made with."""

    root: Path
    base: Path
    profile: str
    config: Config
    effort: Effort = field(default_factory=Effort)
    mt_bench: Path = MT_BENCH
    overrides: tuple[str, ...] = ()

    @property
    def target(self) -> Path:
        """The target's folder; made if missing."""
        return ensure_target(self.config.target, self.root, self.root / self.config.paths.cache)

    @property
    def sources(self) -> Sources:
        """The run's drafts."""
        return find_sources(self.base)

    @property
    def tuned(self) -> dict[str, Any]:
        """What its tune step found: threads, dtype, form of the draft's step."""
        return read_tuned(self.base / "tune")

    @property
    def seed(self) -> int:
        """The seed of all random streams."""
        return self.config.runtime.seed

    @property
    def methods(self) -> list[Method]:
        """All methods that the run has drafts for, `none` first."""
        return [method for method in get_args(Method) if self.sources.available(method)]

    @property
    def draft_layers(self) -> int:
        """Layers of the run's draft."""
        return read_spec(self.sources.policy / "draft").num_layers

    @property
    def stops(self) -> frozenset[int]:
        """The target's stop tokens."""
        return frozenset(target_dims(self.target).eos_token_ids)

    def suite(self, name: str, count: int | None = None) -> Suite:
        """Up to `count` prompts of a suite (see `eagle.bench.suites`)."""
        return load_suite(
            name, root=self.root, render=partial(render_prompt, load_tokenizer(self.target)), count=count,
            max_prompt_tokens=self.config.dataset.max_prompt_tokens, dataset=self.base / "dataset",
        )  # fmt: skip

    def lab(self, work: Workload, *, batch: int, new_tokens: int, dtype: str | None = None) -> Lab:
        """The engines of all methods, set up as the bench does. `dtype`: None = the tuned one and the tuned draft step."""
        device, tuned = pick_device(self.config.runtime.device), self.tuned
        setup_torch(tuned["threads"] if device == "cpu" else self.config.runtime.threads, self.seed)
        changes = {"methods": self.methods, "max_new_tokens": new_tokens, "draft_tokens": [FIXED_K], "max_draft_tokens": K_MAX}
        config = self.config.model_copy(update={"bench": self.config.bench.model_copy(update=changes)})
        session = Session(config, self.target, self.sources, tuned, work)
        return make_lab(session, dtype or tuned["dtype"], device, batch, dtype is None and tuned["draft_step"] == "compiled")

    def transformers(self, lab: Lab) -> PreTrainedModel:
        """The target as transformers loads and runs it, in the lab's dtype: the engine's own is laid out for decoding."""
        model = lab.plain.target
        dtype = str(model.dtype).removeprefix("torch.")
        return load_target(self.target, dtype, str(model.device), trust_remote_code=self.config.target.trust_remote_code)

    def setting(self, lab: Lab, **more: Any) -> dict[str, Any]:
        """What the numbers depend on beside the machine: the first entry of a figure's runs."""
        return {
            "dtype": str(lab.plain.target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "draft_step": self.tuned["draft_step"],
            "busy_percent": psutil.cpu_percent(interval=0.3),
            **more,
        }

    def measured(self, value: float | None, runs: list[Any], *notes: str | None) -> Measured:
        """Return a result with the draft's profile, and in its note whether that is not the one the bound is for."""
        said = [note for note in notes if note]
        if self.profile != WANTED:
            said.append(f"the draft is that of the profile '{self.profile}', not '{WANTED}'")
        if self.overrides:
            said.append("trained with settings of its own: trained_with in the runs")
            runs = [*runs, {"trained_with": list(self.overrides)}]
        return Measured(value, runs, "; ".join(said) or None, profile=self.profile)


def join(works: Sequence[Workload]) -> Workload:
    """Return the prompts of several workloads one after the other."""
    prompts = [prompt for work in works for prompt in work.prompts]
    return Workload(prompts, [name for work in works for name in work.ids], [kind for work in works for kind in work.kinds])


def find_run() -> Run:
    """Return the run that FIGURES_RUN names, or that of the profile, made first if it is not there. Exits on a bad folder."""
    given = os.environ.get("FIGURES_RUN")
    if not given:
        return _profile_run(os.environ.get("FIGURES_PROFILE") or WANTED)
    base = Path(given).resolve()
    missing = [name for name in ("dataset", "policy", "tune") if manifest.read_manifest(base / name) is None]
    if missing:
        sys.exit(f"error: FIGURES_RUN={given}: no finished step {', '.join(missing)} there; give a folder that `make run` wrote")
    profile, overrides = _made_with(base)
    try:
        config = load_config(ROOT, profile, overrides)
    except ConfigError as error:
        sys.exit(f"error: FIGURES_RUN={given}: the settings it was made with cannot be read here: {error}")
    return Run(ROOT, base, Path(profile).stem, config, overrides=tuple(overrides))


def _made_with(base: Path) -> tuple[str, list[str]]:
    """Return the profile and the overrides (but for places) in the command line that trained the draft of a run."""
    argv: list[str] = manifest.read_json(base / "policy.provenance.json")["argv"]
    pairs = list(zip(argv, argv[1:], strict=False))
    profile = next((value for name, value in pairs if name in ("--profile", "-p")), "default")
    said = {value.partition("=")[0]: value for name, value in pairs if name in ("--set", "-s")}  # the last one of a key counts
    return profile, [value for key, value in said.items() if not key.startswith("paths.")]


def _profile_run(profile: str) -> Run:
    name = Path(profile).stem
    state = STATE if name == "default" else ROOT / "build" / f"figures-{name}"  # F1.x have the default profile's run
    overrides = [f"paths.{place}={(state / place).relative_to(ROOT).as_posix()}" for place in ("runs", "cache", "state")]
    config = load_config(ROOT, profile, overrides)
    base = state / "runs" / name
    if not (base / "register" / manifest.MANIFEST).is_file():
        state.mkdir(parents=True, exist_ok=True)
        log = state / "make-run.log"
        say(f"figures: no finished run of the profile '{name}'; making it now (log: {log})")
        said = " ".join(f"--set {item}" for item in overrides)
        with log.open("w", encoding="utf-8") as stream:
            done = subprocess.run(
                ["make", "run", f"PROFILE={profile}", f"ARGS={said}"],  # noqa: S607
                cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        if done.returncode:
            sys.exit(f"error: make run ended with {done.returncode}; its output: {log}")
    return Run(ROOT, base, name, config)
