"""Bad input rows: each is listed with file, row, reason and an excerpt, and the run goes on without it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle import manifest

EXCERPT = 120  # characters of the offending row that are kept


@dataclass(frozen=True)
class Entry:
    """One quarantined row. `row` is 1-based; 0 means the whole file. `reason` starts with a fixed class and a colon or ends."""

    file: str
    row: int
    reason: str
    excerpt: str


class Quarantine:
    """Collects quarantined rows in the order they were met."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, file: str, row: int, reason: str, content: str | bytes = "") -> None:
        """Note a row. Bytes that are not UTF-8 appear as \\xNN in the excerpt, unpaired surrogates as \\uNNNN."""
        if isinstance(content, bytes):
            content = content[: 4 * EXCERPT].decode("utf-8", "backslashreplace")
        shown = content[:EXCERPT].encode("utf-8", "backslashreplace").decode()
        self.entries.append(Entry(file, row, reason, shown))

    def reasons(self) -> dict[str, int]:
        """Return how often each class of reason (the part before the colon) occurred, sorted by name."""
        counts = Counter(entry.reason.partition(":")[0] for entry in self.entries)
        return dict(sorted(counts.items()))

    def write(self, path: Path) -> None:
        """Write one JSON object a line, in order; an empty file when nothing was quarantined."""
        manifest.write_text(path, "".join(manifest.canonical(asdict(entry)) + "\n" for entry in self.entries))
