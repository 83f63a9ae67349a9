"""How many warps of a compiled kernel a multiprocessor holds, from what its machine code takes, and which kernels that rules out.

Limits are those of the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; registers are given
to warps in units of 256, and a program's shared memory counts with the 1 KiB that the driver keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.aot import Report

KIB = 1024
REGISTER_UNIT = 256
RESERVED_SHARED = 1 * KIB  # since compute capability 8.0
MIN_WARPS = 8  # fewer warps a multiprocessor leave its four schedulers with less than two each, and hide no latency


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor has: registers, bytes of shared memory (for all programs, for one), warps and programs at a time."""

    registers: int
    shared: int
    shared_program: int
    warps: int
    programs: int


LIMITS = {
    70: Limits(65536, 96 * KIB, 96 * KIB, 64, 32),
    75: Limits(65536, 64 * KIB, 64 * KIB, 32, 16),
    80: Limits(65536, 164 * KIB, 163 * KIB, 64, 32),
    86: Limits(65536, 100 * KIB, 99 * KIB, 48, 16),
    87: Limits(65536, 164 * KIB, 163 * KIB, 48, 16),
    89: Limits(65536, 100 * KIB, 99 * KIB, 48, 24),
    90: Limits(65536, 228 * KIB, 227 * KIB, 64, 32),
    100: Limits(65536, 228 * KIB, 227 * KIB, 64, 32),
    120: Limits(65536, 100 * KIB, 99 * KIB, 48, 32),
}


def limits_of(capability: int) -> Limits:
    """Return the limits of a compute capability (90 = Hopper), those of the next lower one where it is not in the table.

    ValueError below 70, the oldest that Triton compiles for.
    """
    known = [number for number in LIMITS if number <= capability]
    if not known:
        raise ValueError(f"compute capability {capability}: {min(LIMITS)} at least")
    return LIMITS[max(known)]


def resident_warps(report: Report, limits: Limits) -> int:
    """Return the warps of a kernel that a multiprocessor holds at a time, 0 where not even one program fits."""
    if report.registers is None or report.shared_bytes is None:
        return 0
    a_warp = -(-report.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    shared = report.shared_bytes + RESERVED_SHARED
    if report.shared_bytes > limits.shared_program:
        return 0
    programs = min(limits.registers // (a_warp * report.num_warps), limits.shared // shared, limits.warps // report.num_warps)
    return min(programs, limits.programs) * report.num_warps


def why_not(reports: Iterable[Report], limits: Limits) -> str | None:
    """Return why a launch is not worth timing: 'error', 'shared memory', 'spills' or 'occupancy'; None where it is."""
    for report in reports:
        if report.error is not None:
            return "error"
        if (report.shared_bytes or 0) > limits.shared_program:
            return "shared memory"
        if report.spills:
            return "spills"
        if resident_warps(report, limits) < MIN_WARPS:
            return "occupancy"
    return None
