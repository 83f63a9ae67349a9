"""What a run read from outside its commit, found and checked: target, prompt files, replayed data, a warm start's draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.config import TargetConfig
from eagle.errors import ConfigError
from eagle.registry import lineage
from eagle.registry.client import Store
from eagle.registry.fetch import find_version
from eagle.registry.settings import Recorded
from eagle.target.resolve import target_fingerprint
from eagle.train.warm_source import REGISTRY, find_draft

VLLM = ".venv-vllm"
TARGETS = "targets"
DRAFT_FILES = ("config.json", "model.safetensors")


def check_outside(recorded: Recorded, store: Store, project: Path) -> None:
    """Check that what `bring_along` brought has the recorded hashes. ConfigError, one line, names the first that has not."""
    config, known = recorded.config, recorded.outside.get("dataset", {})
    for name in config["dataset"]["prompt_files"]:
        path = project / name
        _same(f"dataset.prompt_files: {name}", manifest.hash_file(path) if path.is_file() else None, known.get(f"prompts:{name}"))
    replayed = config["dataset"].get("replay_from")
    if replayed:
        found = manifest.read_manifest(project / replayed)
        _same(f"dataset.replay_from: {replayed}", found["content_hash"] if found else None, known.get("replay_from"))
    target = TargetConfig(model=config["target"]["model"], revision=config["target"].get("revision"))
    fingerprint = target_fingerprint(target, project, project / config["paths"]["cache"])
    _same(f"target.model: {target.model}", fingerprint, known.get("target"))
    source = config["distill"].get("warm_start")
    if source:
        then = recorded.outside.get("distill", {}).get("warm_start")
        _same(f"distill.warm_start: {source}", _draft_hash(source, store, project), then)


def _draft_hash(source: str, store: Store, project: Path) -> str | None:
    """Return the hash of a warm start's draft as `eagle.train.warm_source` takes it."""
    if source.startswith(REGISTRY):
        return find_version(source, store).tags.get(lineage.BUNDLE)
    folder = find_draft(source, project)
    return manifest.hash_json([manifest.hash_file(folder / name) for name in DRAFT_FILES])


def _same(what: str, now: str | None, then: str | None) -> None:
    if now is None:
        raise ConfigError(f"reproduce: {what} is not there any more; bring it back to where it was")
    if now != then:
        raise ConfigError(f"reproduce: {what} is not what the version was made with (now {now[:20]}, then {(then or 'none')[:20]})")


def bring_along(recorded: Recorded, root: Path, project: Path) -> dict[str, Any]:
    """Link what lies outside the commit into the checkout and return the settings to run with.

    Relative paths mean the same there as in `root`. The converted demo target is linked, target features are not: they
    are made again. Registered drafts (a warm start) are looked up in the store of `root`.
    """
    config = recorded.config
    named = [*config["dataset"]["prompt_files"], config["dataset"].get("replay_from"), config["distill"].get("warm_start")]
    named += [config["target"]["model"], VLLM, config["vllm"].get("interpreter"), str(Path(config["paths"]["cache"]) / TARGETS)]
    for name in (name for name in named if name and not Path(name).is_absolute() and not name.startswith(REGISTRY)):
        there, here = root / name, project / name
        if there.exists() and not here.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            here.symlink_to(there, target_is_directory=there.is_dir())
    bundle = config["bundle"] | {"validate_in_vllm": False}  # its files are what is compared, not their speed
    return config | {"bundle": bundle, "paths": config["paths"] | {"state": str((root / config["paths"]["state"]).resolve())}}
