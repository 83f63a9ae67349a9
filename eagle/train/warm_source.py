"""Where a warm start's draft comes from (`distill.warm_start`): a folder or a registered model. Imports nothing heavy.

A folder is that of a draft or a bundle (config.json and model.safetensors), of a step that made one, or of a whole run.
"""

from __future__ import annotations

from pathlib import Path

from eagle import manifest
from eagle.config import Config
from eagle.errors import ConfigError, closest

REGISTRY = "models:/"
_INSIDE = (".", "draft", "bundle", "policy/draft", "bundle/bundle")  # where a given folder may keep its draft, in this order
_FILES = ("config.json", "model.safetensors")


def is_alias(source: str | None) -> bool:
    """Whether `source` names a registered model by an alias, which may point to another version tomorrow."""
    return source is not None and source.startswith(REGISTRY) and "@" in source


def source_hash(config: Config, root: Path) -> str:
    """Return the sha256 of the draft that `distill.warm_start` names at this moment: its two files, or the registry's record.

    Raises ConfigError when there is no such draft.
    """
    source = _asked(config)
    if source.startswith(REGISTRY):
        from eagle.registry.fetch import model_hash  # MLflow, only when a registered model is asked for

        return model_hash(source, config, root)
    folder = find_draft(source, root)
    return manifest.hash_json([manifest.hash_file(folder / name) for name in _FILES])


def fetch_source(config: Config, root: Path, into: Path) -> Path:
    """Return the folder of the draft that `distill.warm_start` names; a registered one is downloaded into `into` and verified.

    Raises ConfigError when there is no such draft, StepFailed when the registry's files are not those that were registered.
    """
    source = _asked(config)
    if source.startswith(REGISTRY):
        from eagle.registry.fetch import fetch_model

        return fetch_model(source, config, root, into)
    return find_draft(source, root)


def find_draft(source: str, root: Path) -> Path:
    """Return the draft's folder for a path, absolute or relative to `root`. Raises ConfigError when it holds none."""
    given = root / source
    for place in _INSIDE:
        if all((given / place / name).is_file() for name in _FILES):
            return (given / place).resolve()
    beside = [path.name for path in given.parent.iterdir() if path.is_dir()] if given.parent.is_dir() else []
    missing = f"no folder {given}{closest(given.name, sorted(beside))}"
    what = f"{given} holds no draft ({' and '.join(_FILES)})" if given.is_dir() else missing
    raise ConfigError(
        f"distill.warm_start: {what}; give a run's folder, a draft's, or {REGISTRY}NAME@champion, or null for a fresh draft"
    )


def _asked(config: Config) -> str:
    if config.distill.warm_start is None:
        raise ValueError("distill.warm_start is null")
    return config.distill.warm_start
