"""The bundle's README.md: what the draft is for, what it was trained on, and what was measured. Nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eagle import manifest
from eagle.bundle.validate import BundleReport
from eagle.serve.command import serve_command, serve_line
from eagle.steps import StepContext
from eagle.target.load import ensure_target
from eagle.target.resolve import DEMO_NAME, target_fingerprint
from eagle.target.vllm import find_vllm, vllm_build

TEMPLATE = "README.md.j2"
DEMO_LICENCE = "apache-2.0"  # SmolLM2's, on its hub page; the package that carries its weights holds no model card


def write_card(context: StepContext, folder: Path, report: BundleReport, validation: dict[str, Any]) -> None:
    """Render README.md into the bundle from the outputs of the dataset and bench steps and the validation."""
    config = context.config
    target = ensure_target(config.target, context.root, context.cache)
    interpreter = find_vllm(config.vllm, context.root)
    # The card travels with the bundle: no path of this machine belongs in it.
    command = serve_command(
        Path("BUNDLE"), "TARGET", interpreter and Path("python"), config, config.bundle.draft_tokens,
        cpu=interpreter is not None and vllm_build(interpreter).cpu,
    )  # fmt: skip
    bench = manifest.read_json(context.inputs["bench"] / "bench.json")
    values = {
        "target": {
            "name": DEMO_NAME if config.target.model == "demo" else _name(config.target.model),
            "revision": config.target.revision,
            "fingerprint": target_fingerprint(config.target, context.root, context.cache),
        },
        "spec": report.spec,
        "parameters": report.parameters,
        "dtype": report.dtype,
        "bytes": report.bytes,
        "notes": report.notes,
        "data": describe_data(context.inputs["dataset"]),
        "acceptance": acceptance_rows(bench, validation),
        "validation": validation,
        "machine": bench,
        "speed": speed_rows(bench),
        "serve": serve_line(command),
        "licence": DEMO_LICENCE if config.target.model == "demo" else stated_licence(target),
    }
    manifest.write_text(folder / "README.md", render(values))


def render(values: dict[str, Any]) -> str:
    """Return the card's text. A value that the template asks for and does not get is an error, never a blank."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=False,
        autoescape=False,  # noqa: S701 -- Markdown
    )  # fmt: skip
    return environment.get_template(TEMPLATE).render(values).rstrip() + "\n"


def _name(model: str) -> str:
    return Path(model).name if Path(model).is_absolute() or model.startswith(".") else model


def describe_data(dataset: Path) -> dict[str, Any]:
    """Return the card's figures of a dataset step's folder (dataset.json and stats.json)."""
    about, stats = manifest.read_json(dataset / "dataset.json"), manifest.read_json(dataset / "stats.json")
    train = stats["splits"]["train"]
    return {
        "template": about["chat_template_sha256"],
        "backend": about["generated_by"],
        "dtype": about["dtype"],
        "seed": about["seed"],
        "splits": [{"name": name, **stats["splits"][name]} for name in ("train", "heldout")],
        "kinds": _counts(train["by_kind"]),
        "temperatures": _counts(train["by_temperature"]),
    }


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def acceptance_rows(bench: dict[str, Any], validation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the acceptance table: vLLM's count first, then what the bench step counted."""
    rows = []
    if validation["validated"]:
        rows.append(_row(f"vLLM {validation['vllm_version']}", "float32", validation, validation["draft_tokens"]))
        reference = {**validation["reference"], "temperature": validation["temperature"]}
        rows.append(_row("reference engine", "float32", reference, validation["draft_tokens"]))
    own = [entry for entry in bench["acceptance"] if entry["method"] == "eagle31"]
    return rows + [_row("reference engine (bench)", bench["dtype"], entry, entry["draft_tokens"]) for entry in own]


def _row(where: str, dtype: str, found: dict[str, Any], k: int) -> dict[str, Any]:
    return {
        "where": where,
        "dtype": dtype,
        "temperature": f"{found['temperature']:g}",
        "k": k,
        "length": found["acceptance_length"],
        "by_position": " ".join(f"{share:.2f}" for share in found["acceptance_by_position"]),
        "drafts": found["drafts"],
    }


def speed_rows(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the speed table: every measured draft length beside the run without speculation."""
    without = {(row["batch"], row["temperature"]): row for row in bench["rows"] if row["method"] == "none"}
    return [
        {
            "batch": row["batch"],
            "temperature": f"{row['temperature']:g}",
            "k": row["draft_tokens"],
            "tokens_per_second": _spread(row["tokens_per_second"], ".1f"),
            "without": _spread(without[(row["batch"], row["temperature"])]["tokens_per_second"], ".1f"),
            "speedup": _spread(row["speedup"], ".2f"),
            "predicted": "-" if row.get("predicted_speedup") is None else f"{row['predicted_speedup']:.2f}",
        }
        for row in bench["rows"]
        if row["method"] == "eagle31"
    ]


def _spread(found: dict[str, Any], form: str) -> str:
    return f"{found['median']:{form}} [{found['min']:{form}}, {found['max']:{form}}]"


def stated_licence(target: Path) -> str | None:
    """Return the licence that the front matter of the target's README.md states, or None."""
    card = target / "README.md"
    if not card.is_file():
        return None
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        content = yaml.safe_load(parts[1])
    except (yaml.YAMLError, ValueError, RecursionError):  # also what PyYAML lets through: dates that do not exist, nesting
        return None
    found = content.get("license") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None
