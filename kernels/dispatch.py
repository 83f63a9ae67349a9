"""Which implementation of a fused operation runs: what models call.

CPU tensors take `eager`. CUDA tensors take the Triton kernel when triton can be imported and the kernel takes the dtype and
the shape, else `eager`, with one line in the log for each reason. Inside torch.compile the oracle is traced as it is, for the
compiler fuses it by itself.

Triton is switched off by EAGLE_KERNELS=reference in the environment (read once, at import), by the argument
`backend="reference"` of a call, or for a stretch of code by `with using(backend="reference"):` (this thread or task only).
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from kernels import eager, reference

if TYPE_CHECKING:
    from kernels.add_rms_norm import Launch

Backend = Literal["auto", "reference"]
VARIABLE = "EAGLE_KERNELS"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What `using` sets: the backend, and tuned launches by (operation, hidden size, dtype of x without 'torch.')."""

    backend: Backend = "auto"
    launches: Mapping[tuple[str, int, str], Launch] = field(default_factory=dict)


def _initial() -> Settings:
    return Settings(backend=_backend(os.environ.get(VARIABLE, "auto"), f"environment variable {VARIABLE}"))


def _backend(value: str, where: str) -> Backend:
    for known in get_args(Backend):
        if value == known:
            return known
    raise ValueError(f"{where} is {value!r}; it must be one of: {', '.join(get_args(Backend))}")


_settings: ContextVar[Settings] = ContextVar("kernels.settings", default=_initial())  # noqa: B039 (frozen)


@contextmanager
def using(
    *, backend: Backend | None = None, launches: Mapping[tuple[str, int, str], Launch] | None = None
) -> Iterator[Settings]:
    """Set the backend and/or the tuned launches within a `with` block; what is None stays as it was."""
    settings = _settings.get()
    if backend is not None:
        settings = replace(settings, backend=_backend(backend, "backend"))
    if launches is not None:
        settings = replace(settings, launches=dict(launches))
    token = _settings.set(settings)
    try:
        yield settings
    finally:
        _settings.reset(token)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Residual add, then RMSNorm: return (normed, new_residual), both [..., H] in the promoted dtype of x and residual.

    x [..., H], residual [..., H] or None (then new_residual is x), weight [H]; `reference.add_rms_norm` has the formula.
    The norm is computed in float32 at least, under autocast too. Differentiable once in x, residual and weight.
    """
    if torch.compiler.is_compiling():
        return reference.add_rms_norm(x, residual, weight, eps)
    if x.is_cuda:
        settings = _settings.get()
        if (backend or settings.backend) == "auto":
            kernel = _kernel("add_rms_norm")
            if kernel is not None:
                reason = kernel.supports(x, residual, weight)
                if reason is None:
                    launch = settings.launches.get(("add_rms_norm", x.shape[-1], str(x.dtype).removeprefix("torch.")))
                    result: tuple[Tensor, Tensor] = kernel.add_rms_norm(x, residual, weight, eps, launch=launch)
                    return result
                _say_once(f"add_rms_norm: {reason}; the eager form runs")
    return eager.add_rms_norm(x, residual, weight, eps)


def rejection(
    draft: Tensor, q_chosen: Tensor, q: Tensor | None, p: Tensor, ids: Tensor | None, accept_uniform: Tensor, token_uniform: Tensor,
    *, backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chain rejection sampling of draft [n, K]: return (accepted [n], following [n]), int64; see `eager.rejection`.

    Kernel and eager form add in different orders: where a uniform is within float64 rounding of the edge between two
    tokens, they may return either.
    """
    if p.is_cuda and not torch.compiler.is_compiling() and (backend or _settings.get().backend) == "auto":
        kernel = _kernel("rejection")
        if kernel is not None:
            reason = kernel.supports(draft, q_chosen, q, p)
            if reason is None:
                result: tuple[Tensor, Tensor] = kernel.rejection(draft, q_chosen, q, p, ids, accept_uniform, token_uniform)
                return result
            _say_once(f"rejection: {reason}; the eager form runs")
    return eager.rejection(draft, q_chosen, q, p, ids, accept_uniform, token_uniform)


@functools.cache
def _kernel(name: str) -> Any:
    """Return the module of a Triton kernel, or None where triton cannot be imported (said once in the log)."""
    try:
        module: ModuleType = importlib.import_module(f"kernels.{name}")
    except ImportError as error:
        log.warning("kernels: triton cannot be imported (%s); the eager forms run", error)
        return None
    return module


@functools.cache
def _say_once(text: str) -> None:
    log.warning("kernels: %s", text)
