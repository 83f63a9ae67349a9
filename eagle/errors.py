"""Errors that a user can act on, each with its exit code.

Every message is one line: what is wrong, where (file, row, key), the closest valid name, the next step.
The command line prints `error: MESSAGE` to stderr and exits with `exit_code`; it never shows a traceback for these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EagleError(Exception):
    """Base of all errors that are the user's to mend, not ours."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message))


class ConfigError(EagleError):
    """A key, value or file of the configuration is unusable. Nothing was started."""

    exit_code = 2


class DataError(EagleError):
    """The input data cannot be used at all (single bad rows are quarantined instead)."""

    exit_code = 2


class GateRejected(EagleError):
    """The candidate was measured and did not pass the promotion gate."""

    exit_code = 3


class BusyError(EagleError):
    """Another process holds the lock of this output folder."""

    exit_code = 4


class PreflightError(EagleError):
    """Something the run needs (disk, vLLM, the target) is missing; found before the work started."""

    exit_code = 5


class BundleError(EagleError):
    """A draft bundle does not fulfil vLLM's contract (missing, extra or mis-shaped tensor, wrong key)."""

    exit_code = 6


class StepFailed(EagleError):
    """A step ended in a state from which no complete output can be written."""

    exit_code = 7


def closest(name: str, valid: Iterable[str]) -> str:
    """Return ` (closest: 'x')` for the valid name most like `name`, or an empty string when none is near."""
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" (closest: '{near[0]}')" if near else ""
