"""Which device kernels a computation launches, counted without a GPU.

On tensors of the meta device every torch operation is seen by its name, none is run, and the launches of Triton kernels are
heard, not made. Counted is what reaches the device: operations that only make a view or memory do not. Operations that torch
runs as one kernel on CUDA, but spells out where there is none (`rms_norm`, `scaled_dot_product_attention`), count once, in
favour of the code that calls them. A count is of torch's operations: one that needs two kernels (a split matrix product) is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import dispatch, launching

_ONE_KERNEL = (functional.rms_norm, torch.rms_norm, functional.scaled_dot_product_attention)
_MEMORY = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "detach")


def _launches(func: Any) -> bool:
    results = [value for value in func._schema.returns if isinstance(value.type, torch.TensorType)]
    views = any(value.alias_info is not None and not value.alias_info.is_write for value in results)
    return bool(results) and not views and not _name(func).startswith(_MEMORY)


def _name(func: Any) -> str:
    return str(func.name()).partition("::")[2].partition(".")[0]


class _Operations(TorchDispatchMode):
    """Tells the names of torch's operations that launch."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell, self.silent = tell, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.silent and _launches(func):
            self._tell(_name(func))
        return func(*args, **(kwargs or {}))


class _Composites(TorchFunctionMode):
    """Tells a function that CUDA runs as one kernel once, and keeps what it is made of silent."""

    def __init__(self, tell: Callable[[str], None], operations: _Operations) -> None:
        super().__init__()
        self._tell, self._operations = tell, operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ONE_KERNEL or self._operations.silent:
            return func(*args, **(kwargs or {}))
        self._tell(func.__name__)
        with self._quiet():
            return func(*args, **(kwargs or {}))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self._operations.silent = True
        try:
            yield
        finally:
            self._operations.silent = False


def launched(call: Callable[[], Any], *, fused: bool) -> list[str]:
    """Return the names of the kernels that `call` would launch on a GPU, in order; `call` works on tensors of the meta device.

    `fused`: the dispatch takes the Triton kernels, which triton must be installed for; else torch's operations.
    """
    names: list[str] = []
    operations = _Operations(names.append)
    with (
        torch.no_grad(),  # inference mode shows `to` and `contiguous` whole, and not whether they copy
        dispatch.using(backend="triton" if fused else "reference"),
        launching.heard(names.append, dry=True),
        operations,
        _Composites(names.append, operations),
    ):
        call()
    return names
