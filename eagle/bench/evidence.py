"""What a run has measured of its draft: seconds by batch size and K, and acceptance by position. Reads results only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle import manifest
from eagle.bench.predict import speedup, survival_to, tuned_costs
from eagle.decode.cost import CostTable
from eagle.draft.io import read_spec
from eagle.draft.spec import DraftSpec
from eagle.errors import StepFailed

METHOD = "eagle31"
Seconds = dict[tuple[int, int], float]


@dataclass(frozen=True)
class Evidence:
    """A run's draft and what was measured of it. `by_position`: cumulative, of the longest draft at the lowest temperature.

    `batches`: the batch sizes with measured costs. `notes`: for people, where each number comes from.
    """

    name: str
    spec: DraftSpec
    data: str
    by_position: list[float]
    costs: CostTable
    batches: list[int]
    notes: list[str]

    @property
    def measured_tokens(self) -> int:
        """The largest K whose acceptance was measured."""
        return len(self.by_position)


def read_evidence(base: Path) -> Evidence:
    """Return what the run folder `base` holds. Raises StepFailed, naming the step, when there is no draft or nothing measured."""
    draft = base / "policy" / "draft"
    if not (draft / "config.json").is_file():
        raise StepFailed(f"{base}: no finished draft there (step policy); run: make run, or eagle step policy --dir {base}")
    results = _results(base)
    acceptance = [(name, a) for name, found in results.items() for a in found["acceptance"] if a["method"] == METHOD]
    if not acceptance:
        raise StepFailed(f"{base}: no measured acceptance of its draft; run: eagle step bench --dir {base}")
    where, best = min(acceptance, key=lambda entry: (entry[1]["temperature"], -entry[1]["draft_tokens"]))
    target, draft_seconds, sources = _costs(base, results)
    if not target:
        raise StepFailed(f"{base}: no measured speed of its draft; run: eagle step bench --dir {base}")
    costs = CostTable(target, draft_seconds)
    positions = " ".join(f"{share:.2f}" for share in best["acceptance_by_position"])
    notes = [f"acceptance by position at T={best['temperature']:g}: {positions} ({where}, {best['drafts']} drafts)"]
    notes += [f"seconds at batch {batch}: {source}" for batch, source in sorted(sources.items())]
    notes += _checks(results, costs, best["acceptance_by_position"], best["temperature"])
    found = manifest.read_manifest(base / "policy")
    data = str(found["parts"].get("inputs", {}).get("dataset", "")) if found else ""
    return Evidence(base.name, read_spec(draft), data, best["acceptance_by_position"], costs, sorted(sources), notes)


def read_others(base: Path, own: Evidence) -> list[Evidence]:
    """Return the evidence of the runs beside `base` whose draft is another network, trained on the same data set."""
    found = []
    for folder in sorted(path for path in base.parent.iterdir() if path.is_dir() and path != base):
        if not (folder / "policy" / "draft" / "config.json").is_file() or not _results(folder):
            continue
        try:
            other = read_evidence(folder)
        except StepFailed:
            continue  # a run that is not finished is no evidence
        if own.data and other.data == own.data and other.spec != own.spec:
            found.append(other)
    return found


def _results(base: Path) -> dict[str, dict[str, Any]]:
    """Return every bench.json of the run by its folder's name; the bench step's first."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(base.glob("bench*/bench.json"), key=lambda p: (p.parent.name != "bench", p.parent.name)):
        try:
            content = manifest.read_json(path)
        except (OSError, ValueError) as error:
            raise StepFailed(f"{path}: cannot be read ({error}); run: eagle step bench --dir {base} --force") from None
        if isinstance(content, dict) and {"rows", "acceptance", "dtype", "costs"} <= set(content):
            found[path.parent.name] = content
    return found


def _costs(base: Path, results: Mapping[str, dict[str, Any]]) -> tuple[Seconds, Seconds, dict[int, str]]:
    """Return seconds of target passes and of drafts, and where those of each batch size come from.

    One source a batch size, all in one dtype: the tables that the controller decides by, which know every K; else the
    timed rows; else the tune step.
    """
    target: Seconds = {}
    draft: Seconds = {}
    sources: dict[int, str] = {}
    dtype = next(iter(results.values()))["dtype"]

    def take(batch: int, passes: Seconds, drafts: Seconds, source: str) -> None:
        if batch not in sources and passes and drafts:
            target.update(passes)
            draft.update(drafts)
            sources[batch] = source

    same = {name: found for name, found in results.items() if found["dtype"] == dtype}
    for name, found in same.items():
        for key, content in found["costs"].items():
            if key.startswith(f"{METHOD}, "):
                rows = {kind: {(b, k): s for b, k, s in content[kind]} for kind in ("target", "draft")}
                for batch in {b for b, _ in rows["target"]}:
                    parts = [{k: s for k, s in rows[kind].items() if k[0] == batch} for kind in ("target", "draft")]
                    take(batch, parts[0], parts[1], f"the controller's cost table in {name}, {dtype}")
    for name, found in same.items():
        for batch in sorted({row["batch"] for row in found["rows"]}):
            take(batch, *_row_seconds(found["rows"], batch), f"timed rows of {name}, {dtype}")
    tuned = base / "tune" / "tuned.json"
    table = tuned_costs(manifest.read_json(tuned), dtype) if tuned.is_file() else None
    for batch in sorted({b for b, _ in table.target}) if table else []:
        assert table is not None  # noqa: S101 -- for the type checker
        parts = [{k: s for k, s in rows.items() if k[0] == batch} for rows in (table.target, table.draft)]
        take(batch, parts[0], parts[1], f"the tune step, {dtype}, short contexts")
    return target, draft, sources


def _row_seconds(rows: list[dict[str, Any]], batch: int) -> tuple[Seconds, Seconds]:
    """Return the seconds of target passes and drafts in the timed rows of one batch size, at its lowest temperature."""
    here = [row for row in rows if row["batch"] == batch]
    lowest = min(row["temperature"] for row in here)
    plain = [row for row in here if row["method"] == "none" and row["temperature"] == lowest]
    drafted = [row for row in here if row["method"] == METHOD and row["temperature"] == lowest]
    if not plain or not drafted or plain[0]["target_step_ms"]["median"] <= 0:
        return {}, {}
    target = {(batch, 1): plain[0]["target_step_ms"]["median"] / 1e3}
    draft: Seconds = {}
    for row in drafted:
        length, step = row["draft_tokens"], row["draft_step_ms"]["median"] / 1e3
        target[batch, length + 1] = row["target_step_ms"]["median"] / 1e3
        draft[batch, length] = length * step
        draft.setdefault((batch, 1), step)  # in proportion: the costs of a single token were not timed
    return target, draft


def _checks(results: Mapping[str, dict[str, Any]], costs: CostTable, by_position: list[float], temperature: float) -> list[str]:
    """Return lines that set the formula beside the measured speed of the run's own draft."""
    lines = []
    for name, found in results.items():
        for row in found["rows"]:
            if row["method"] == METHOD and row["temperature"] == temperature and row["speedup"]:
                survival = survival_to(by_position, row["draft_tokens"])
                said, got = speedup(costs, survival, row["batch"], row["draft_tokens"]), row["speedup"]
                lines.append(
                    f"batch {row['batch']}, K={row['draft_tokens']}: predicted {said:.2f}x, measured {got['median']:.2f}x "
                    f"[{got['min']:.2f}..{got['max']:.2f}] ({name})"
                )
    return lines
