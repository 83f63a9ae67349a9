"""The servers of a bench: all at once where vLLM runs on CPU, one at a time where it takes a GPU's memory for itself."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import psutil

from eagle.bundle.record import BundleRecord
from eagle.ports import free_port
from eagle.serve.launch import Wanted, serving
from eagle.serve.supervise import Server
from eagle.servebench.arms import ServedMethod, wanted_for
from eagle.servebench.client import Endpoint


@dataclass(frozen=True)
class Running:
    """A healthy server of an arm."""

    where: Endpoint
    wanted: Wanted
    server: Server

    def memory_bytes(self) -> int:
        """Bytes that would be free if the server ended: the unique set sizes of its processes, added up."""
        tree = psutil.Process(self.server.pid)
        total = 0
        for process in (tree, *tree.children(recursive=True)):
            try:
                total += process.memory_full_info().uss
            except psutil.NoSuchProcess:  # a helper that ended since it was listed
                continue
        return total


class Pool:
    """Starts a method's server when it is first asked for; `together` keeps all alive, else the former is ended first.

    A context manager: at its end no server is left.
    """

    def __init__(self, wanted: Wanted, record: BundleRecord, *, together: bool) -> None:
        self._wanted, self._record, self.together = wanted, record, together
        self._stack = ExitStack()
        self._running: dict[ServedMethod, Running] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def get(self, method: ServedMethod) -> Running:
        """Return the method's server, started if need be. Raises StepFailed when it does not come up."""
        found = self._running.get(method)
        if found is not None:
            return found
        if not self.together:
            self._stack.close()
            self._running.clear()
        wanted = wanted_for(method, self._wanted, self._record, free_port())
        server = self._stack.enter_context(serving(wanted))
        return self._running.setdefault(method, Running(Endpoint(wanted.url, wanted.name), wanted, server))
