"""`eagle tune`: the tune step, or only its launch table."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from eagle.commands.invocation import DirOption, ProfileOption, SetOption, base_folder, load


def tune(
    context: typer.Context,
    report: Annotated[bool, typer.Option("--report", help="Only print what a draft step of the run launches.")] = False,
    folder: DirOption = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Bring the step 'tune' of a run up to date, or report on its draft. Example: eagle tune --report --dir runs/default

    The report: kernels, launches, operator calls and time of a draft step, for each form in which it can run.
    """
    config, root, chosen = load(context, profile, overrides)
    base = base_folder(root, config, chosen, folder)
    if report:
        from eagle.bench.launch_report import report_of_run

        sys.stdout.write(report_of_run(base, config))
        return
    from eagle.steps import run_step

    run_step("tune", config, root, base)
