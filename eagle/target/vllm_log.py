"""What a log of vLLM says: its tail, the line that tells most, and the text of a line without its prefix."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_LINES = 20
_ERROR = re.compile(r"\b\w*(Error|Exception|Interrupt)\b: ")
_HARMLESS = re.compile(r"\b(WARNING|INFO|DEBUG) \d\d-\d\d ")
_PREFIX = re.compile(r"^.*?\[\w+\.py:\d+\]\s*")  # of vLLM's log lines: process, level, time, place


def log_lines(log: Path) -> list[str]:
    """Return the lines of a log that are not blank; none while there is no file."""
    if not log.is_file():
        return []
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def log_tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    return log_lines(log)[-TAIL_LINES:]


def message(line: str) -> str:
    """Return a log line without process, level, time and place."""
    return _PREFIX.sub("", line).strip()


def last_message(log: Path) -> str:
    """Return the message of the last line that vLLM itself logged, empty while there is none."""
    return next((message(line) for line in reversed(log_lines(log)) if _PREFIX.match(line)), "")


def telling_line(log: Path) -> str:
    """Return the message of the first error, else of the last line, at most 300 characters.

    The first error is the cause; later ones tell only that the engine is gone. vLLM warns with whole tracebacks.
    """
    lines = log_lines(log)
    errors = [line for line in lines if _ERROR.search(line) and not _HARMLESS.search(line)]
    return message(errors[0] if errors else lines[-1] if lines else "nothing on stderr")[:300]
