"""From a request (profile, overrides, run id) to a checked launch: config, folders, lock, disk, vLLM. No Prefect here.

The command does all this before it imports Prefect; the flow does it again when a worker starts it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from eagle.config import Config
from eagle.errors import BusyError, ConfigError, PreflightError
from eagle.locks import holder, owned_lock
from eagle.profiles import load_config, project_root
from eagle.steps import CODE_ROOT, STEPS, status

GIB = 1 << 30


@dataclass(frozen=True)
class Launch:
    """One run of the pipeline: what was asked for, and where it happens."""

    root: Path
    config: Config
    profile: str
    overrides: tuple[str, ...]
    run_id: str
    force: bool

    @property
    def base(self) -> Path:
        """The folder of the steps' outputs, runs/<run-id>."""
        return self.root / self.config.paths.runs / self.run_id

    def command(self, step: str) -> list[str]:
        """Return the command that runs one step of this launch."""
        said = [part for item in self.overrides for part in ("--set", item)]
        return [
            sys.executable, "-m", "eagle", "--root", str(self.root), "--profile", self.profile, *said,
            "step", step, "--dir", str(self.base), *(["--force"] if self.force else []),
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment of a step's process: this one's, lines unbuffered, this checkout's code first."""
        path = os.pathsep.join(p for p in (str(CODE_ROOT), os.environ.get("PYTHONPATH", "")) if p)
        return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}

    def stale_steps(self) -> list[str]:
        """Return the names of the steps that will run, in order."""
        if self.force:
            return list(STEPS)
        return [step.name for step in STEPS.values() if not status(step, self.config, self.root, self.base).up_to_date]


def prepare(profile: str = "default", overrides: tuple[str, ...] = (), run_id: str | None = None, *, force: bool = False) -> Launch:
    """Validate the request against the project in the working directory. ConfigError when something in it is unusable."""
    root = project_root()
    config = load_config(root, profile, overrides)
    if profile.endswith((".yaml", ".yml")) and Path(profile).is_file():
        profile = str(Path(profile).resolve())  # steps run in the project's folder
    name = run_id or Path(profile).stem
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise ConfigError(
            f"run id '{name[:100]}': up to 100 letters, digits, '.', '_' and '-' only; it names a folder under {config.paths.runs}/"
        )
    return Launch(root, config, profile, tuple(overrides), name, force)


@contextmanager
def run_lock(launch: Launch) -> Iterator[None]:
    """Hold the run's lock; BusyError at once when another process has it. The same process may take it twice.

    A run that was refused before any step began leaves no folder.
    """
    new = not launch.base.exists()
    launch.base.mkdir(parents=True, exist_ok=True)
    path = launch.base / "run.lock"
    try:
        with owned_lock(path, shared_in_process=True):
            try:
                yield
            finally:
                if new and list(launch.base.iterdir()) == [path]:
                    path.unlink()
                    launch.base.rmdir()
    except Timeout:
        raise BusyError(
            f"run '{launch.run_id}': {holder(path)} is at work on it (lock {path}); wait for it, stop it or give another --run-id"
        ) from None


def preflight(launch: Launch) -> list[str]:
    """Check what the steps that will run need: free disk, vLLM, a draft to go on from that fits.

    Returns their names. Raises PreflightError otherwise, ConfigError for files that are not there or do not fit.
    """
    stale = launch.stale_steps()
    if stale:
        free = shutil.disk_usage(launch.base).free / GIB
        needed = launch.config.flow.min_free_gib
        if free < needed:
            raise PreflightError(
                f"disk: {free:.1f} GiB free at {launch.base}, the run asks for {needed:g} GiB; free some or lower flow.min_free_gib"
            )
    if "dataset" in stale:
        from eagle.dataset.readers import find_prompt_file

        for name in launch.config.dataset.prompt_files:
            find_prompt_file(launch.root, name)
    if "distill" in stale and launch.config.distill.warm_start:
        from eagle.train.warm import check_early

        check_early(launch.config, launch.root, launch.root / launch.config.paths.cache)
    _need_vllm(launch, stale)
    return stale


def _need_vllm(launch: Launch, stale: list[str]) -> None:
    """Ask the interpreter for its vLLM now: an hour of training must not end at a file that only looks like one."""
    from eagle.target.vllm import find_vllm, vllm_build

    config = launch.config
    required = {"dataset": config.dataset.backend == "vllm", "bundle": config.bundle.validate_in_vllm}
    interpreter = find_vllm(config.vllm, launch.root)
    if interpreter is None and any(required.get(name) for name in stale):
        raise PreflightError(
            "vLLM not found: no python in vllm.interpreter, .venv-vllm or this environment imports vllm; run `make run` once, set "
            "vllm.interpreter, or go without: --set bundle.validate_in_vllm=false (never champion then)"
        )
    used = required | {"dataset": config.dataset.backend != "transformers"}
    if interpreter is not None and any(used.get(name) for name in stale):
        vllm_build(interpreter)
