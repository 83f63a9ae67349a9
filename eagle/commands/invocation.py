"""What every command takes: the global options, and the configuration and folders that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from eagle.config import Config
from eagle.profiles import load_config, project_root

ProfileOption = Annotated[str | None, typer.Option("--profile", "-p", help="default, a name in profiles/, or a YAML file.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", "-s", help="Override: section.key=value. Repeatable.")]
DirOption = Annotated[Path | None, typer.Option("--dir", help="Folder of the step outputs; default runs/<profile>.")]


@dataclass(frozen=True)
class Invocation:
    """What the global options said; commands add their own on top."""

    root: Path | None
    profile: str | None
    overrides: tuple[str, ...]


def load(context: typer.Context, profile: str | None, overrides: list[str] | None) -> tuple[Config, Path, str]:
    """Return the configuration, the project's folder and the profile's name. ConfigError as `load_config` raises it."""
    said: Invocation = context.obj
    root = said.root.resolve() if said.root else project_root()
    name = profile or said.profile or "default"
    return load_config(root, name, (*said.overrides, *(overrides or ()))), root, name


def base_folder(root: Path, config: Config, profile: str, given: Path | None) -> Path:
    """Return the folder of the step outputs: the given one, else runs/<profile>."""
    return given.resolve() if given else root / config.paths.runs / Path(profile).stem
