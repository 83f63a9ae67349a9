"""Reading a log line by line, and writing the rows that were left out, both without holding the log in memory."""

from __future__ import annotations

import gzip
import io
import os
import shlex
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, cast

from eagle import manifest
from eagle.dataset.readers import MAX_LINE_BYTES
from eagle.errors import DataError, closest
from eagle.progress import Track

_PIECE = 1 << 20


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield (row, line without its end) of a JSONL file, gzipped or not, rows from 1; None for a line over 16 MiB.

    Raises DataError when the file cannot be read or its compressed data is damaged. Shows progress in MiB of the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as raw, _plain(raw, path) as stream, Track(f"traffic: {path.name}", size / _PIECE, "MiB") as track:
            _require_text(cast(io.BufferedReader, stream).peek(4), path)
            row = told = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                row += 1
                whole: bytes | None = line.rstrip(b"\r\n")
                if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    whole = None
                    while (rest := stream.readline(_PIECE)) and not rest.endswith(b"\n"):
                        pass
                if raw.tell() - told >= _PIECE:
                    track.advance((raw.tell() - told) / _PIECE)
                    told = raw.tell()
                yield row, whole.removeprefix(b"\xef\xbb\xbf") if row == 1 and whole else whole
            track.advance((size - told) / _PIECE)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"traffic: {path} is no whole gzip file ({error}); copy it again") from None
    except OSError as error:
        near = closest(path.name, sorted(p.name for p in path.parent.glob("*.json*"))) if path.parent.is_dir() else ""
        raise DataError(f"traffic: cannot read {path}: {error.strerror}{near}") from None


def _require_text(start: bytes, path: Path) -> None:
    """Raise DataError for a file whose first bytes are another encoding's or a packed file's: no row of it could be read."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        name = shlex.quote(str(path))
        raise DataError(f"traffic: {path} is UTF-16 or UTF-32, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 {name} > utf8.jsonl")
    if start.startswith(b"\x1f\x8b"):
        raise DataError(f"traffic: {path} is a gzip file under another name; give it a name that ends in .gz")


def _plain(raw: IO[bytes], path: Path) -> AbstractContextManager[IO[bytes]]:
    return cast(AbstractContextManager[IO[bytes]], gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else nullcontext(raw)


class LeftOut:
    """The file of quarantined rows, written as they come: {file, row, reason}, no content, which may be private.

    Use as a context manager: the file appears under its name only when the work ended well. `reasons` counts the
    classes (the part of a reason before the colon).
    """

    def __init__(self, path: Path, file: str) -> None:
        self.reasons: Counter[str] = Counter()
        self._path, self._file = path, file

    def __enter__(self) -> LeftOut:
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        self._temporary = Path(name)
        self._stream = os.fdopen(handle, "w", encoding="utf-8")
        return self

    def add(self, row: int, reason: str) -> None:
        """Note a row and why it was left out."""
        self.reasons[reason.partition(":")[0]] += 1
        self._stream.write(manifest.canonical({"file": self._file, "row": row, "reason": reason}) + "\n")

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self._stream.close()
        if kind is None:
            self._temporary.chmod(0o644)
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)
