"""The Triton kernels where there is no GPU: interpreted for their values, compiled ahead of time for what they take."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.aot import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("triton")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in the repository root, one thread, without the kernels' own variables unless given."""
    base = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "EAGLE_KERNELS")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**base, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    "file",
    ["interpreted.py", "interpreted_step.py", "interpreted_head.py", "interpreted_draft.py", "interpreted_tune.py"],
)
def test_interpreted_kernels_against_the_oracle(file):
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/kernels/{file}", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def every_kernel() -> set[str]:
    """The names of all Triton kernels in the source: jitted, and no helper (those begin with an underscore)."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "kernels").glob("*.py")]
    return {name for text in sources for name in re.findall(r"^@triton\.jit\ndef ([a-z]\w*)", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("aot") / "aot.json"
    done = run("-m", "kernels.aot", "--target", "90", "--json", str(out), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_every_kernel_compiles_for_hopper_without_spills(compiled):
    rows = compiled["kernels"]
    assert {row["kernel"] for row in rows} == every_kernel()
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    assert {row["hidden"] for row in rows if row["op"] == "add_rms_norm"} == {576, 4096, 8192}
    for row in rows:
        assert row["error"] is None, row
        assert row["spills"] == 0, row
        assert 16 <= row["registers"] <= 255, row
        assert 0 <= row["shared_bytes"] <= 99 * 1024, row  # what a program may have on every target since sm_86
        assert float(row["ptx_version"]) >= 8.0, row


def test_a_target_that_cannot_be_compiled_is_an_explicit_error(tmp_path):
    out = tmp_path / "aot.json"
    done = run("-m", "kernels.aot", "--target", "999", "--json", str(out))
    assert done.returncode == 1
    assert "sm_999: the compiler ended with code" in done.stderr
    assert "Traceback" not in done.stderr
    rows = json.loads(out.read_text())["kernels"]
    assert [row["op"] for row in rows] == list(OPERATIONS)
    assert rows[0]["error"]
    assert rows[0]["registers"] is None


def test_a_spill_would_be_seen():
    """The figure is real: the same backward with four times the numbers a thread does spill."""
    code = (
        "import os, tempfile; os.environ['TRITON_CACHE_DIR'] = tempfile.mkdtemp()\n"
        "from dataclasses import replace\nfrom kernels.add_rms_norm import specimens\nfrom kernels.aot import compile_specimen\n"
        "s = next(s for s in specimens() if s.hidden == 4096 and s.kernel.__name__ == 'backward_kernel')\n"
        "print(compile_specimen('x', replace(s, num_warps=2), 90).spills)"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
