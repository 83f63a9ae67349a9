"""What a call launches and what launching costs, read from torch's profiler."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType
from torch.profiler import ProfilerActivity

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # and their variants for clusters and streams
NO_KERNEL = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Profile:
    """One call: operator calls on the host (nested ones included), kernels on the device, launches of the host (a whole graph is
    one), and the summed time of the kernels in microseconds."""

    calls: float
    kernels: float
    launches: float
    device_us: float


def profile(call: Callable[[], Any], device: str | torch.device, repeats: int = 3) -> Profile:
    """Return the mean profile of `call`, which has run before (nothing is compiled inside)."""
    cuda = torch.device(device).type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes two lines of its own to stderr each time
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(repeats):
            call()
        if cuda:
            torch.cuda.synchronize(device)
    return read_events(found.events(), repeats)


def read_events(events: Iterable[Any], repeats: int = 1) -> Profile:
    """Count the profiler's events of `repeats` equal calls; returns the mean."""
    calls = kernels = launches = 0
    device_us = 0.0
    for event in events:
        if event.device_type == DeviceType.CPU:
            calls += "::" in event.name
            launches += event.name.startswith(LAUNCHES)
        elif not event.name.startswith(NO_KERNEL) and not getattr(event, "is_user_annotation", False):
            kernels += 1
            device_us += event.time_range.elapsed_us()
    return Profile(calls / repeats, kernels / repeats, launches / repeats, device_us / repeats)


def wall_seconds(call: Callable[[], Any], device: str | torch.device, repeats: int = 9) -> float:
    """Return the median seconds of `call` on an idle device, its results there included."""
    cuda = torch.device(device).type == "cuda"
    taken = []
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
