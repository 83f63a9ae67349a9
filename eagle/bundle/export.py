"""Draft checkpoint to bundle: a copy and a completeness check, because the names are vLLM's already."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from eagle import manifest
from eagle.config import DType
from eagle.draft.io import CONFIG, WEIGHTS, check_tensors, read_spec, save_tensors, tensor_headers
from eagle.draft.spec import FLOATS, DraftSpec


def export_draft(draft: Path, folder: Path, dtype: DType) -> DraftSpec:
    """Write config.json and model.safetensors of the checkpoint in `draft` to `folder`, floats in `dtype`.

    Raises BundleError naming the first tensor or key that is missing, extra or of another shape.
    """
    spec = read_spec(draft)
    check_tensors(tensor_headers(draft / WEIGHTS), spec, str(draft / WEIGHTS))
    wanted = FLOATS[dtype]
    tensors = {name: t.to(wanted).contiguous() if t.is_floating_point() else t for name, t in load_file(draft / WEIGHTS).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, tensors)
    manifest.write_json(folder / CONFIG, spec.to_vllm_config(dtype))
    return spec
