"""The projects that the figures of operations work in: params.yaml, a tiny random target, finished inputs of the register step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from benchmarks.figures import ROOT
from eagle import manifest
from eagle.profiles import load_config
from eagle.steps import STEPS, key_parts
from tests.toys import tiny_target

WORK = ROOT / "build" / "figures-operations"
INPUTS = STEPS["register"].inputs


def make_project(folder: Path) -> Path:
    """Make a fresh project at `folder` with the tiny profile's settings as its own and a random target of 4 layers."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    params: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    tiny: dict[str, Any] = yaml.safe_load((ROOT / "profiles" / "tiny.yaml").read_text(encoding="utf-8"))
    for section, values in tiny.items():
        params[section].update(values)
    params["target"]["model"] = "target"
    params["runtime"]["threads"] = 1
    (folder / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    shutil.copytree(ROOT / "data" / "prompts", folder / "data" / "prompts")
    tiny_target(folder / "target")
    return folder


def fill_inputs(root: Path, run_id: str, acceptance: float) -> Path:
    """Write finished inputs of the register step, as if validated in vLLM, with this acceptance length. Returns their folder."""
    base, config = root / "runs" / run_id, load_config(root)
    for name in INPUTS:
        (base / name).mkdir(parents=True)
        manifest.write_json(base / name / manifest.METRICS, {"acceptance_length": acceptance})
    bench = {"equal_tokens": 1.0, "memory_overhead": 0.2, "speedup_b1": 1.1, "acceptance_length": acceptance}
    manifest.write_json(base / "bench" / manifest.METRICS, bench)
    bundle = base / "bundle" / "bundle"
    bundle.mkdir()
    save_file({"fc.weight": torch.full((64, 192), acceptance)}, bundle / "model.safetensors")
    manifest.write_json(bundle / "config.json", {"model_type": "llama", "run": run_id})
    validation = {"validated": True, "acceptance_length": acceptance, "equal_tokens": 1.0, "prompt_ids": ["a"]}
    manifest.write_json(base / "bundle" / "validation.json", validation | {"draft_tokens": 2, "max_new_tokens": 8})
    for name in INPUTS:
        manifest.write_manifest(base / name, name, key_parts(STEPS[name], config, root, base))
    return base
