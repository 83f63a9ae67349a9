"""Which implementation of a fused operation runs: what models call.

CPU tensors take `eager`. CUDA tensors take the Triton kernel when triton can be imported and the kernel takes the dtype and
the shape, else `eager`, with one line in the log for each reason. Inside torch.compile the oracle is traced as it is, for the
compiler fuses it by itself.

Triton is switched off by EAGLE_KERNELS=reference in the environment (read once, at import), by the argument
`backend="reference"` of a call, or for a stretch of code by `with using(backend="reference"):` (this thread or task only).
"triton" takes the kernels whatever the device: in Triton's interpreter, or to count launches (`kernels.launches`).
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kernels import eager, reference
from kernels.tuned import Tuned

Backend = Literal["auto", "reference", "triton"]
VARIABLE = "EAGLE_KERNELS"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What `using` sets: the backend, and what was tuned for this device."""

    backend: Backend = "auto"
    tuned: Tuned = field(default_factory=Tuned)


def _initial() -> Settings:
    return Settings(backend=_backend(os.environ.get(VARIABLE, "auto"), f"environment variable {VARIABLE}"))


def _backend(value: str, where: str) -> Backend:
    for known in get_args(Backend):
        if value == known:
            return known
    raise ValueError(f"{where} is {value!r}; it must be one of: {', '.join(get_args(Backend))}")


_settings: ContextVar[Settings] = ContextVar("kernels.settings", default=_initial())  # noqa: B039 (frozen)


@contextmanager
def using(*, backend: Backend | None = None, tuned: Tuned | None = None) -> Iterator[Settings]:
    """Set the backend and/or what was tuned (`kernels.tuned.read_table`) within a `with` block; what is None stays as it was."""
    settings = _settings.get()
    if backend is not None:
        settings = replace(settings, backend=_backend(backend, "backend"))
    if tuned is not None:
        settings = replace(settings, tuned=tuned)
    token = _settings.set(settings)
    try:
        yield settings
    finally:
        _settings.reset(token)


def backend() -> Backend:
    """Return the backend that is set here (this thread or task)."""
    return _settings.get().backend


def tuned() -> Tuned:
    """Return what was tuned for this device, as far as it is set here (this thread or task)."""
    return _settings.get().tuned


def launch_of(op: str, shape: tuple[int, ...], tensor: Tensor, rows: int) -> Any | None:
    """Return the tuned launch of operation `op` (`kernels.spaces`) for tensors like `tensor`; None: the kernel's default."""
    return _settings.get().tuned.launches.find(op, shape, tensor.dtype, rows)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Residual add, then RMSNorm: return (normed, new_residual), both [..., H] in the promoted dtype of x and residual.

    x [..., H], residual [..., H] or None (then new_residual is x), weight [H]; `reference.add_rms_norm` has the formula.
    The norm is computed in float32 at least, under autocast too. Differentiable once in x, residual and weight.
    """
    if torch.compiler.is_compiling():
        return reference.add_rms_norm(x, residual, weight, eps)
    kernel = kernel_for("add_rms_norm", x, lambda module: module.supports(x, residual, weight), backend)
    if kernel is not None:
        hidden = x.shape[-1]
        launch = launch_of("add_rms_norm", (hidden,), x, x.shape[:-1].numel())
        result: tuple[Tensor, Tensor] = kernel.add_rms_norm(x, residual, weight, eps, launch=launch)
        return result
    return eager.add_rms_norm(x, residual, weight, eps)


def rejection(
    draft: Tensor, q_chosen: Tensor, q: Tensor | None, p: Tensor, ids: Tensor | None, accept_uniform: Tensor, token_uniform: Tensor,
    *, backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chain rejection sampling of draft [n, K]: return (accepted [n], following [n]), int64; see `eager.rejection`.

    Kernel and eager form add in different orders: where a uniform is within float64 rounding of the edge between two
    tokens, they may return either.
    """
    kernel = kernel_for("rejection", p, lambda module: module.supports(draft, q_chosen, q, p), backend)
    if kernel is not None:
        vocab = p.shape[2]
        launch = launch_of("rejection", (vocab, vocab if ids is None else len(ids)), p, len(draft))
        result: tuple[Tensor, Tensor] = kernel.rejection(
            draft, q_chosen, q, p, ids, accept_uniform, token_uniform, launch=launch
        )
        return result
    return eager.rejection(draft, q_chosen, q, p, ids, accept_uniform, token_uniform)


def input_norm(
    tokens: Tensor, embed: Tensor, hidden: Tensor, embed_weight: Tensor, hidden_weight: Tensor, eps: float, normed_residual: bool
) -> tuple[Tensor, Tensor]:
    """The input (y [N, 2H], residual [N, H]) of a draft's first layer; see `reference.input_norm`. No gradient."""
    kernel = kernel_for("input_norm", hidden, lambda module: module.supports(embed, hidden, embed_weight, hidden_weight))
    arguments = (tokens, embed, hidden, embed_weight, hidden_weight, eps, normed_residual)
    if kernel is None:
        return reference.input_norm(*arguments)
    launch = launch_of("input_norm", (hidden.shape[1],), hidden, len(hidden))
    result: tuple[Tensor, Tensor] = kernel.input_norm(*arguments, launch=launch)
    return result


def feature_norms(features: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Each of A tapped states normed by its own weight, [..., A*H]; see `reference.feature_norms`. No gradient."""
    kernel = kernel_for("input_norm", features, lambda module: module.supports(features, weights))
    if kernel is None:
        return reference.feature_norms(features, weights, eps)
    parts, hidden = weights.shape
    launch = launch_of("feature_norms", (hidden, parts), features, features.shape[:-1].numel())
    result: Tensor = kernel.feature_norms(features, weights, eps, launch=launch)
    return result


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2I], gate first; see `reference.silu_mul`. Differentiable once."""
    kernel = kernel_for("silu_mul", gate_up, lambda module: module.supports(gate_up))
    if kernel is None:
        return reference.silu_mul(gate_up)
    launch = launch_of("silu_mul", (gate_up.shape[-1] // 2,), gate_up, gate_up.shape[:-1].numel())
    result: Tensor = kernel.silu_mul(gate_up, launch=launch)
    return result


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor, table: Tensor, heads: int, step: int = 0
) -> Tensor:
    """Turn q and k, write k and v into the cache at positions + step, return q; see `reference.rope_cache`. No gradient."""
    kernel = kernel_for("rope_cache", qkv, lambda module: module.supports(qkv, keys))
    if kernel is None:
        return reference.rope_cache(qkv, cos, sin, positions + step, keys, values, table, heads)
    launch = launch_of("rope_cache", (heads, keys.shape[2], keys.shape[3]), qkv, len(qkv))
    result: Tensor = kernel.rope_cache(qkv, cos, sin, positions, keys, values, table, heads, step, launch=launch)
    return result


def cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, scale: float, step: int = 0
) -> Tensor:
    """One query a row over its positions 0..position + step in the cache; see `reference.cached_attention`. No gradient."""
    kernel = kernel_for("cached_attention", q, lambda module: module.supports(q, keys))
    if kernel is None:
        return reference.cached_attention(q, keys, values, table, positions + step, scale)
    launch = launch_of("cached_attention", (q.shape[1], keys.shape[2], q.shape[2]), q, len(q))
    if launch is not None:
        launch = kernel.fitted(launch, table.shape[1] * keys.shape[1])
    result: Tensor = kernel.cached_attention(q, keys, values, table, positions, scale, step, launch=launch)
    return result


def sample_head(
    x: Tensor, weight: Tensor, ids: Tensor | None, temperature: Tensor | None, seeds: Tensor | None, positions: Tensor,
    step: int = 0, *, out: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Write each row's draft token to out [n] and return (out, log q); see `reference.sample_head`. No gradient."""
    kernel = kernel_for("sample_head", x, lambda module: module.supports(x, weight))
    if kernel is None:
        token, log_q = reference.sample_head(x, weight, ids, temperature, seeds, positions + step)
        return out.copy_(token), log_q
    # only the greedy form is tuned: drawing takes other registers
    launch = launch_of("sample_head", (x.shape[1], len(weight)), x, len(x)) if temperature is None else None
    result: tuple[Tensor, Tensor | None] = kernel.sample_head(
        x, weight, ids, temperature, seeds, positions, step, out=out, launch=launch
    )
    return result


def takes_kernels(tensor: Tensor, backend: Backend | None = None) -> bool:
    """Whether operations on `tensor` go to Triton kernels, as far as the device and the settings say."""
    backend = backend or _settings.get().backend
    return not torch.compiler.is_compiling() and (backend == "triton" or (backend == "auto" and tensor.is_cuda))


def kernel_for(
    name: str, tensor: Tensor, why_not: Callable[[Any], str | None], backend: Backend | None = None
) -> Any | None:
    """Return the module of kernel `name` for an operation on `tensor`, or None where the eager form has to run.

    `why_not(module)` says why the module does not take these tensors (None: it does); a reason is logged once.
    """
    if not takes_kernels(tensor, backend):
        return None
    module = _kernel(name)
    reason = None if module is None else why_not(module)
    if reason is None:
        return module
    _say_once(f"{name}: {reason}; the eager form runs")
    return None


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
