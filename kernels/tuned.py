"""What tuning found for one device: the launch of each Triton kernel by shape, and on CPU how far direct calls pay.

A table is a JSON file, `kernels.json`: {device, torch, triton, rows, direct, why}. A row holds one operation at one shape, with
the launch that was fastest and the hash of the kernel's source. What was tuned on another device, with another torch or
triton, or for another source of the kernel is not used. `dispatch.using(tuned=...)` puts a table to use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

TABLE = "kernels.json"
PLACE = Path(__file__).resolve().parent
Key = tuple[str, tuple[int, ...], str]  # operation, shape, dtype without 'torch.'
Device = str | torch.device
log = logging.getLogger(__name__)


class Launches:
    """Launches by operation, shape and dtype, of several numbers of rows each."""

    def __init__(self, entries: Mapping[Key, Mapping[int, Any]] | None = None) -> None:
        self._entries = dict(entries or {})

    def __len__(self) -> int:
        return sum(len(sizes) for sizes in self._entries.values())

    def find(self, op: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int) -> Any | None:
        """Return the launch tuned at the nearest number of rows, in powers of two (of two the larger); None without one."""
        if not self._entries:
            return None
        sizes = self._entries.get((op, shape, str(dtype).removeprefix("torch.")))
        if not sizes:
            return None
        return sizes[min(sizes, key=lambda size: (abs(size.bit_length() - rows.bit_length()), -size))]


@dataclass(frozen=True)
class Tuned:
    """What the dispatch and the drafter look up.

    `direct_tokens`: tokens of a pass up to which dispatching torch's operations costs more than their arithmetic on CPU;
    `direct_attention`: the same for attention, which torch spreads over the threads.
    """

    launches: Launches = field(default_factory=Launches)
    direct_tokens: int = 64
    direct_attention: int = 16


@dataclass(frozen=True)
class Stamp:
    """What a tuned number depends on beside its shape."""

    device: str
    torch: str
    triton: str | None

    @classmethod
    def here(cls, device: Device) -> Stamp:
        """Return the stamp of `device` and of the packages that are installed."""
        try:
            triton: str | None = metadata.version("triton")
        except metadata.PackageNotFoundError:
            triton = None
        return cls(device_name(device), str(torch.__version__), triton)

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """Return 'device A, here B' for the first thing in which a table or row differs, None where it does not."""
        for name in ("device", "torch", "triton"):
            if other.get(name) != getattr(self, name):
                return f"{name} {other.get(name)}, here {getattr(self, name)}"
        return None


def device_name(device: Device) -> str:
    """Return the name that tuned numbers are keyed by: the GPU's, or the processor's."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def source_hash(*names: str) -> str:
    """Return the first 16 digits of the sha256 of these files of this package."""
    digest = hashlib.sha256()
    for name in names:
        digest.update((PLACE / name).read_bytes())
    return digest.hexdigest()[:16]


def launches_of(rows: Iterable[Mapping[str, Any]], stamp: Stamp) -> Launches:
    """Return the launches of those rows that hold here. ValueError for a row that is damaged; needs triton where there are rows."""
    entries: dict[Key, dict[int, Any]] = defaultdict(dict)
    for row in rows:
        from kernels import spaces

        problem, launch = spaces.read_row(row)
        if stamp.difference(row) is None and row["source"] == spaces.source(problem.op):
            entries[problem.op, problem.shape, problem.dtype][problem.rows] = launch
    return Launches(entries)


def read_table(path: Path, device: Device) -> Tuned:
    """Return what the table at `path` says of `device`: the defaults where there is no table or it is another device's.

    A damaged table, and one of another device or version, is said in one line of the log.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError) as error:
        log.warning("kernels: %s cannot be read (%s); the default launches are used", path, error)
        return Tuned()
    stamp = Stamp.here(device)
    try:
        other = stamp.difference(content)
        if other is not None:
            log.info("kernels: %s is not used: it was tuned with %s", path, other)
            return Tuned()
        return Tuned(launches_of(content["rows"], stamp), **direct_limits(content["direct"]))
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        log.warning("kernels: %s is damaged (%s); the default launches are used", path, error)
        return Tuned()


def direct_limits(found: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the limits of direct calls in a table's `direct`, none where they were not tuned. ValueError for what is no count."""
    limits = {} if found is None else {name: found[name] for name in ("direct_tokens", "direct_attention")}
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 4096:
            raise ValueError(f"{name} is {value!r}")
    return limits
