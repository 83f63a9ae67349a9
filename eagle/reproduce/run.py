"""The steps of a version run again at its commit, by the code of that commit, and their results compared by hash."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from safetensors import safe_open

from eagle import guard as guarding
from eagle import manifest
from eagle.errors import StepFailed
from eagle.progress import say
from eagle.registry.client import Store, fetch_version
from eagle.registry.promote import get_version
from eagle.registry.settings import Recorded
from eagle.reproduce.checkout import checked_out, require_commit
from eagle.reproduce.outside import bring_along, check_outside

STEPS = ("dataset", "distill", "policy", "tune", "bench", "bundle")
HASHED = {"dataset": "data set", "distill": "stage 1", "policy": "stage 2"}
WEIGHTS, CONFIG, MAP = "model.safetensors", "config.json", "d2t"
PROFILE = "reproduce.yaml"
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Row:
    """One thing compared: its hash as recorded and as made again; None = there is none (a draft without a map)."""

    what: str
    then: str | None
    now: str | None

    @property
    def equal(self) -> bool:
        """True when both are the same."""
        return self.then == self.now


@dataclass(frozen=True)
class Reproduction:
    """The comparison, and what differs in the environment ({package: (then, now)}), which may explain it."""

    rows: list[Row]
    packages: dict[str, tuple[str | None, str | None]]

    @property
    def equal(self) -> bool:
        """True when everything compared is equal."""
        return all(row.equal for row in self.rows)


def reproduce(store: Store, recorded: Recorded, root: Path, keep: Path | None = None) -> Reproduction:
    """Make a version again and compare. Nothing is registered, and nothing of the project is written to.

    keep: a folder that is not there yet, for the outputs; default: a temporary one, removed at the end. Raises ConfigError,
    before anything runs, for uncommitted changes at the time, a commit that is not there, data that is not there or is
    not the same; StepFailed when a step does not end well there.
    """
    commit = require_commit(recorded, root)
    with tempfile.TemporaryDirectory(prefix="eagle-reproduce-") as made:
        scratch = Path(made)
        base = keep or scratch / "run"
        registered = fetch_version(store, get_version(store, recorded.model, recorded.version), scratch / "registered")
        with checked_out(commit, root, scratch / "checkout") as project:
            settings = bring_along(recorded, root, project)
            check_outside(recorded, store, project)
            profile = scratch / PROFILE
            profile.write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
            for name in STEPS:
                say(f"reproduce: {name} at {commit[:12]}")
                _run_step(name, project, profile, base)
        rows = compare(recorded, registered, base)
    return Reproduction(rows, changed_packages(recorded))


def compare(recorded: Recorded, registered: Path, base: Path) -> list[Row]:
    """Return a row for the data set, both stages, the draft-vocabulary map, the weights and the bundle's config.

    registered: the registered bundle's files; base: the folder of the steps that were run again.
    """
    bundle = base / "bundle" / "bundle"
    rows = [Row(label, recorded.inputs.get(name), _content(base / name)) for name, label in HASHED.items()]
    rows.append(Row("draft-vocabulary map", map_hash(registered / WEIGHTS), map_hash(bundle / WEIGHTS)))
    rows += [
        Row(label, recorded.files.get(name), manifest.hash_file(bundle / name))
        for label, name in (("draft weights", WEIGHTS), ("bundle config", CONFIG))
    ]
    return rows


def map_hash(path: Path) -> str | None:
    """Return the sha256 of the draft-vocabulary map (`d2t`, int64) in a draft's weights; None when the draft has no map."""
    with safe_open(path, framework="np") as file:
        if MAP not in file.keys():  # noqa: SIM118 -- not a dict
            return None
        return manifest.hash_json(file.get_tensor(MAP).tolist())


def changed_packages(recorded: Recorded) -> dict[str, tuple[str | None, str | None]]:
    """Return {package: (version then, version now)} where they differ."""
    now = manifest.versions()
    names = sorted(recorded.packages.keys() | now.keys())
    return {name: (recorded.packages.get(name), now.get(name)) for name in names if recorded.packages.get(name) != now.get(name)}


def _content(folder: Path) -> str | None:
    found = manifest.read_manifest(folder)
    return found["content_hash"] if found else None


def _run_step(name: str, project: Path, profile: Path, base: Path) -> None:
    """Run one step by the checkout's own code. Whatever ends this call ends the step with all its children (eagle/guard.py)."""
    command = [
        sys.executable, "-P", guarding.__file__, str(GRACE_SECONDS),
        sys.executable, "-m", "eagle", "--root", str(project), "--profile", str(profile), "step", name, "--dir", str(base),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(project), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(  # noqa: S603
        command, cwd=project, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            code = process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()  # the guard's signal to end what is left
            process.wait()
    if code:
        raise StepFailed(f"reproduce: step {name} ended with exit code {code} at that commit; its own message stands above")
