"""What the sections of the GPU script share: the device or its stand-in, the sizes, and the clock that ends a section in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.kernels import LLAMA_8B
from eagle.bench.profiling import wall_seconds
from eagle.draft.spec import DraftSpec
from kernels.aot import Report, Specimen
from kernels.autotune import Reader, Timer, compiler, cuda_timer
from kernels.dispatch import Backend
from kernels.graphs import Capture, Replay
from kernels.occupancy import Limits, limits_of
from kernels.tuned import Launches, Stamp

LLAMA_70B = replace(  # tapped where the few layers of its target are
    LLAMA_8B, hidden_size=8192, target_hidden_size=8192, intermediate_size=28672, num_heads=64, aux_layers=(1, 2, 4)
)
TINY = DraftSpec(
    hidden_size=64, target_hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
    vocab_size=320, draft_vocab_size=96, aux_layers=(1, 2, 3), rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512,
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A target to verify with: a Llama of the draft's width with so many layers, random weights. `full_layers`: of the real one."""

    name: str
    draft: DraftSpec
    layers: int
    full_layers: int


@dataclass
class Lab:
    """`dry`: tiny shapes on CPU in Triton's interpreter, nothing that is timed means anything. `deadline`: of the section at work.

    `launches` is filled by the section that tunes, and used by those after it.
    """

    device: str
    dry: bool
    deadline: float = 0.0
    launches: Launches | None = None
    copy_gb_s: float | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def late(self) -> bool:
        """Whether the section's time is up."""
        return self.clock() > self.deadline

    @property
    def spec(self) -> DraftSpec:
        """The draft whose operations are checked, tuned and compared."""
        return TINY if self.dry else LLAMA_8B

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """The interpreter has no correct bfloat16 arithmetic in torch's own operations around the kernels."""
        return "float32" if self.dry else "bfloat16"

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes."""
        return (1, 2) if self.dry else (1, 32)

    @property
    def draft_tokens(self) -> int:
        """K."""
        return 2 if self.dry else 4

    @property
    def targets(self) -> tuple[Target, ...]:
        """The random targets of whole rounds."""
        if self.dry:
            return (Target("tiny", TINY, 3, 3),)
        return Target("Llama-3.1-8B shapes", LLAMA_8B, 32, 32), Target("Llama-3.1-70B layer shapes", LLAMA_70B, 4, 80)

    @property
    def backend(self) -> Backend:
        """The dispatch of fused forms."""
        return "triton" if self.dry else "auto"

    @property
    def capture(self) -> Capture | Literal["auto"]:
        """How the loop becomes a graph."""
        return replaying if self.dry else "auto"

    @property
    def timer(self) -> Timer:
        """Milliseconds of a call."""
        return partial(_plain_timer, self.device) if self.dry else cuda_timer

    def compiler(self) -> tuple[Reader, Limits]:
        """What reads the registers and shared memory of a kernel, and the limits of the device."""
        if self.dry:
            return _stand_in, limits_of(90)
        major, minor = torch.cuda.get_device_capability()
        return compiler(10 * major + minor), limits_of(10 * major + minor)

    @property
    def stamp(self) -> Stamp:
        """What tuned launches hold for."""
        return Stamp.here(self.device)


def _plain_timer(device: str, call: Callable[[], Any]) -> float:
    return 1e3 * wall_seconds(call, device, 1)


def _stand_in(specimen: Specimen) -> Report:
    """Interpreted kernels cannot be compiled in the same process."""
    return Report(
        specimen.kernel.__name__, specimen.kernel.__name__, 90, specimen.hidden, specimen.dtype, specimen.num_warps, 64, 1024, 0
    )


def replaying(call: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
    """The form of a captured graph without one: a replay calls again and puts the result where the first one was."""
    out = call()

    def replay() -> None:
        out.copy_(call())

    return out, replay
