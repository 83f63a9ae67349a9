"""Benchmark suites: which prompts are measured, and in which order.

- `default`: the prompts under data/suites/, written for this project in the six kinds of task of Spec-Bench (Xia et al.,
  2024, arXiv:2401.07851): first turns of a conversation, translation, summary, question answering, mathematics and
  retrieval-augmented generation. No training prompt that ships with the project is like one of them.
- `mixed`: the same prompts as streams of one task that switch to another one and back.
- `heldout`: held-out prompts of the run's own data set, the traffic that the draft was trained for.
- any prompt file in the forms of `eagle.dataset.readers`: Spec-Bench, MT-bench (`turns`, the first one), HumanEval and MBPP
  (`prompt`, as it is), GSM8K (`question`) and others; as JSON Lines, one JSON array (.json), or either in gzip (.gz).
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle.bench.workload import Workload, load_workload
from eagle.dataset.prompts import Prompt
from eagle.dataset.quarantine import Quarantine
from eagle.dataset.read import load_rows
from eagle.dataset.readers import read_prompt_file
from eagle.errors import ConfigError, DataError, closest
from eagle.progress import say

SUITES = ("default", "heldout", "mixed")
NAMES = (*SUITES, "load", "robustness")  # all that `eagle bench --suite` takes; the last two are not prompts of their own
KINDS = ("chat", "translation", "summary", "qa", "maths", "rag")
SHIPPED = Path("data") / "suites"  # not data/bench: there the bench step writes when its base folder is data/
# What is easy to draft (answers repeat the prompt's words) against what is not.
_CONTRASTS = (("summary", "chat"), ("rag", "maths"), ("translation", "qa"))
_TOLD = 5  # bad rows that are told one by one

Render = Callable[[list[dict[str, str]]], list[int]]
_Rendered = tuple[Prompt, list[int]]


@dataclass(frozen=True)
class Suite(Workload):
    """A workload with its name and the rows that were left out of it, counted by class of reason."""

    name: str = ""
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def switches(self) -> list[int]:
        """Indices of the prompts whose kind is another one than that of the prompt before: there the task switches."""
        return [at for at in range(1, len(self.kinds)) if self.kinds[at] != self.kinds[at - 1]]


def load_suite(
    name: str,
    *,
    root: Path,
    render: Render,
    max_prompt_tokens: int,
    count: int | None = None,
    dataset: Path | None = None,
    block: int = 4,
) -> Suite:
    """Return up to `count` prompts (None: all) of a suite as token ids; the same ones in the same order at every call.

    `name` is one of SUITES or the path of a prompt file, absolute or relative to `root`. `render` turns messages
    (`{"role", "content"}`) into the ids up to where the answer starts, as `eagle.target.template.render_prompt` does with
    a tokenizer. Rows that cannot be used, and prompts of more than `max_prompt_tokens` tokens, are left out, told with
    file and row, and counted in the suite's `dropped`.

    Order: `default` takes the kinds in turns; a file's prompts are spread evenly over the file, which is often sorted by
    topic; `mixed` has `block` prompts of one kind, then of another, then of the first again, for three pairs of
    kinds (shorter blocks when `count` would not hold one such there-and-back); `heldout` needs the folder of the data set.

    Raises ConfigError for a name that is neither a suite nor a readable file, or `heldout` without `dataset`; DataError
    when no row is usable; ValueError when `count`, `block` or `max_prompt_tokens` is not positive.
    """
    if block < 1 or max_prompt_tokens < 1 or (count is not None and count < 1):
        raise ValueError("count, block and max_prompt_tokens must be positive")
    quarantine = Quarantine()
    if name == "heldout":
        suite = _heldout(dataset, count, max_prompt_tokens, quarantine)
    else:
        read = _read_shipped if name in SUITES else _read_file
        usable = _render(read(name, root, max_prompt_tokens, quarantine), render, max_prompt_tokens, quarantine)
        _need_some(name, len(usable), quarantine)
        if name == "default":
            chosen = _in_turns(usable)[:count]
        elif name == "mixed":
            chosen = _blocks(usable, min(block, max(count // 3, 1)) if count else block)[:count]
        else:
            chosen = _spread(usable, count)
        suite = Suite(
            [ids for _, ids in chosen], [prompt.id for prompt, _ in chosen], [prompt.kind for prompt, _ in chosen],
            name, quarantine.reasons(),
        )  # fmt: skip
    _tell(name, quarantine)
    if count is not None and len(suite.prompts) < count and name != "heldout":
        say(f"bench: suite '{name}' has {len(suite.prompts)} prompts for the {count} asked for")
    return suite


def default_prompts(root: Path, render: Render, max_prompt_tokens: int, count: int | None = None) -> list[Prompt]:
    """Return up to `count` prompts of the suite `default` in its order, as texts. Raises and tells as `load_suite` does."""
    quarantine = Quarantine()
    usable = _render(_read_shipped("default", root, max_prompt_tokens, quarantine), render, max_prompt_tokens, quarantine)
    _need_some("default", len(usable), quarantine)
    _tell("default", quarantine)
    return [prompt for prompt, _ in _in_turns(usable)[:count]]


def _read_shipped(name: str, root: Path, limit: int, quarantine: Quarantine) -> list[Prompt]:
    files = sorted((root / SHIPPED).glob("*.jsonl"))
    if not files:
        raise DataError(f"suite '{name}': no prompts in {root / SHIPPED}; they ship with the project, restore that folder")
    return [prompt for path in files for prompt in read_prompt_file(path, (SHIPPED / path.name).as_posix(), limit, quarantine)]


def _read_file(name: str, root: Path, limit: int, quarantine: Quarantine) -> list[Prompt]:
    """Return the prompts of a file in row order; those without a kind of their own get the file's name as kind."""
    path = root / name
    try:
        there = path.is_file()
    except OSError:  # a name that is too long, or a folder that may not be entered
        there = False
    if not there:
        raise ConfigError(
            f"suite '{name}': no suite and no file of that name{_nearest(name, path)}; give one of {', '.join(NAMES)} "
            f"or a JSONL file, relative to {root} or absolute"
        )
    with tempfile.TemporaryDirectory(prefix="eagle-suite-") as folder:
        try:
            rows = _as_lines(path, Path(folder))
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"suite '{name}': cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        found = read_prompt_file(rows, path.name, limit, quarantine)
    stem = path.name.partition(".")[0][:40] or "file"
    return [Prompt(p.source, stem if p.kind == "file" else p.kind, p.user, p.system, p.file, p.row) for p in found]


def _nearest(name: str, path: Path) -> str:
    try:
        files = sorted(p.name for p in path.parent.glob("*.json*")) if path.parent.is_dir() else []
    except OSError:
        files = []
    return closest(name, NAMES) or closest(path.name, files)


def _as_lines(path: Path, folder: Path) -> Path:
    """Return a file with one row a line: `path` itself, or a copy in `folder` of what was packed or one JSON array."""
    plain, suffix = path, path.suffix
    if suffix == ".gz":
        plain, suffix = folder / "unpacked", path.with_suffix("").suffix
        with gzip.open(path) as packed, plain.open("wb") as out:
            shutil.copyfileobj(packed, out)
    else:
        path.open("rb").close()  # the reader's own message would name a key of the data set's configuration
    if suffix != ".json":
        return plain
    try:
        content = json.loads(plain.read_bytes())
    except (ValueError, RecursionError):
        return plain  # JSON Lines under another name, or broken: the reader tells row by row
    if not isinstance(content, list):
        return plain
    lines = folder / "lines"
    lines.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="ascii")
    return lines


def _render(prompts: Sequence[Prompt], render: Render, limit: int, quarantine: Quarantine) -> list[_Rendered]:
    """Render every prompt; what the chat template refuses or is too long goes to `quarantine`."""
    usable = []
    for prompt in prompts:
        try:
            ids = render(prompt.messages)
        except DataError as error:
            quarantine.add(prompt.file, prompt.row, f"template: {error}", prompt.text)
            continue
        if len(ids) > limit:
            quarantine.add(prompt.file, prompt.row, _too_long(len(ids), limit), prompt.text)
            continue
        usable.append((prompt, ids))
    return usable


def _too_long(tokens: int, limit: int) -> str:
    return f"prompt too long: {tokens} tokens, more than {limit}"


def _heldout(dataset: Path | None, count: int | None, limit: int, quarantine: Quarantine) -> Suite:
    if dataset is None:
        raise ConfigError("suite 'heldout': it needs a run's data set; run: eagle step dataset --dir BASE, or choose 'default'")
    work = load_workload(dataset, len(load_rows(dataset, "heldout")) if count is None else count)
    fits = [len(ids) <= limit for ids in work.prompts]
    for at, ids in enumerate(work.prompts):
        if not fits[at]:
            quarantine.add("heldout", at + 1, _too_long(len(ids), limit), work.ids[at])
    _need_some("heldout", sum(fits), quarantine)
    kept = [at for at, fit in enumerate(fits) if fit]
    return Suite(
        [work.prompts[at] for at in kept], [work.ids[at] for at in kept], [work.kinds[at] for at in kept],
        "heldout", quarantine.reasons(),
    )  # fmt: skip


def _by_kind(usable: Sequence[_Rendered]) -> dict[str, list[_Rendered]]:
    found: dict[str, list[_Rendered]] = {kind: [] for kind in KINDS}
    for entry in usable:
        found.setdefault(entry[0].kind, []).append(entry)
    return found


def _in_turns(usable: Sequence[_Rendered]) -> list[_Rendered]:
    """Return one prompt of every kind, then the next of every kind, and so on, so that any stretch is balanced."""
    kinds = _by_kind(usable).values()
    return [entries[at] for at in range(len(usable)) for entries in kinds if at < len(entries)]


def _blocks(usable: Sequence[_Rendered], block: int) -> list[_Rendered]:
    """Return the streams of `mixed`: for each pair of kinds a block of the first, of the second, of the first again."""
    kinds = _by_kind(usable)
    ordered: list[_Rendered] = []
    for first, second in _CONTRASTS:
        ordered += [*kinds[first][:block], *kinds[second][:block], *kinds[first][block : 2 * block]]
    return ordered


def _spread(usable: list[_Rendered], count: int | None) -> list[_Rendered]:
    if count is None or len(usable) <= count:
        return usable
    return [usable[at * len(usable) // count] for at in range(count)]


def _need_some(name: str, usable: int, quarantine: Quarantine) -> None:
    if usable:
        return
    first = quarantine.entries[0]
    raise DataError(
        f"suite '{name}': no usable row; {len(quarantine.entries)} left out, the first is {first.file}, row {first.row} "
        f"({first.reason})"
    )


def _tell(name: str, quarantine: Quarantine) -> None:
    entries = quarantine.entries
    for entry in entries[:_TOLD]:
        say(f"bench: {entry.file}, row {entry.row}, left out: {entry.reason}")
    if len(entries) > _TOLD:
        counts = ", ".join(f"{reason} {count}" for reason, count in quarantine.reasons().items())
        say(f"bench: suite '{name}': {len(entries)} rows left out in all: {counts}")
