"""A lint of the kernels' source: nothing that Triton's interpreter cannot show.

The interpreter computes 16-bit floats wrongly, without a word: what is loaded as such must be widened at once. It knows no
inline assembly, no device library and no order between programs: only operations of the list below, which the interpreted
tests run, may be used.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(path for path in (ROOT / "kernels").glob("*.py") if "@triton.jit" in path.read_text(encoding="utf-8"))
SHOWN = {
    "arange", "broadcast_to", "cdiv", "constexpr", "cumsum", "dot", "exp", "float32", "float64", "full", "int32", "int64", "load",
    "log", "max", "maximum", "min", "minimum", "num_programs", "philox", "program_id", "sqrt", "store", "sum", "trans",
    "where", "zeros",
}  # fmt: skip


def jitted(source: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "triton.jit" for d in node.decorator_list):
            yield node


def pointers(node: ast.expr, function: ast.FunctionDef) -> set[str]:
    """The pointer arguments that an address is made of, through the names that it is assigned to."""
    found: set[str] = set()
    for name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
        if name.endswith("_ptr"):
            found.add(name)
            continue
        for assign in ast.walk(function):
            if isinstance(assign, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in assign.targets):
                found |= {n.id for n in ast.walk(assign.value) if isinstance(n, ast.Name) and n.id.endswith("_ptr")}
    return found


def complaints(source: str, wide: Mapping[str, set[str]] = MappingProxyType({})) -> list[str]:
    """One line for each use of what the interpreter cannot show. `wide`: see `never_16_bits`."""
    found = []
    for function in jitted(source):
        parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tl" and node.attr not in SHOWN:
                found.append(f"{function.name}: tl.{node.attr}")
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"):
                continue
            known = wide.get(function.name, {"token_ptr", "place_ptr"})
            narrow = sorted(pointers(node.args[0], function) - known)
            around = parents.get(parents[node]) if isinstance(parents[node], ast.Attribute) else None
            widened = isinstance(around, ast.Call) and ast.unparse(around).endswith((".to(tl.float32)", ".to(tl.float64)"))
            if narrow and not widened:
                found.append(f"{function.name}: {narrow[0]} is not widened")
    return found


def never_16_bits(module: str) -> dict[str, set[str]]:
    """{kernel: pointers that none of its specimens has as 16-bit floats}."""
    found: dict[str, set[str]] = {}
    for specimen in importlib.import_module(f"kernels.{module}").specimens():
        wide = {name for name, kind in specimen.types.items() if kind not in ("*bf16", "*fp16")}
        name = specimen.kernel.__name__
        found[name] = found.get(name, wide) & wide
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_use_what_the_interpreter_shows(path):
    source = path.read_text(encoding="utf-8")
    assert list(jitted(source))
    assert complaints(source, never_16_bits(path.stem)) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("y = tl.load(x_ptr + 1)", "f: x_ptr is not widened"),
        ("at = x_ptr + 1\n    y = tl.load(at) * 2.0", "f: x_ptr is not widened"),
        ("y = tl.load(x_ptr).to(tl.bfloat16)", "f: tl.bfloat16"),
        ("y = tl.inline_asm_elementwise('', '', [], tl.float32, True, 1)", "f: tl.inline_asm_elementwise"),
    ],
)
def test_a_use_would_be_seen(line, complaint):
    assert complaint in complaints(f"@triton.jit\ndef f(x_ptr):\n    {line}\n")
    assert complaints("@triton.jit\ndef f(x_ptr, token_ptr):\n    y = tl.load(x_ptr).to(tl.float32) + tl.load(token_ptr)\n") == []
