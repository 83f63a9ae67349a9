"""Which bundle folder is meant: a folder, an address in the registry, or the champion of the configured target."""

from __future__ import annotations

from pathlib import Path

from eagle.config import Config
from eagle.errors import ConfigError
from eagle.progress import say


def find_bundle(given: str | None, champion: bool, config: Config, root: Path) -> Path:
    """Return the bundle's folder; a registered one is fetched into `paths.cache`/bundles and checked by hash.

    Raises ConfigError when nothing, or both a bundle and `champion`, are given, or the registry has no such version;
    StepFailed when the registry's files are not those that were registered.
    """
    if (given is None) != champion:
        raise ConfigError("serve: give one of a bundle folder, models:/NAME@champion, or --champion; see: eagle serve --help")
    if given is not None and not given.startswith("models:"):
        return Path(given).expanduser()
    # MLflow takes seconds to import: only where it is asked for
    from eagle.registry.client import open_store
    from eagle.registry.fetch import cached, champion_address
    from eagle.registry.step import model_name

    pulled = cached(open_store(config, root), given or champion_address(model_name(config)), root / config.paths.cache)
    say(f"serve: {pulled.model} version {pulled.version} -> {pulled.folder}")
    return pulled.folder
