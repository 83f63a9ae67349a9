"""What a finished folder says of itself: content hashes, the key that made it, versions.

A folder becomes visible only by rename, with its manifest inside, so a folder that exists is complete.
`manifest.json` is canonical (no times, no hosts): the same work gives the same bytes. What varies between
two identical runs (when, how long, argv, git state) goes into `<folder>.provenance.json` beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
METRICS = "metrics.json"
VERSIONED = ("torch", "transformers", "triton", "safetensors", "pyarrow", "numpy")


def hash_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """Return the sha256 of a JSON value in canonical form, hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted keys, no blanks, no NaN (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def hash_sources(root: Path, places: Iterable[str]) -> str:
    """Return one sha256 over the Python and C++ sources and templates at `places` (files, folders) below `root`, names included."""
    digest = hashlib.sha256()
    for place in sorted(places):
        at = root / place
        files = [at] if at.is_file() else sorted(p for p in at.rglob("*") if p.suffix in {".py", ".j2", ".cpp"})
        for file in files:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either the former content or the new one: temporary file, fsync, rename."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, atomically. NaN and infinity raise ValueError."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; OSError or json.JSONDecodeError as they come."""
    return json.loads(path.read_text(encoding="utf-8"))


def list_files(folder: Path) -> list[dict[str, Any]]:
    """Return `{path, size, sha256}` for every file below `folder` but its manifest, sorted by path."""
    return [
        {"path": p.relative_to(folder).as_posix(), "size": p.stat().st_size, "sha256": hash_file(p)}
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p != folder / MANIFEST
    ]


def write_manifest(folder: Path, step: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Hash every file of a finished step's folder and write its manifest. Returns the manifest.

    `parts` is the material of the step's key (config, inputs, code, extra); the key is its hash.
    """
    files = list_files(folder)
    manifest = {
        "step": step,
        "key": hash_json(parts),
        "parts": parts,
        "files": files,
        "content_hash": hash_json([[f["path"], f["sha256"]] for f in files]),
        "versions": versions(),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


_FIELDS: dict[str, type] = {"key": str, "content_hash": str, "parts": dict, "files": list}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the folder's manifest, or None when there is none or it is unreadable."""
    try:
        content = read_json(folder / MANIFEST)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    whole = isinstance(content, dict) and all(isinstance(content.get(name), kind) for name, kind in _FIELDS.items())
    return content if whole else None


def missing_file(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Return the first file that is gone or has another size than the manifest says, or None when all are there."""
    for entry in manifest["files"]:
        path = folder / entry["path"]
        if not path.is_file() or path.stat().st_size != entry["size"]:
            return str(entry["path"])
    return None


def altered_file(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Return the first file whose bytes differ from the manifest's hash, or None. Reads everything."""
    gone = missing_file(folder, manifest)
    if gone:
        return gone
    return next((str(e["path"]) for e in manifest["files"] if hash_file(folder / e["path"]) != e["sha256"]), None)


def versions() -> dict[str, str]:
    """Return the versions that a step's output depends on, from package metadata (nothing is imported)."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(root: Path) -> dict[str, Any]:
    """Return `{sha, dirty}` of the checkout at `root`, both None outside a git work tree."""
    git = shutil.which("git")
    if git is None:
        return {"sha": None, "dirty": None}
    sha = subprocess.run([git, "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)  # noqa: S603
    if sha.returncode:
        return {"sha": None, "dirty": None}
    status = subprocess.run([git, "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=False)  # noqa: S603
    return {"sha": sha.stdout.strip(), "dirty": bool(status.stdout.strip())}


def write_provenance(folder: Path, root: Path, seconds: float) -> None:
    """Write `<folder>.provenance.json`: when, how long, with which command line and git state."""
    write_json(
        folder.with_name(folder.name + ".provenance.json"),
        {
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 2),
            "argv": sys.argv,
            "git": git_state(root),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
        },
    )
