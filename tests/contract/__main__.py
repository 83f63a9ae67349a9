"""`python -m tests.contract [--only TEXT] [--json FILE]`: every case of the contract with vLLM, as a table."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.contract.broken import BREAKS, broken_copy
from tests.contract.cases import TELLING, all_cases
from tests.contract.harness import NEAR, Job, Verdict, make_job, run_jobs


def contract(
    only: Annotated[str, typer.Option("--only", help="Only cases whose name holds this.")] = "",
    out: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Run every case in vLLM and compare its proposals with ours; exit code 1 when one differs or a broken bundle is not seen."""
    with tempfile.TemporaryDirectory(prefix="contract-") as scratch:
        work = Path(scratch)
        jobs = [make_job(case, work) for case in all_cases() if only in case.name]
        sound = make_job(TELLING[0], work / "broken")
        broken = [
            Job(how, sound.target, broken_copy(sound.bundle, how, work / f"broken-{number}"), sound.ours)
            for number, how in enumerate(BREAKS)
            if only in how
        ]
        verdicts, seen = run_jobs(jobs, work), run_jobs(broken, work)
    Console(width=None if sys.stdout.isatty() else 140).print(_table(verdicts, seen))
    if out is not None:
        out.write_text(json.dumps([asdict(verdict) for verdict in verdicts + seen], indent=1), encoding="utf-8")
    missed = [v.name for v in verdicts if not v.equal] + [v.name for v in seen if not v.differences]
    if missed:
        sys.stderr.write(f"contract: {len(missed)} of {len(verdicts) + len(seen)} failed: {', '.join(missed)}\n")
        raise typer.Exit(1)


def _table(verdicts: list[Verdict], seen: list[Verdict]) -> Table:
    table = Table(title="vLLM's proposals beside ours; below the line broken bundles, which must differ", title_justify="left")
    for column in ("case", "proposals", "tokens", "accepted", f"near ties (< {NEAR:g})", "differences", "seconds"):
        table.add_column(column, overflow="fold")
    for part in (verdicts, seen):
        for v in part:
            differ = v.error or str(len(v.differences))
            counts = map(str, (v.proposals, v.tokens, v.accepted, len(v.near_ties)))
            table.add_row(v.name, *counts, differ, f"{v.seconds:.1f}")
        table.add_section()
    return table


if __name__ == "__main__":
    typer.run(contract)
