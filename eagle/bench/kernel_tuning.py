"""Tuning as a part of the tune step: which shapes a draft has, the store of what was tuned, the budget and the progress.

The store is one file a device under paths.cache, in the form of `kernels.tuned`. It is written anew after every operation, so a
crash keeps what is done, and what it holds is not tuned again while device, versions and kernel sources are the same. Each run
gets the rows of its own shapes as kernels.json, which the bundle carries on.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from eagle import manifest
from eagle.bench import direct_tuning
from eagle.config import TuneConfig
from eagle.draft.spec import DraftSpec
from eagle.progress import Track, say
from kernels.tuned import Stamp, direct_limits

if TYPE_CHECKING:
    from kernels.spaces import Problem

TRAINING_ROWS = 1024  # of the loss, which is the one operation that only training has
NO_GPU = "no GPU: not tuned"
TuneOne = Callable[["Problem", float], dict[str, Any] | None]


def problems(spec: DraftSpec, dtype: str, batches: Iterable[int], length: int) -> list[Problem]:
    """Return every operation of a draft at its shapes: `batches` rows a draft step, and `length` + 1 times as many positions
    after a verification."""
    from kernels.spaces import Problem

    sizes = sorted(set(batches))
    wide = sorted({*sizes, *(size * (length + 1) for size in sizes)})
    heads, width = (spec.num_heads, spec.num_kv_heads, spec.head_dim), spec.hidden_size
    found = [Problem("add_rms_norm", (width,), dtype, rows) for rows in wide]
    found += [Problem("feature_norms", (spec.target_hidden_size, spec.num_aux), dtype, rows) for rows in wide if spec.fc_norm]
    for rows in sizes:
        found += [
            Problem("input_norm", (width,), dtype, rows), Problem("rope_cache", heads, dtype, rows),
            Problem("silu_mul", (spec.intermediate_size,), dtype, rows),
            Problem("sample_head", (width, spec.draft_vocab_size), dtype, rows),
            Problem("rejection", (spec.vocab_size, spec.draft_vocab_size), "float32", rows),
        ]  # fmt: skip
        if spec.head_dim <= 128:
            found.append(Problem("cached_attention", heads, dtype, rows))
    return [*found, Problem("dense_terms", (spec.draft_vocab_size,), dtype, TRAINING_ROWS)]


class LaunchStore:
    """What was tuned on one device with the versions of now, kept from run to run."""

    def __init__(self, folder: Path, stamp: Stamp) -> None:
        self.stamp = stamp
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', stamp.device).strip('-').lower() or 'device'}.json"
        folder.mkdir(parents=True, exist_ok=True)
        content, notice = self._read()
        if notice:
            say(f"tune: {notice}; tuning again")
        self.direct: dict[str, Any] | None = content["direct"]
        self._rows: dict[Problem, dict[str, Any]] = _known(content["rows"])

    def _read(self) -> tuple[dict[str, Any], str | None]:
        """Return the usable content, and why the file as a whole is of no use."""
        empty: dict[str, Any] = {"rows": [], "direct": None}
        try:
            content = manifest.read_json(self.path)
            other = self.stamp.difference(content)
            rows, direct = content["rows"], content["direct"]
            if not isinstance(rows, list) or not (direct is None or isinstance(direct, dict)):
                raise TypeError("rows or direct")  # noqa: TRY301
        except FileNotFoundError:
            return empty, None
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            return empty, f"{self.path} is damaged ({type(error).__name__}: {error})"
        return (empty, f"{self.path} was tuned with {other}") if other else ({"rows": rows, "direct": direct}, None)

    def row(self, problem: Problem) -> dict[str, Any] | None:
        """Return the row of a problem that was tuned before."""
        return self._rows.get(problem)

    def put(self, problem: Problem, row: dict[str, Any]) -> None:
        """Keep a row; it is on disk when this returns."""
        self._rows[problem] = row
        self._write()

    def put_direct(self, direct: dict[str, Any]) -> None:
        """Keep the limits of direct calls."""
        self.direct = direct
        self._write()

    def _write(self) -> None:
        with FileLock(self.path.with_suffix(".lock")):
            content, _ = self._read()  # another run may have added to it
            rows = _known(content["rows"], quiet=True) | self._rows
            direct = self.direct if self.direct is not None else content["direct"]
            manifest.write_json(self.path, table(self.stamp, list(rows.values()), direct, None))


def _known(rows: list[Any], quiet: bool = False) -> dict[Problem, dict[str, Any]]:
    """Return the rows that are whole and of the kernels of now, by problem; the others are said unless `quiet`."""
    found: dict[Problem, dict[str, Any]] = {}
    for row in rows:
        from kernels import spaces

        try:
            problem, _ = spaces.read_row(row)
            stale = row["source"] != spaces.source(problem.op)
        except ValueError as error:
            if not quiet:
                say(f"tune: {error}; tuning it again")
            continue
        if not stale:
            found[problem] = row
        elif not quiet:
            say(f"tune: {problem}: the kernel has changed since; tuning it again")
    return found


def table(stamp: Stamp, rows: list[dict[str, Any]], direct: dict[str, Any] | None, why: str | None) -> dict[str, Any]:
    """Return the content of kernels.json; `why` says why there are no rows, or not all."""
    return {**asdict(stamp), "rows": rows, "direct": direct, "why": why}


def tune_kernels(
    wanted: list[Problem], store: LaunchStore, minutes: float, tune_one: TuneOne, clock: Callable[[], float] = time.monotonic
) -> tuple[list[dict[str, Any]], str | None]:
    """Tune what the store does not hold yet, within `minutes`. Returns the rows of `wanted`, and why some are missing.

    What is left of the budget is shared out evenly over what is left to do.
    """
    todo = [problem for problem in wanted if store.row(problem) is None]
    if len(todo) < len(wanted):
        say(f"tune: {len(wanted) - len(todo)} of {len(wanted)} kernels were tuned before ({store.path})")
    deadline, late = clock() + 60.0 * minutes, 0
    with Track("tune kernels", len(todo), "kernels") as track:
        for index, problem in enumerate(todo):
            left = deadline - clock()
            if left <= 0:
                late = len(todo) - index
                break
            row = tune_one(problem, clock() + left / (len(todo) - index))
            if row is None:
                say(f"tune: {problem}: no launch fits this device; the kernel's own default stays")
            else:
                store.put(problem, row)
            track.advance(1.0, str(problem))
    rows = [row for problem in wanted if (row := store.row(problem)) is not None]
    if not late:
        return rows, None
    why = f"{late} of {len(wanted)} kernels not tuned: the time budget (tune.kernel_minutes) was used up"
    say(f"tune: {why}; run it again to go on: eagle tune")
    return rows, why


def tune_on(device: torch.device, stamp: Stamp) -> TuneOne:
    """Return what tunes one problem on the CUDA device at hand, compiled ahead of time for its architecture to prune."""
    from kernels import autotune
    from kernels.occupancy import limits_of

    major, minor = torch.cuda.get_device_capability(device)
    target = 10 * major + minor
    read, limits = autotune.compiler(target), limits_of(target)
    return lambda problem, deadline: autotune.tune(problem, stamp, device, read, limits, deadline=deadline)


def tune_device(
    spec: DraftSpec, settings: TuneConfig, *, dtype: str, threads: int, device: str, folder: Path
) -> dict[str, Any]:
    """Tune what `device` has, or take it from the store in `folder`: the launches of the Triton kernels on a GPU, the reach of
    direct calls on CPU. Returns the content of kernels.json for a draft of `spec`."""
    stamp = Stamp.here(device)
    store = LaunchStore(folder, stamp)
    if device == "cpu":
        say(f"tune: Triton kernels: {NO_GPU}")
        return table(stamp, [], _direct(spec, settings, store, dtype, threads), NO_GPU)
    if importlib.util.find_spec("triton") is None:
        return table(stamp, [], None, "triton is not installed")
    from kernels import spaces

    wanted = problems(spec, dtype, settings.batch_sizes, settings.draft_tokens)
    rows, why = tune_kernels(wanted, store, settings.kernel_minutes, tune_on(torch.device(device), stamp))
    for row in rows:
        if row.get("default_ms") and row.get("median_ms"):
            say(f"tune: {spaces.read_row(row)[0]}: {row['default_ms']:.4f} -> {row['median_ms']:.4f} ms")
    return table(stamp, rows, None, why)


def _direct(spec: DraftSpec, settings: TuneConfig, store: LaunchStore, dtype: str, threads: int) -> dict[str, Any] | None:
    found, key = store.direct, direct_tuning.key_of(spec, dtype, threads)
    try:
        if found is not None and direct_limits(found) and found.get("key") == key:
            say(f"tune: direct calls were tuned before ({store.path})")
            return found
    except (KeyError, ValueError) as error:
        say(f"tune: {store.path}: direct calls: {error}; tuning again")
    made = direct_tuning.tune_direct(spec, dtype, threads, time.monotonic() + 60.0 * settings.kernel_minutes)
    if made is None:
        say("tune: direct calls: none here (no C++ compiler, or switched off)")
        return None
    store.put_direct(made)
    say(f"tune: direct calls up to {made['direct_tokens']} tokens a pass, their attention up to {made['direct_attention']}")
    return made
