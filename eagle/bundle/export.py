"""Draft checkpoint to bundle: a copy and a completeness check, because the names are vLLM's already."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from eagle import manifest
from eagle.bundle.limits import check_limits, portable
from eagle.config import DType
from eagle.draft.io import CONFIG, WEIGHTS, check_tensors, read_spec, save_tensors, tensor_headers
from eagle.draft.spec import FLOATS, DraftSpec
from eagle.errors import BundleError, ConfigError, closest

# where a given folder may keep its draft: itself, a step's output, a run's
PLACES = (".", "bundle", "draft", "bundle/bundle", "policy/draft")


def read_checkpoint(draft: Path, dtype: DType) -> tuple[DraftSpec, dict[str, Tensor]]:
    """Return a checkpoint's spec, spelt as vLLM takes it, and its tensors, floats in `dtype`.

    Raises BundleError naming the first tensor or key that is missing, extra or of another shape, or what vLLM cannot do.
    """
    spec = portable(read_spec(draft))
    check_limits(spec)
    check_tensors(tensor_headers(draft / WEIGHTS), spec, str(draft / WEIGHTS))
    wanted = FLOATS[dtype]
    loaded = load_file(draft / WEIGHTS)
    return spec, {name: t.to(wanted).contiguous() if t.is_floating_point() else t for name, t in loaded.items()}


def export_draft(draft: Path, folder: Path, dtype: DType) -> DraftSpec:
    """Write config.json and model.safetensors of the checkpoint in `draft` to `folder`, floats in `dtype`.

    Raises BundleError as `read_checkpoint` does; nothing is written then.
    """
    spec, tensors = read_checkpoint(draft, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, tensors)
    manifest.write_json(folder / CONFIG, spec.to_vllm_config(dtype))
    return spec


def find_draft_folder(given: Path) -> Path:
    """Return the folder with the draft's two files for a draft, a bundle, a step's output or a run. BundleError when none."""
    for place in PLACES:
        if all((given / place / name).is_file() for name in (CONFIG, WEIGHTS)):
            return (given / place).resolve()
    if given.is_dir():
        raise BundleError(f"{given} holds no draft ({CONFIG} and {WEIGHTS}); give a draft's, a bundle's or a run's folder")
    beside = sorted(path.name for path in given.parent.iterdir() if path.is_dir()) if given.parent.is_dir() else []
    raise BundleError(f"no folder {given}{closest(given.name, beside)}; give a draft's, a bundle's or a run's folder")


@contextmanager
def fresh_folder(out: Path) -> Iterator[Path]:
    """Give a private folder that becomes `out` when the block ends well, and is removed when it does not.

    Raises ConfigError when `out` is there already and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {out} is there already; give a new folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield private
        private.chmod(0o755)
        private.replace(out)
    finally:
        shutil.rmtree(private, ignore_errors=True)
