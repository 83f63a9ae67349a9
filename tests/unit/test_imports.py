"""Our top-level `kernels` folder must not be taken for the Hugging Face package of that name, from the repository root."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"


def run(python: str, code: str) -> str:
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_product_environment_imports_everything_from_the_root() -> None:
    code = (
        "import transformers, kernels, eagle, flows\n"
        "from transformers import LlamaForCausalLM\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(kernels.__file__, is_kernels_available())"
    )
    path, available = run(sys.executable, code).rsplit(maxsplit=1)
    assert Path(path).is_relative_to(ROOT)
    assert available == "False"


@pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm here (make setup)")
def test_the_vllm_environment_imports_vllm_from_the_root() -> None:
    assert run(str(VLLM), "import transformers, vllm; print(vllm.__version__)").strip()


def test_heavy_packages_stay_in_their_rooms() -> None:
    rooms = {
        "prefect": ["flows"],
        "mlflow": ["eagle/registry"],
        "vllm": ["eagle/target/vllm_worker.py", "eagle/serve/plugin"],
        "matplotlib": ["eagle/bench"],
    }
    for package, allowed in rooms.items():
        for file in [*ROOT.glob("eagle/**/*.py"), *ROOT.glob("flows/**/*.py"), *ROOT.glob("kernels/**/*.py")]:
            place = file.relative_to(ROOT).as_posix()
            if not any(place == room or place.startswith(f"{room}/") for room in allowed):
                found = re.search(rf"^\s*(import|from) {package}\b", file.read_text(encoding="utf-8"), re.MULTILINE)
                assert found is None, f"{place}: {found}"
