"""How every Triton kernel of this package is launched, so that launches can be counted where no GPU runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_listener: ContextVar[tuple[Callable[[str], None], bool] | None] = ContextVar("kernels.launching", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `kernel` on `grid`; within `heard` its name is told first, and a dry listener keeps it from running."""
    listener = _listener.get()
    if listener is not None:
        tell, dry = listener
        tell(kernel.fn.__name__)
        if dry:
            return
    kernel[grid](*arguments, **options)


@contextmanager
def heard(tell: Callable[[str], None], *, dry: bool = False) -> Iterator[None]:
    """Call `tell` with the name of every kernel launched inside (this thread or task). `dry`: launch none of them.

    A dry run leaves outputs unwritten; on tensors of the meta device that is all there is to do.
    """
    token = _listener.set((tell, dry))
    try:
        yield
    finally:
        _listener.reset(token)
