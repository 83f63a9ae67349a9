"""The same operations by others: torch.compile of the oracle, and Liger-Kernel's where it is installed; and what each must move."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from kernels import reference
from kernels.spaces import Problem

Call = Callable[[], Any]


def compiled(problem: Problem, device: str, backend: str) -> Call | None:
    """Return the oracle of a problem through torch.compile (`backend` 'inductor'), None where the oracle is no rival.

    The cache operations and the rejection are written for clearness there, with indexing that torch.compile cannot fuse.
    """
    rows, kind = problem.rows, getattr(torch, problem.dtype)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(kind)

    arguments: tuple[Any, ...]
    if problem.op == "add_rms_norm":
        (hidden,) = problem.shape
        form: Callable[..., Any] = reference.add_rms_norm
        arguments = (random(rows, hidden), random(rows, hidden), random(hidden), 1e-5)
    elif problem.op == "feature_norms":
        hidden, parts = problem.shape
        form, arguments = reference.feature_norms, (random(rows, parts * hidden), random(parts, hidden), 1e-5)
    elif problem.op == "silu_mul":
        form, arguments = reference.silu_mul, (random(rows, 2 * problem.shape[0]),)
    elif problem.op == "sample_head":
        hidden, vocab = problem.shape
        form, arguments = _greedy_head, (random(rows, hidden), random(vocab, hidden))
    elif problem.op == "dense_terms":
        form, arguments = reference.dense_terms, (random(rows, problem.shape[0]), random(rows, problem.shape[0]).softmax(-1))
    else:
        return None
    fast = torch.compile(form, backend=backend, dynamic=False)
    return lambda: fast(*arguments)


def _greedy_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in the weights' dtype, as torch would run it: the oracle's float32 one is four times the work."""
    return (x @ weight.T).argmax(-1)


def liger(problem: Problem, device: str) -> Call | None:
    """Return Liger-Kernel's form of a problem, None where it has none or is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    kind, rows = getattr(torch, problem.dtype), problem.rows

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(kind)

    if problem.op == "add_rms_norm":
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        x, residual, weight = random(rows, problem.shape[0]), random(rows, problem.shape[0]), random(problem.shape[0])
        return lambda: LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-5, 0.0, "llama", False)
    if problem.op == "silu_mul":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        gate, up = random(rows, problem.shape[0]), random(rows, problem.shape[0])
        return lambda: LigerSiLUMulFunction.apply(gate, up)
    return None


def moved_bytes(problem: Problem, context: int) -> int:
    """Return the bytes that an operation must read and write at least (the kernels' docstrings), forward.

    The rejection is left at its most: both rows twice and the map, for a request that is rejected.
    """
    n, e = problem.rows, torch.empty(0, dtype=getattr(torch, problem.dtype)).element_size()
    s = problem.shape
    return {
        "add_rms_norm": lambda: 4 * n * s[0] * e + s[0] * e + 4 * n,
        "input_norm": lambda: 4 * n * s[0] * e + 2 * s[0] * e + 8 * n,
        "feature_norms": lambda: 2 * s[1] * n * s[0] * e + s[1] * s[0] * e,
        "rope_cache": lambda: 2 * n * (s[0] + 2 * s[1]) * s[2] * e + 4 * n * s[2],
        "cached_attention": lambda: 2 * n * context * s[1] * s[2] * e + 2 * n * s[0] * s[2] * e,
        "silu_mul": lambda: 3 * n * s[0] * e,
        "sample_head": lambda: s[1] * s[0] * e + n * s[0] * e,
        "rejection": lambda: n * (2 * 4 * (s[0] + s[1]) + 4 * s[0]),
        "dense_terms": lambda: n * s[0] * (2 * e + 2 * 4),
    }[problem.op]()
