"""`eagle ablate`: trains and measures every arm with every seed, one folder each, and writes one table.

OUT/<arm>/seed-<s>/train and .../eval (and .../vllm) each appear complete, with a manifest; what is complete and made of the
same data, settings and code is not made again, and an interrupted training goes on from its checkpoint. The table is
written after every seed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout

from eagle import manifest
from eagle.ablate import report
from eagle.ablate.arms import ARMS, REFERENCE, Arm, arm_config, needed, same_as_reference
from eagle.ablate.report import Result
from eagle.config import Config
from eagle.errors import BusyError, ConfigError, StepFailed
from eagle.locks import owned_lock
from eagle.progress import say
from eagle.steps import CODE_ROOT, StepContext, mend, produce
from eagle.target.resolve import target_fingerprint
from eagle.target.vllm import require_vllm

_CODE = ("eagle/train", "eagle/draft", "eagle/target", "kernels", "eagle/dataset/read.py")
_EVAL_CODE = (*_CODE, "eagle/ablate/evaluate.py")


@dataclass(frozen=True)
class Ablation:
    """What to do where. `base` holds the dataset step's folder; `out` takes the arms; `said` is the command's beginning.

    `start`: the folder of a finished stage 1 that every arm and seed goes on from, instead of training its own.
    """

    config: Config
    root: Path
    base: Path
    out: Path
    said: tuple[str, ...] = ("eagle",)
    vllm: bool = False
    start: Path | None = None

    @property
    def dataset(self) -> Path:
        """The data set's folder."""
        return self.base / "dataset"


def ablate(what: Ablation, arms: Sequence[Arm]) -> str:
    """Train and measure `arms` with ablate.seeds; returns the table, which is in `what.out` as ablate.json and ablate.md.

    Raises StepFailed without a finished data set, ConfigError for an output path that is a file or for a seed given twice,
    BusyError when another ablation is at work in the folder, PreflightError when vLLM is to count and is not found.
    """
    config = what.config
    seeds = config.ablate.seeds
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"ablate.seeds: {seeds} names a seed twice; a repeated seed is no further evidence")
    if what.out.exists() and not what.out.is_dir():
        raise ConfigError(f"--out {what.out}: it is a file; name a folder")
    if manifest.read_manifest(what.dataset) is None:
        again = f"eagle step dataset --dir {shlex.quote(str(what.base))}"
        raise StepFailed(f"ablate: no finished data set in {what.base}; run: {again}")
    if what.vllm:
        require_vllm(config.vllm, what.root)
    if what.start is not None:
        _check_start(what.start, arms)
    own = [arm for arm in arms if not same_as_reference(arm, config) or arm.name == REFERENCE]
    aliases = [arm for arm in arms if arm not in own]
    work = needed([*own, *([ARMS[REFERENCE]] if aliases else [])])
    scratch = 0 if what.start else sum(arm.phase == "scratch" for arm in work)
    phases = sum(arm.phase != "scratch" for arm in work)
    minutes = len(seeds) * (scratch * config.distill.max_minutes + phases * config.ablate.minutes)
    say(f"ablate: {len(work)} arms x {len(seeds)} seeds, at most {minutes:.0f} minutes of training")
    what.out.mkdir(parents=True, exist_ok=True)
    commands = {arm.name: command(what, arm) for arm in arms}
    results: dict[str, dict[int, Result]] = {arm.name: {} for arm in [*work, *arms]}
    try:
        with owned_lock(what.out / "ablate.lock"):
            for seed in seeds:
                for arm in work:
                    results[arm.name][seed] = _one(what, arm, seed, measured=arm in arms or arm.name == REFERENCE)
                for alias in aliases:
                    results[alias.name][seed] = results[REFERENCE][seed]
                text = report.write(what.out, report.build(arms, results, commands, config, given=what.start is not None))
    except Timeout:
        raise BusyError(f"{what.out}: another ablation is at work there; wait for it, or name another folder with --out") from None
    return text


def command(what: Ablation, arm: Arm) -> str:
    """Return the command that makes the row of `arm` (and of what it is compared with)."""
    names = [arm.name] if arm.name in (REFERENCE, "stage1") else [REFERENCE, arm.name]
    about = what.config.ablate
    parts = [
        *what.said, "ablate", "--dir", str(what.base), "--out", str(what.out), "--arms", ",".join(names),
        "--seeds", ",".join(map(str, about.seeds)), "--minutes", f"{about.minutes:g}", *(["--vllm"] if what.vllm else []),
        *(["--from", str(what.start)] if what.start else []),
    ]
    return shlex.join(parts)


def _one(what: Ablation, arm: Arm, seed: int, *, measured: bool) -> Result:
    folder, config = _place(what, arm.name, seed), arm_config(arm, what.config, seed)
    if what.start is not None and arm.phase == "scratch":
        trained: dict[str, Any] = manifest.read_json(what.start / manifest.METRICS)
        return Result(trained, _measure(what, folder, config, what.start) if measured else {})
    inputs = {"dataset": what.dataset}
    if arm.base:
        inputs["distill"] = what.start or _place(what, arm.base, seed) / "train"
    parts = _parts(config, inputs, ("target", "draft", "distill", *(["policy"] if arm.phase == "policy" else [])), what, _CODE)

    def make(out: Path, work: Path) -> dict[str, Any]:
        from eagle.ablate.training import train  # torch is not imported when everything is up to date

        say(f"ablate: {arm.name}, seed {seed}: {arm.title}")
        return train(arm, StepContext(config, what.root, inputs, out, work))

    trained = _ensure(folder, "train", parts, what.root, make)
    return Result(trained, _measure(what, folder, config, folder / "train") if measured else {})


def _check_start(start: Path, arms: Sequence[Arm]) -> None:
    """Raise StepFailed when `start` is no finished stage 1, ConfigError for arms whose drafts have another shape."""
    if manifest.read_manifest(start) is None or not (start / "draft").is_dir():
        raise StepFailed(f"--from {start}: no finished stage 1 there; name a run's folder 'distill'")
    shaped = [arm.name for arm in arms if arm.base not in (None, "stage1") or (arm.phase == "scratch" and arm.name != "stage1")]
    if shaped:
        raise ConfigError(f"--from: {', '.join(shaped)} cannot go on from a draft of another shape; leave out the arm or --from")


def _measure(what: Ablation, folder: Path, config: Config, made: Path) -> dict[str, Any]:
    inputs = {"dataset": what.dataset, "train": made}
    draft = made / "draft"

    def evaluated(out: Path, work: Path) -> dict[str, Any]:
        from eagle.ablate.evaluate import evaluate

        return evaluate(StepContext(config, what.root, {"dataset": what.dataset, "draft": draft}, out, work))

    def counted(_: Path, work: Path) -> dict[str, Any]:
        from eagle.ablate.evaluate import count_in_vllm

        return count_in_vllm(draft, what.dataset, config, what.root, work)

    keys = ("target", "ablate.draft_tokens", "ablate.sequences", "distill.top_k", "distill.autocast")
    found = _ensure(folder, "eval", _parts(config, inputs, keys, what, _EVAL_CODE), what.root, evaluated)
    if what.vllm:
        asked = ("target", "ablate.draft_tokens", "ablate.prompts", "bundle.max_new_tokens")
        found = found | _ensure(folder, "vllm", _parts(config, inputs, asked, what, _EVAL_CODE), what.root, counted)
    return found


def _place(what: Ablation, arm: str, seed: int) -> Path:
    return what.out / arm / f"seed-{seed}"


def _parts(config: Config, inputs: dict[str, Path], keys: Sequence[str], what: Ablation, code: Sequence[str]) -> dict[str, Any]:
    dumped = config.model_dump(mode="json", by_alias=True)
    found = {name: manifest.read_manifest(path) for name, path in inputs.items()}
    return {
        "seed": config.runtime.seed,
        "threads": config.runtime.threads,
        "config": {key: _at(dumped, key) for key in keys},
        "inputs": {name: content["content_hash"] if content else "missing" for name, content in found.items()},
        "code": manifest.hash_sources(CODE_ROOT, code),
        "target": target_fingerprint(config.target, what.root, what.root / config.paths.cache),
    }


def _at(dumped: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return dumped[section][name] if name else dumped[section]


def _ensure(
    base: Path, name: str, parts: dict[str, Any], root: Path, make: Callable[[Path, Path], dict[str, Any]]
) -> dict[str, Any]:
    """Return the metrics of BASE/NAME, made now unless it is complete and made of `parts`."""
    base.mkdir(parents=True, exist_ok=True)
    mend(base, name)
    found = manifest.read_manifest(base / name)
    if found is None or found["key"] != manifest.hash_json(parts) or manifest.missing_file(base / name, found):
        produce(base, name, parts, root, make)
    metrics: dict[str, Any] = manifest.read_json(base / name / manifest.METRICS)
    return metrics
