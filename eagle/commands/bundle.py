"""`eagle bundle`: draft bundles, checked and in other layouts."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eagle.commands.invocation import ProfileOption, SetOption, load
from eagle.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="vLLM-ready draft bundles.")


class Format(StrEnum):
    """Layouts that a draft can be written in."""

    VLLM = "vllm"
    SPECULATORS = "speculators"


@app.command("validate")
def validate(
    path: Annotated[Path, typer.Argument(help="The bundle folder.")],
    target: Annotated[
        Path | None, typer.Option("--target", help="Target folder to check the widths and the vocabulary against.")
    ] = None,
) -> None:
    """Check a bundle against vLLM's contract. Example: eagle bundle validate runs/default/bundle/bundle"""
    from eagle.bundle.validate import check_bundle

    report = check_bundle(path, target)
    sys.stdout.write(f"{report}\n")


@app.command("export")
def export(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="A run's, a draft's or a bundle's folder, or models:/NAME@champion.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write; must be new or empty.")],
    layout: Annotated[
        Format, typer.Option("--format", help="vllm: as in a bundle; speculators: that package's layout.")
    ] = Format.VLLM,
    verifier: Annotated[
        str | None, typer.Option("--verifier", help="speculators: what the file names as the target; default: target.model.")
    ] = None,
    profile: ProfileOption = None,
    overrides: SetOption = None,
) -> None:
    """Write a draft's weights and config.json, nothing else, in a layout of your choice.

    Example: eagle bundle export runs/default --format speculators --out my-draft
    """
    from eagle.bundle.export import export_draft, find_draft_folder, fresh_folder
    from eagle.bundle.speculators import Verifier, export_speculators
    from eagle.bundle.validate import check_fits
    from eagle.draft.io import read_spec
    from eagle.serve.resolve import find_bundle
    from eagle.target.load import ensure_target
    from eagle.target.resolve import local_target

    if verifier is not None and layout is not Format.SPECULATORS:
        raise ConfigError("--verifier: only the speculators layout names the target; add --format speculators, or leave it out")
    config, root, _ = load(context, profile, overrides)
    draft = find_draft_folder(find_bundle(source, False, config, root))
    if layout is Format.VLLM:
        with fresh_folder(out) as private:
            spec = export_draft(draft, private, config.bundle.dtype)
    else:
        target = ensure_target(config.target, root, root / config.paths.cache)
        check_fits(read_spec(draft), target)
        on_hub = config.target.model != "demo" and local_target(config.target, root, root / config.paths.cache) is None
        named = Verifier.of(target, verifier or (config.target.model if on_hub else None))
        with fresh_folder(out) as private:
            spec = export_speculators(draft, private, named, config.bundle.draft_tokens, config.bundle.dtype)
    vocabulary = f"vocabulary {spec.draft_vocab_size} of {spec.vocab_size}"
    sys.stdout.write(f"{out}: {layout.value} layout, {spec.num_layers} layers, {vocabulary}\n")
