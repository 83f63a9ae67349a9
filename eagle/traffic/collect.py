"""From a request log to a prompt file for `dataset.prompt_files`: opt-out, retention, sampling, masking, duplicates.

Prompts are chosen by the hash of their text, so that the same prompt is chosen again from tomorrow's log, and a prompt
that was sent a thousand times counts once. Only what is chosen is kept in memory, with a spare for near-duplicates.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from eagle import manifest
from eagle.config import Config
from eagle.dataset.duplicates import drop_duplicates
from eagle.dataset.prompts import Prompt, hash_fraction
from eagle.dataset.readers import BadRow, check_text
from eagle.errors import ConfigError, DataError
from eagle.traffic.log import LeftOut, read_lines
from eagle.traffic.masking import mask
from eagle.traffic.requests import LoggedRequest, parse_line

KIND = "traffic"
SPARE = 2  # prompts held for each one wanted: some fall to near-duplicates
DAY = 86400.0


@dataclass
class Report:
    """What became of a log's rows. `left_out`: rows by reason; `masked`: findings by kind; `written`: prompts in the file."""

    rows: int = 0
    written: int = 0
    opted_out: int = 0
    too_old: int = 0
    no_time: int = 0
    repeated: int = 0
    not_chosen: int = 0
    exact: int = 0
    near: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)

    def table(self) -> list[tuple[str, int]]:
        """Return the report's rows for a table, those that are zero left away but the first and the last."""
        middle = [
            ("opted out", self.opted_out), ("older than the retention", self.too_old), ("without a time", self.no_time),
            *((f"quarantined: {reason}", count) for reason, count in sorted(self.left_out.items())),
            ("same prompt again", self.repeated + self.exact), ("near-duplicates", self.near), ("not chosen", self.not_chosen),
        ]  # fmt: skip
        found = [(f"masked: {kind}", count) for kind, count in sorted(self.masked.items())]
        return [("rows read", self.rows), *((n, c) for n, c in middle if c), ("prompts written", self.written), *found]


@dataclass(frozen=True)
class OptOut:
    """Who and what must not be used: user ids, and sha256 (hexadecimal) of user ids or of prompts' texts."""

    names: frozenset[str] = frozenset()

    def covers(self, request: LoggedRequest) -> bool:
        """Tell whether the request is on the list: its user, plain or hashed, or its text with or without the system message."""
        if not self.names:
            return False
        texts = [request.user, f"{request.system}\n\n{request.user}"] if request.system else [request.user]
        texts += [text.strip() for text in texts]
        return any(user in self.names for user in request.users) or any(_sha(t) in self.names for t in [*request.users, *texts])


def read_opt_out(path: Path) -> OptOut:
    """Return the opt-out list of a text file: one entry a line, blank lines and those with # in front are skipped.

    Raises ConfigError when it cannot be read: without the list nothing may be used.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"traffic: the opt-out list {path} cannot be read ({error}); nothing was written") from None
    return OptOut(frozenset(_entry(line) for line in lines if line and not line.startswith("#")))


def _entry(line: str) -> str:
    hexadecimal = len(line) == 64 and all(c in "0123456789abcdefABCDEF" for c in line)
    return line.lower() if hexadecimal else line


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class _Sample:
    """The prompts of the smallest hashes: at most `size` (0 = all), each text once."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._heap: list[tuple[float, str, int]] = []  # (minus hash, id, row)
        self._held: dict[str, Prompt] = {}

    def offer(self, prompt: Prompt, report: Report) -> None:
        """Take the prompt in, or count why not."""
        if prompt.id in self._held:
            report.repeated += 1
            return
        place = hash_fraction(f"sample\0{self._seed}\0{prompt.text}")
        if self._size and len(self._held) >= self._size:
            if -place <= self._heap[0][0]:
                report.not_chosen += 1
                return
            del self._held[heapq.heappop(self._heap)[1]]
            report.not_chosen += 1
        heapq.heappush(self._heap, (-place, prompt.id, prompt.row))
        self._held[prompt.id] = prompt

    def prompts(self) -> list[Prompt]:
        """Return what is held, smallest hash first."""
        return [self._held[key] for _, key, _ in sorted(self._heap, reverse=True)]


def collect(log: Path, out: Path, opt_out: OptOut, config: Config, now: float) -> Report:
    """Write the prompts of `log` to `out` and the rows that cannot be used to `<out stem>.quarantine.jsonl` beside it.

    `out` holds {"kind", "messages"} per line, in the log's order. now: Unix seconds, for the retention. Both files
    appear whole or not at all. Raises DataError for an unreadable log, or when no prompt is left, ConfigError when
    `out` is no place to write to.
    """
    aside = out.with_name(f"{out.stem}.quarantine.jsonl")
    for place in (out, aside):
        if not place.parent.is_dir() or (place.exists() and (place.is_dir() or (log.exists() and place.samefile(log)))):
            raise ConfigError(f"traffic: cannot write {place}: give --out a file in a folder that is there, and not the log itself")
    section, report = config.traffic, Report()
    sample = _Sample(SPARE * section.max_prompts, config.runtime.seed)
    oldest = now - section.retention_days * DAY if section.retention_days else None
    with LeftOut(aside, log.name) as left_out:
        for row, line in read_lines(log):
            report.rows += 1
            try:
                request = _request(line, config.dataset.max_prompt_tokens)
            except BadRow as reason:
                left_out.add(row, str(reason))
                continue
            if _wanted(request, opt_out, oldest, report):
                sample.offer(Prompt(f"file:{log.name}", KIND, request.user.strip(), request.system, log.name, row), report)
        report.left_out = left_out.reasons
        prompts = _distinct(sample.prompts(), config, report)
        if not prompts:
            what = ", ".join(f"{name} {count}" for name, count in report.table()[:-1])
            raise DataError(f"traffic: no prompt is left of {log} ({what}); nothing was written; a log has one JSON object a line")
        lines = (manifest.canonical({"kind": p.kind, "messages": p.messages}) + "\n" for p in prompts)
        manifest.write_text(out, "".join(lines))
    report.written = len(prompts)
    return report


def _request(line: bytes | None, max_prompt_tokens: int) -> LoggedRequest:
    if line is None:
        raise BadRow("line too long: more than 16 MiB")
    if not line.strip():
        raise BadRow("blank line")
    request = parse_line(line)
    check_text(request.user if request.system is None else f"{request.system}\n\n{request.user}", max_prompt_tokens)
    if not request.user.strip():
        raise BadRow("empty prompt")
    return request


def _wanted(request: LoggedRequest, opt_out: OptOut, oldest: float | None, report: Report) -> bool:
    """Tell whether opt-out and retention allow the request; count it when they do not."""
    if opt_out.covers(request):
        report.opted_out += 1
    elif oldest is not None and request.time is None:
        report.no_time += 1
    elif oldest is not None and request.time is not None and request.time < oldest:
        report.too_old += 1
    else:
        return True
    return False


def _distinct(prompts: list[Prompt], config: Config, report: Report) -> list[Prompt]:
    """Mask the chosen prompts, drop what is alike then, and cut to the number wanted; in the log's order."""
    section = config.traffic
    found: dict[int, Counter[str]] = {}
    masked = [_masked(prompt, found) for prompt in prompts] if section.mask else prompts
    kept = drop_duplicates(masked, config.dataset.near_duplicate_jaccard)
    report.exact, report.near = kept.exact, kept.near
    chosen = kept.prompts[: section.max_prompts or None]
    report.not_chosen += len(kept.prompts) - len(chosen)
    for prompt in chosen:
        report.masked += found.get(prompt.row, Counter())
    return sorted(chosen, key=lambda prompt: prompt.row)


def _masked(prompt: Prompt, found: dict[int, Counter[str]]) -> Prompt:
    """Return the prompt masked; what was found goes to found[its row]."""
    user, kinds = mask(prompt.user)
    system = prompt.system
    if system is not None:
        system, more = mask(system)
        kinds += more
    found[prompt.row] = kinds
    return Prompt(prompt.source, prompt.kind, user, system, prompt.file, prompt.row)
