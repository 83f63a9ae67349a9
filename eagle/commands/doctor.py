"""`eagle doctor`: prints what was found and, with --fix, what became of it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from eagle.commands.invocation import ProfileOption, SetOption, load


def doctor(
    context: typer.Context,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended.")] = False,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Find what a kill -9 or a power cut left, and mend it; exit code 1 when something is left. Example: eagle doctor --fix"""
    from eagle.doctor.examine import examine, mend

    config, root, _ = load(context, profile, overrides)
    found = examine(config, root)
    if not found:
        sys.stdout.write("nothing found\n")
        return
    mended = mend(found) if fix else [False] * len(found)
    for number, (finding, done) in enumerate(zip(found, mended, strict=True), start=1):
        lines = (f"{number}. {finding.what}", f"where: {finding.where}", f"safe:  {finding.safe}", f"--fix: {finding.fix}")
        sys.stdout.write("\n   ".join(lines) + "\n")
        if fix:
            sys.stdout.write(f"   {'mended' if done else 'left as it is'}\n")
    left = examine(config, root) if fix else found
    after = "" if fix else "; mend: eagle doctor --fix"
    sys.stdout.write(f"{len(found)} found, {sum(mended)} mended, {len(left)} left{after}\n")
    if left:
        raise typer.Exit(1)
