"""The draft step's small operations on CPU as C++ (`native.cpp`), built once with the system's compiler and called directly.

On a handful of rows torch spends far more time in dispatching an operation than in its arithmetic: RMSNorm alone is eight
operator calls. Here each is one call with pointers. Only for inference, for contiguous tensors on CPU. Where there is no
compiler (one line in the log says so), or where `kernels.dispatch` is set to the backend "reference", torch's operations run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from kernels.dispatch import backend

SOURCE = Path(__file__).with_name("native.cpp")
CACHE = "EAGLE_KERNEL_CACHE"
COMPILERS = ("c++", "g++", "clang++")
# Reductions may be reordered (that is what lets them use vector registers); NaN and infinity keep their meaning.
FLAGS = (
    "-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros",
)  # fmt: skip
LARGEST_HEAD = 512  # elements: the queries of a head lie on the stack
log = logging.getLogger(__name__)

_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_POINTER, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "add_rms_norm": [*[_POINTER] * 5, *[_COUNT] * 4, _REAL],
    "silu_mul": [*[_POINTER] * 2, *[_COUNT] * 2],
    "argmax": [*[_POINTER] * 2, *[_COUNT] * 2],
    "rope_write": [*[_POINTER] * 7, *[_COUNT] * 8],
    "attend": [*[_POINTER] * 7, *[_COUNT] * 7, _REAL],
}


class Native:
    """The functions of a built library for one dtype. Shapes and dtypes are the caller's responsibility: nothing is checked."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        found = [getattr(library, f"{function}_{_NAMES[dtype]}") for function in _SIGNATURES]
        for function, signature in zip(found, _SIGNATURES.values(), strict=True):
            function.argtypes, function.restype = signature, None
        self._norm, self._silu, self._argmax, self._rope, self._attend = found

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.dispatch.add_rms_norm`. x and `out` [..., T, H] may be slices of rows a fixed number of elements apart."""
        size = x.shape[-1]
        rows = x.numel() // size
        if out is None:
            out = x.new_empty(x.shape)
        total = x if residual is None else x.new_empty(x.shape)
        self._norm(
            x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
            rows, size, x.stride(-2), out.stride(-2), eps,
        )  # fmt: skip
        return out, total

    def silu_mul(self, joined: Tensor) -> Tensor:
        """Return silu(gate) * up, [..., I], of gate and up side by side, [..., 2 I]."""
        size = joined.shape[-1] // 2
        out = joined.new_empty(*joined.shape[:-1], size)
        self._silu(joined.data_ptr(), out.data_ptr(), out.numel() // size, size)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """Return the first index of the largest of each row of x [N, V], [N] int64; NaN counts as the largest."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._argmax(x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1])
        return out

    def rope_write(
        self, joined: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor, index: Tensor | None,
        kv_heads: int, first: int, start: int, length: int,
    ) -> None:  # fmt: skip
        """Rotate queries and keys of joined [n, T, heads + 2 kv, d] in place, then store keys and values.

        cos, sin [*, d] float32, the first half of sin negated; positions [n, T] int64. keys, values [places, kv * d]: token
        (r, t) goes to place index[r * T + t], or, without index, to (first + r) * length + start + t.
        """
        n, width, total, dim = joined.shape
        self._rope(
            joined.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), keys.data_ptr(), values.data_ptr(),
            0 if index is None else index.data_ptr(), n, width, total - 2 * kv_heads, kv_heads, dim, first, start, length,
        )  # fmt: skip

    def attend(
        self, joined: Tensor, keys: Tensor, values: Tensor, positions: Tensor, rows: Tensor | None, kv_heads: int, first: int,
        length: int,
    ) -> Tensor:  # fmt: skip
        """Causal attention of the queries in joined [n, T, heads + 2 kv, d]; returns [n, T, heads, d].

        Token (r, t) sees places 0 .. positions[r, t] of row rows[r] (first + r without rows) of keys and values
        [rows * length, kv * d]. Scale d^-1/2. 4 * heads * d flops and 4 * kv * d bytes (bfloat16) a place seen.
        """
        n, width, total, dim = joined.shape
        heads = total - 2 * kv_heads
        out = joined.new_empty(n, width, heads, dim)
        scores = torch.empty(length)
        self._attend(
            joined.data_ptr(), keys.data_ptr(), values.data_ptr(), positions.data_ptr(), 0 if rows is None else rows.data_ptr(),
            out.data_ptr(), scores.data_ptr(), n, width, heads, kv_heads, dim, first, length, dim**-0.5,
        )  # fmt: skip
        return out


def native(dtype: torch.dtype, device: torch.device) -> Native | None:
    """Return the operations for tensors of `dtype` on `device`, built at the first call; None where they cannot be had."""
    if device.type != "cpu" or dtype not in _NAMES or backend() == "reference":
        return None
    library = _library()
    return None if library is None else Native(library, dtype)


@functools.cache
def _library() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.warning("kernels: no C++ compiler (%s); the draft step runs through torch's operations", ", ".join(COMPILERS))
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        log.warning("kernels: native.cpp was not built (%s); the draft step runs through torch's operations", said[-300:])
        return None


def _built(compiler: str) -> Path:
    """Return the library for this source, compiler and processor, building it when it is not in the cache."""
    text = SOURCE.read_bytes()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout  # noqa: S603
    key = hashlib.sha256(b"\0".join([text, version, " ".join(FLAGS).encode(), _processor().encode()])).hexdigest()[:24]
    folder = _cache_folder()
    made = folder / f"native-{key}.so"
    if not made.is_file():
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(descriptor)
        try:
            command = [compiler, *FLAGS, "-o", name, str(SOURCE)]
            subprocess.run(command, capture_output=True, check=True, text=True, timeout=300)  # noqa: S603
            Path(name).replace(made)  # whoever builds at the same time replaces it by the same
        finally:
            Path(name).unlink(missing_ok=True)
    return made


def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    about = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
    return "\n".join([platform.machine(), *about])


def _cache_folder() -> Path:
    """Return EAGLE_KERNEL_CACHE, else eagle-kernels in the user's cache, else a private temporary folder.

    A library is code, so nothing is loaded from a folder that others may write to.
    """
    given = os.environ.get(CACHE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else base / "eagle-kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError as error:
        log.info("kernels: %s cannot be used (%s)", folder, error)
    return Path(tempfile.mkdtemp(prefix="eagle-kernels-"))
