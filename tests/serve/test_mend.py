"""What is mended in vLLM's CPU build: by itself, in the vLLM that is installed, and how a server comes to load it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from eagle.config import Config
from eagle.serve.launch import Wanted, command_of
from eagle.serve.plan import Speculation
from eagle.serve.plugin.mend import expand
from eagle.target.vllm import VllmBuild
from tests.toys import tiny_target

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (torch.tensor([0.7, 0.0, 1.5]), torch.tensor([0.7, 0.7, 1.0, 1.5])),
        (torch.tensor([5, 0, 7], dtype=torch.int32), torch.tensor([5, 5, 1, 7], dtype=torch.int32)),
    ],
)
def test_each_request_gets_its_own_value_at_all_its_positions(values: torch.Tensor, wanted: torch.Tensor) -> None:
    found = torch.full((4,), 99).to(values.dtype)
    expand(found, values, torch.tensor([2, 3, 4], dtype=torch.int32), 0, 1, 128)
    assert torch.equal(found, wanted)
    empty = found[:1].clone()
    expand(empty, values, torch.tensor([0, 0, 1], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=128)
    assert torch.equal(empty, values[2:])


def served(tmp_path: Path, speculation: Speculation, *, cpu: bool) -> list[str]:
    target = tiny_target(tmp_path / "target")
    build = VllmBuild("0.32.0", cpu)
    wanted = Wanted(tmp_path, target, "toy", Path("python"), build, speculation, Config(), tmp_path, ())
    return command_of(wanted, tmp_path / "private")


FIXED = Speculation("fixed", {"method": "eagle3", "model": "b", "num_speculative_tokens": 3})


def test_a_server_that_drafts_on_cpu_loads_it_with_and_without_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "private" / "lib"
    assert f"PYTHONPATH={library}" in served(tmp_path, FIXED, cpu=True)
    assert not any(word.startswith("VLLM_PLUGINS") for word in served(tmp_path, FIXED, cpu=True))
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    assert "VLLM_PLUGINS=lora,eagle_mend" in served(tmp_path, FIXED, cpu=True)
    for without in (served(tmp_path, FIXED, cpu=False), served(tmp_path, Speculation("off", None), cpu=True)):
        assert not any(word.startswith(("PYTHONPATH", "VLLM_PLUGINS")) for word in without)


CODE = """
import torch
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
current_platform.register_triton_kernel_overrides()
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
ends = torch.tensor([2, 3], dtype=torch.int32)
print(expand_batch_to_tokens(torch.tensor([0.5, 0.0]), ends, 3, 0, 1).tolist())
print(expand_batch_to_tokens(torch.tensor([7, 9], dtype=torch.int32), ends, 3).tolist())
"""


@pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm here (make setup)")
def test_the_installed_vllm_takes_it_over(tmp_path: Path) -> None:
    served(tmp_path, FIXED, cpu=True)
    environment = {"PYTHONPATH": str(tmp_path / "private" / "lib"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(VLLM), "-P", "-c", CODE], cwd=tmp_path, env={**environment, "VLLM_LOGGING_LEVEL": "ERROR"}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["[0.5, 0.5, 1.0]", "[7, 7, 9]"], done.stdout + done.stderr[-2000:]
