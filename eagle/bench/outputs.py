"""Where results of `eagle bench` go: a folder that is complete when it exists, and replaces nothing but former results."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from eagle.errors import BusyError, ConfigError, PreflightError, StepFailed

ABOUT = "suite.json"  # marks a folder of results
# What goes wrong with the place that is written to; other errors of the system are not about it.
_PLACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def result_folder(folder: Path) -> Path:
    """Return the output folder as an absolute path. Raises ConfigError when something else than former results is there, or
    it cannot be looked at."""
    folder = folder.resolve()
    try:
        free = not folder.exists() or (folder.is_dir() and (not any(folder.iterdir()) or (folder / ABOUT).is_file()))
    except OSError as error:  # a name that is too long, no permission
        raise ConfigError(f"--out {folder}: {error.strerror}; name another folder") from None
    if not free:
        raise ConfigError(f"--out {folder}: it exists and holds no results of 'eagle bench'; name a new folder")
    return folder


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which takes the place of `final` when the block ends without an exception.

    Raises BusyError when another process is at the same folder, PreflightError when nothing can be made beside it, StepFailed
    when the disk is full, read-only or failing at the end; then nothing is left there.
    """
    begun = False
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(final.with_name(f"{final.name}.lock"), timeout=0),
            tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as made,
        ):
            fresh = Path(made) / "bench"
            fresh.mkdir()
            begun = True
            yield fresh
            if final.exists():
                final.rename(Path(made) / "old")
            fresh.rename(final)
    except Timeout:
        raise BusyError(f"{final}: another bench is at work there; wait for it, or choose another folder with --out") from None
    except OSError as error:
        if begun and error.errno not in _PLACE:
            raise
        at = f" ({error.filename})" if error.filename else ""
        why = f"the results cannot be written: {error.strerror or error}{at}"
        kind = StepFailed if begun else PreflightError
        raise kind(f"{final}: {why}; make room there, or choose another folder with --out") from None
