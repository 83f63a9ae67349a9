"""Compile every Triton kernel ahead of time for a CUDA architecture, as a check that needs no GPU and no CUDA toolkit.

    python -m kernels.aot --target 90 --json OUT

Each kernel is taken through Triton's compiler and the ptxas of the triton package to a cubin; the bundled cuobjdump then says
what the machine code takes: registers a thread, shared memory a program, local memory a thread (what spills go to). A module's
kernels are compiler or interpreter objects for the life of a process, so each target is compiled by a process of its own,
without TRITON_INTERPRET and with its compile cache in a temporary folder.

Exit code 0 when every kernel compiled, 1 when one did not (its row holds the error), 2 when nothing could be tried.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

OPERATIONS = (
    "add_rms_norm", "rejection", "input_norm", "rope_cache", "cached_attention", "silu_mul", "sample_head", "overlap_loss",
)  # fmt: skip
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Specimen:
    """One kernel with the types and constants that it is compiled with.

    `types` maps argument names to Triton's type names ('*bf16', 'i32'); pointers and the arguments `aligned` are taken as
    multiples of 16, as the just-in-time compiler finds them in practice.
    """

    kernel: Any
    hidden: int
    dtype: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    aligned: tuple[str, ...] = ("hidden",)
    num_stages: int = 3  # of loads before a product; Triton's own default


@dataclass(frozen=True)
class Report:
    """What one compiled kernel takes. Bytes of shared memory are a program's, registers and local bytes a thread's."""

    op: str
    kernel: str
    target: int
    hidden: int
    dtype: str
    num_warps: int
    registers: int | None = None
    shared_bytes: int | None = None
    spills: int | None = None
    ptx_version: str | None = None
    error: str | None = None


def compile_specimen(op: str, specimen: Specimen, target: int) -> Report:
    """Compile one kernel for compute capability `target` (90 = Hopper); a failure is a row with `error`, one line."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = specimen.kernel.arg_names
    signature = {name: specimen.types.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in specimen.aligned
    }
    head = (op, specimen.kernel.__name__, target, specimen.hidden, specimen.dtype, specimen.num_warps)
    try:
        source = ASTSource(fn=specimen.kernel, signature=signature, constexprs=specimen.constants, attrs=aligned)
        options = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        registers, stack, local = resource_usage(compiled.asm["cubin"])
        version = re.search(r"^\.version (\S+)", compiled.asm["ptx"], re.MULTILINE)
    except Exception as error:  # noqa: BLE001 - the compiler raises many types; the row says which
        return Report(*head, error=_one_line(error))
    return Report(*head, registers, compiled.metadata.shared, stack + local, version.group(1) if version else None)


def resource_usage(cubin: bytes) -> tuple[int, int, int]:
    """Return (registers, stack bytes, local bytes), each a thread's, of a cubin's one kernel, by the bundled cuobjdump.

    Its SHARED figure is left out: Triton asks for shared memory at launch, and the static part is only what the driver
    reserves (1 KiB). RuntimeError when the tool's answer is not understood.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(  # noqa: S603
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=False, timeout=60
        )
    found = USAGE.search(done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"cuobjdump (exit {done.returncode}): {(done.stderr or done.stdout).strip()[-300:]}")
    registers, stack, local = (int(group) for group in found.groups())
    return registers, stack, local


def compile_here(target: int) -> Iterator[Report]:
    """Compile every specimen of every operation for one target, in this process."""
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for op in OPERATIONS:
            for specimen in importlib.import_module(f"kernels.{op}").specimens():
                yield compile_specimen(op, specimen, target)


def compile_apart(target: int) -> list[Report]:
    """Compile for one target in a process of its own: the compiler aborts, rather than raises, on a target unknown to it."""
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "kernels.aot", "--here", "--target", str(target), "--json", str(out)]
        done = subprocess.run(  # noqa: S603
            command, cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True, errors="replace", check=False
        )
        if out.is_file():
            return [Report(**row) for row in json.loads(out.read_text(encoding="utf-8"))["kernels"]]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    error = next((line for line in lines if "ERROR" in line), lines[-1] if lines else "no message")
    error = f"the compiler ended with code {done.returncode}: {error[:400]}"
    return [Report(op, "*", target, 0, "*", 0, error=error) for op in OPERATIONS]


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines)[:400]}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description="compile the Triton kernels for CUDA targets")
    parser.add_argument("--target", type=int, nargs="+", default=[90], metavar="CC", help="compute capabilities, 90 = sm_90")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there; else to stdout")
    parser.add_argument("--here", action="store_true", help="compile in this process, not in one per target")
    options = parser.parse_args(arguments)
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        sys.stderr.write("error: triton is not installed; it has wheels for Linux only\n")
        return 2
    rows = [row for target in options.target for row in (compile_here if options.here else compile_apart)(target)]
    text = json.dumps({"triton": version, "kernels": [asdict(row) for row in rows]}, indent=1) + "\n"
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    for row in rows:
        if row.error:
            sys.stderr.write(f"error: {row.op}: {row.kernel} {row.dtype} hidden {row.hidden} sm_{row.target}: {row.error}\n")
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
