"""The table of steps, and the one way to run a step.

A step reads its config sections and input folders and writes one output folder. It knows nothing of who
called it: the flow, DVC and a person at a shell all run `eagle step NAME --dir BASE`, which reads
BASE/<input>/ and writes BASE/NAME/. The step writes into BASE/NAME.partial, which is renamed at the end.
BASE/NAME.work keeps checkpoints across a crash and is removed when the step is complete.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from filelock import Timeout

from eagle import manifest
from eagle.config import Config, DistillConfig
from eagle.errors import BusyError, ConfigError, StepFailed, closest
from eagle.locks import holder, is_held, owned_lock, owner_of, this_process
from eagle.progress import say
from eagle.target.resolve import target_fingerprint
from eagle.train.warm_source import is_alias, source_hash

CODE_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class StepContext:
    """What a step gets. `out` is the folder to fill; `work` keeps checkpoints and survives a crash."""

    config: Config
    root: Path
    inputs: dict[str, Path]
    out: Path
    work: Path

    @property
    def cache(self) -> Path:
        """The cache folder (converted targets, target features), made if missing."""
        folder = self.root / self.config.paths.cache
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class StepFunction(Protocol):
    """Fills `context.out` and returns the step's metrics (finite JSON), written to metrics.json by the runner."""

    def __call__(self, context: StepContext) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Step:
    """One row of the table: where the function is and what its key is made of."""

    name: str
    function: str
    sections: tuple[str, ...]  # "section" or "section.key"
    inputs: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    reads_prompts: bool = False
    warm_starts: bool = False

    def load(self) -> StepFunction:
        """Import and return the step's function (only now: a step that is up to date never imports torch)."""
        module, _, name = self.function.partition(":")
        function: StepFunction = getattr(importlib.import_module(module), name)
        return function


_MODEL = ("eagle/draft", "eagle/target", "kernels")
_ROWS = "eagle/dataset/read.py"
_TUNE = tuple(
    f"eagle/bench/{name}.py"
    for name in ("tune", "launches", "launch_report", "draft_forms", "profiling", "kernel_tuning", "direct_tuning")
)
_TRAIN = (
    *_MODEL,
    _ROWS,
    *(
        f"eagle/train/{name}.py"
        for name in ("batches", "checkpoint", "features", "objectives", "schedule", "supervised", "validate")
    ),
)
_POLICY_CODE = ("distill", "rollout", "visits", "group", "reward", "reference", "policy")
_POLICY_READS = ("distill.top_k", "distill.autocast", "distill.betas", "distill.min_learning_rate_ratio")
# what the rivals do not share with the draft
_DISTILL_ONLY = ("warm_start", "stages", "max_minutes", "objective", "lk_eta", "dpace_smoothing", "step_decay", "head_rows")
_RIVALS_READ = tuple(f"distill.{key}" for key in DistillConfig.model_fields if key not in _DISTILL_ONLY)

# fmt: off
STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        Step("dataset", "eagle.dataset.step:run", ("target", "dataset", "vllm.max_num_seqs"), (),
             ("eagle/dataset", "eagle/target"), reads_prompts=True),
        Step("distill", "eagle.train.distill:run", ("target", "draft", "distill"), ("dataset",),
             (*_TRAIN, "eagle/train/distill.py", "eagle/train/warm.py", "eagle/train/warm_source.py"), warm_starts=True),
        Step("policy", "eagle.train.policy:run", ("target", "policy", *_POLICY_READS), ("dataset", "distill"),
             (*_TRAIN, *(f"eagle/train/{name}.py" for name in _POLICY_CODE))),
        Step("tune", "eagle.bench.tune:run", ("target", "tune"), ("policy",),
             (*_TUNE, "eagle/decode", *_MODEL)),
        Step("bench", "eagle.bench.step:run", ("target", "bench", "control"), ("dataset", "policy", "tune"),
             ("eagle/bench", "eagle/decode", _ROWS, *_MODEL)),
        Step("bundle", "eagle.bundle.step:run", ("target", "vllm", "bundle"), ("dataset", "policy", "tune", "bench"),
             ("eagle/bundle", "eagle/bench/measure.py", "eagle/decode", "eagle/serve", _ROWS, *_MODEL)),
        Step("register", "eagle.registry.step:run", ("target", "register"), ("dataset", "distill", "policy", "bench", "bundle"),
             ("eagle/registry", "eagle/bundle", "eagle/serve", "eagle/target")),
    )
}
# Run by hand only (`eagle step NAME --dir RUN`): not in the flow, the plan or dvc.yaml.
OPTIONAL_STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        Step("rivals", "eagle.train.rivals:run", ("target", "draft.vocab_size", "rivals", *_RIVALS_READ), ("dataset",),
             (*_TRAIN, "eagle/train/distill.py", "eagle/train/medusa.py", "eagle/train/rivals.py", "eagle/decode/medusa.py")),
    )
}
# fmt: on


@dataclass(frozen=True)
class Status:
    """Whether a step's folder is up to date, and if not, why."""

    up_to_date: bool
    reason: str
    parts: dict[str, Any] = field(repr=False)


def get_step(name: str) -> Step:
    """Return the step called `name`, of the flow or by hand; ConfigError names the closest one when there is none."""
    table = STEPS | OPTIONAL_STEPS
    if name not in table:
        raise ConfigError(
            f"no step '{name}'{closest(name, table)}; steps: {', '.join(STEPS)}; by hand only: {', '.join(OPTIONAL_STEPS)}"
        )
    return table[name]


def key_parts(step: Step, config: Config, root: Path, base: Path) -> dict[str, Any]:
    """Return the material of the step's key: seed, config sections, input contents, code, outside files."""
    dumped = config.model_dump(mode="json", by_alias=True)
    inputs = {}
    for name in step.inputs:
        found = manifest.read_manifest(base / name)
        inputs[name] = found["content_hash"] if found else "missing"
    extra: dict[str, str] = {"target": target_fingerprint(config.target, root, root / config.paths.cache)}
    if step.reads_prompts:
        shipped = {f"prompts:{p.name}": p for p in sorted((root / "data" / "prompts").glob("*.jsonl"))}
        given = {f"prompts:{name}": root / name for name in config.dataset.prompt_files}
        for label, path in (shipped | given).items():
            extra[label] = manifest.hash_file(path) if path.is_file() else "missing"
        if config.dataset.replay_from:
            replayed = manifest.read_manifest(root / config.dataset.replay_from)
            extra["replay_from"] = replayed["content_hash"] if replayed else "missing"
    if step.warm_starts and config.distill.warm_start:
        extra[WARM_START] = source_hash(config, root)
    return {
        "seed": config.runtime.seed,
        "config": {name: _at(dumped, name) for name in step.sections},
        "inputs": inputs,
        "code": manifest.hash_sources(CODE_ROOT, step.code),
        "extra": extra,
    }


WORK_KEY = "key.json"
WARM_START = "warm_start"


def status(step: Step, config: Config, root: Path, base: Path) -> Status:
    """Compare the folder's manifest with what a run would be made of now. Reads hashes, imports nothing heavy."""
    parts = key_parts(step, config, root, base)
    found = manifest.read_manifest(base / step.name)
    if found and is_alias(config.distill.warm_start):
        parts = _with_former_start(found["parts"], parts)
    if found is None:
        work = base / f"{step.name}.work"
        if _work_key(work) != manifest.hash_json(parts):
            return Status(False, "not made yet", parts)
        lock = base / f"{step.name}.lock"
        if is_held(lock) and owner_of(lock) != this_process():
            return Status(False, f"{holder(lock)} is at work on it", parts)
        kept = any(path.name != WORK_KEY for path in work.iterdir())
        return Status(False, "interrupted, will resume" if kept else "interrupted, nothing to resume from yet", parts)
    if found["key"] == manifest.hash_json(parts):
        gone = manifest.missing_file(base / step.name, found)
        return Status(gone is None, f"file changed or gone: {gone}" if gone else "up to date", parts)
    return Status(False, _difference(found["parts"], parts), parts)


def _with_former_start(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the parts with the warm start of the finished folder when nothing else is new.

    A run that becomes champion moves the alias that it started from: that alone must not train it again.
    """
    if WARM_START not in new["extra"] or WARM_START not in old.get("extra", {}):
        return new
    kept = {**new, "extra": {**new["extra"], WARM_START: old["extra"][WARM_START]}}
    return kept if kept == old else new


def _at(config: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        config = config[part]
    return config


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    if old.get("seed") != new["seed"]:
        return f"seed {old.get('seed')} -> {new['seed']}"
    changed = _first_change(old.get("config", {}), new["config"])
    if changed:
        return f"config {changed}"
    for name, value in new["inputs"].items():
        if old.get("inputs", {}).get(name) != value:
            return f"input {name} {'is missing' if value == 'missing' else 'changed'}"
    for name, value in new["extra"].items():
        if old.get("extra", {}).get(name) != value:
            return f"{name} changed"
    return "code changed" if old.get("code") != new["code"] else "inputs changed"


def _first_change(old: Any, new: Any, at: str = "") -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            found = _first_change(old.get(key), new.get(key), f"{at}.{key}" if at else key)
            if found:
                return found
        return None
    return None if old == new else f"{at}: {old!r} -> {new!r}"


def run_step(name: str, config: Config, root: Path, base: Path, *, force: bool = False) -> bool:
    """Bring BASE/NAME up to date. Returns True when the step ran, False when it was up to date.

    Raises BusyError when another process is at the same folder, StepFailed when an input is missing,
    and whatever EagleError the step itself raises; nothing half-written is left under BASE/NAME.
    """
    step = get_step(name)
    base.mkdir(parents=True, exist_ok=True)
    try:
        with owned_lock(base / f"{name}.lock"):
            mend(base, name)
            now = status(step, config, root, base)
            if now.up_to_date and not force:
                say(f"{name}: up to date")
                return False
            for needed in step.inputs:
                if now.parts["inputs"][needed] == "missing":
                    raise StepFailed(f"step {name}: input '{needed}' is missing in {base}; run: eagle step {needed} --dir {base}")
            say(f"{name}: {now.reason}")
            inputs = {n: base / n for n in step.inputs}
            produce(base, name, now.parts, root, lambda out, work: step.load()(StepContext(config, root, inputs, out, work)))
            return True
    except Timeout:
        lock = base / f"{name}.lock"
        raise BusyError(f"step {name}: {holder(lock)} is at work in {base} (lock {lock.name}); wait for it or stop it") from None


def mend(base: Path, name: str) -> None:
    """Bring BASE/NAME back where a crash came between the two renames that replace it. Call it under the folder's lock."""
    old, final = base / f"{name}.old", base / name
    if old.is_dir() and not final.exists():
        old.rename(final)


def produce(base: Path, name: str, parts: dict[str, Any], root: Path, make: Callable[[Path, Path], dict[str, Any]]) -> None:
    """Fill BASE/NAME by `make`(out, work), which returns the metrics; call it under the folder's lock.

    `out` appears as BASE/NAME when all is written, with metrics.json and the manifest of `parts`. `work` is
    BASE/NAME.work: it survives a crash and is handed to the next call with the same `parts`.
    """
    final, partial, old = base / name, base / f"{name}.partial", base / f"{name}.old"
    began = time.monotonic()
    work = _work_folder(base, name, parts)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    manifest.write_json(partial / manifest.METRICS, make(partial, work))
    manifest.write_manifest(partial, name, parts)
    _publish(partial, final, old)
    shutil.rmtree(work, ignore_errors=True)
    manifest.write_provenance(final, root, time.monotonic() - began)
    say(f"{name}: done in {time.monotonic() - began:.0f} s -> {final}")


def _work_folder(base: Path, name: str, parts: dict[str, Any]) -> Path:
    """Return BASE/NAME.work; what it holds is kept only if it was made for the same key."""
    work = base / f"{name}.work"
    key = manifest.hash_json(parts)
    if _work_key(work) != key:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        manifest.write_json(work / WORK_KEY, key)
    return work


def _work_key(work: Path) -> Any:
    """Return the key that a work folder was made for, None when it says none."""
    try:
        return manifest.read_json(work / WORK_KEY)
    except (OSError, ValueError):
        return None


def _publish(partial: Path, final: Path, old: Path) -> None:
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
