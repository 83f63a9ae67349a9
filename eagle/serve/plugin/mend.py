"""Mends a fault of vLLM's CPU build that makes sampled text wrong under speculation; a general plugin of vLLM's.

The CPU stand-in for `expand_kernel` fills an int64 copy and not the caller's tensor (vllm-project/vllm issue 55005, seen in
0.32.0): temperature, top-k and top-p of each draft position are then whatever was in memory. Requests at temperature 0 do not
read them; of all others the text is not the target's. vLLM loads general plugins in every process, before its workers choose
their kernels.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

NAME = "eagle_mend"
ENTRY_POINT = f"[vllm.general_plugins]\n{NAME} = {__name__}:mend\n"


def expand(output: Any, values: Any, ends: Any, replace_from: float, replace_to: float, *_most: int, **_named: int) -> None:
    """Write each of `values` (those equal to `replace_from` as `replace_to`) to its stretch of `output`, which ends at `ends`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def mend() -> None:
    """Put `expand` in the place of vLLM's function, which it does the work of in every version. Only on CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        kernels: Any = importlib.import_module("vllm.utils.cpu_triton_utils")
    except ImportError:  # another version, laid out otherwise
        kernels = None
    if hasattr(kernels, "_expand_kernel_impl"):
        kernels._expand_kernel_impl = expand
    else:
        logging.getLogger("vllm.eagle_mend").warning("vLLM's CPU kernel for sampled drafts was not found: nothing is mended")
