"""Where results of `eagle bench` go: a folder that is complete when it exists, and replaces nothing but former results."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from eagle.errors import BusyError, ConfigError

ABOUT = "suite.json"  # marks a folder of results


def result_folder(folder: Path) -> Path:
    """Return the output folder as an absolute path. Raises ConfigError when something else than former results is there."""
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or (folder / ABOUT).is_file())):
        raise ConfigError(f"--out {folder}: it exists and holds no results of 'eagle bench'; name a new folder")
    return folder


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which takes the place of `final` when the block ends without an exception.

    Raises BusyError when another process is at the same folder.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            FileLock(final.with_name(f"{final.name}.lock"), timeout=0),
            tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as made,
        ):
            fresh = Path(made) / "bench"
            fresh.mkdir()
            yield fresh
            if final.exists():
                final.rename(Path(made) / "old")
            fresh.rename(final)
    except Timeout:
        raise BusyError(f"{final}: another bench is at work there; wait for it, or choose another folder with --out") from None
