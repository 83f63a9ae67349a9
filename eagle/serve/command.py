"""The exact command that serves a target with a draft bundle on vLLM, as a list, a line and a script.

The server is started as a module, not with the `vllm` console script, because that script asks for the version of a
distribution called `vllm`, which the CPU package is not. `-P` keeps the working directory off Python's path: a folder
named `kernels` there would be taken for the Hugging Face package of that name.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from eagle.config import Config
from eagle.target.vllm import vllm_build

HOST, PORT = "127.0.0.1", 8000
MODULE = "vllm.entrypoints.openai.api_server"

_SCRIPT = Template("""\
#!/bin/sh
# Serves the target with this folder's Eagle 3.1 draft on vLLM (OpenAI API on $host:$port).
# Usage: sh serve.sh [TARGET] [more vLLM arguments]
# TARGET, the target's folder or hub name, and VLLM_PYTHON, a Python that has vLLM, may also come from the environment.
set -eu
here=$$(CDPATH= cd -- "$$(dirname -- "$$0")" && pwd | sed 's/["\\\\]/\\\\&/g')
known_target=$target
known_python=$python
target=$${TARGET:-$$known_target}
case "$${1:-}" in "" | -*) ;; *) target=$$1 && shift ;; esac
case "$$target" in /*) export HF_HUB_OFFLINE=1 ;; esac
exec $command "$$@"
""")


def serve_command(
    bundle: Path, target: Path | str, interpreter: Path | None, config: Config, draft_tokens: int, *, cpu: bool | None = None
) -> list[str]:
    """Return the command as a list for a subprocess; `serve_line` makes a line for a shell of it.

    `interpreter` None: the `vllm` console script (vLLM is not on this machine). `cpu` says whether the interpreter's
    vLLM is a CPU build; None = ask it. On CPU the engine runs eagerly (compiling takes minutes there) with
    `vllm.kv_cache_gib` of KV cache. `draft_tokens` 0 serves without speculation.
    """
    if cpu is None:
        cpu = interpreter is not None and vllm_build(interpreter).cpu
    speculative = speculative_config(bundle, draft_tokens) if draft_tokens else None
    return server_command(target, interpreter, config, speculative, cpu=cpu)


def server_command(
    target: Path | str,
    interpreter: Path | None,
    config: Config,
    speculative: Mapping[str, Any] | None,
    *,
    cpu: bool,
    host: str = HOST,
    port: int = PORT,
    environment: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """Return the command with all that can be said: vLLM's speculative_config, more environment, more arguments at the end."""
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} if Path(target).is_absolute() else {}
    if cpu:
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(config.vllm.kv_cache_gib)
    variables |= environment or {}
    prefix = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    start = ["vllm", "serve"] if interpreter is None else [str(interpreter), "-P", "-m", MODULE, "--model"]
    options = ["--host", host, "--port", str(port), "--dtype", config.target.dtype, "--max-num-seqs", str(config.vllm.max_num_seqs)]
    if config.target.trust_remote_code:
        options.append("--trust-remote-code")
    if cpu:
        options.append("--enforce-eager")
    else:
        options += ["--gpu-memory-utilization", f"{config.vllm.gpu_memory_utilization:g}"]
    if config.vllm.tensor_parallel_size > 1:
        options += ["--tensor-parallel-size", str(config.vllm.tensor_parallel_size)]
    if speculative:
        options += ["--speculative-config", json.dumps(speculative, ensure_ascii=False)]
    return [*prefix, *start, str(target), *options, *more]


def speculative_config(bundle: Path | str, draft_tokens: int) -> dict[str, object]:
    """Return vLLM's speculative_config for a bundle. The method is always named: vLLM guesses it from the folder's name."""
    return {"method": "eagle3", "model": str(bundle), "num_speculative_tokens": draft_tokens}


def serve_line(command: list[str]) -> str:
    """Return the command as one line that can be pasted into a POSIX shell."""
    return shlex.join(command)


def serve_script(
    target: Path | str, interpreter: Path | None, config: Config, draft_tokens: int, *, cpu: bool | None = None
) -> str:
    """Return the text of serve.sh, which finds the bundle by its own location, so that the folder can be moved.

    The target and the interpreter of this machine are its defaults; the first argument or the environment replaces them.
    """
    holes = {"@BUNDLE@": "$here", "@TARGET@": "$target", "@PYTHON@": "${VLLM_PYTHON:-$known_python}"}
    absolute = Path("/@TARGET@") if Path(target).is_absolute() else "@TARGET@"
    known = None if interpreter is None else Path("@PYTHON@")
    if cpu is None:
        cpu = interpreter is not None and vllm_build(interpreter).cpu
    words = serve_command(Path("@BUNDLE@"), absolute, known, config, draft_tokens, cpu=cpu)
    words = [word for word in words if word != "HF_HUB_OFFLINE=1"]  # the script decides: its target may be a hub name
    command = " ".join(_shell_word(word.replace("/@TARGET@", "@TARGET@"), holes) for word in words)
    return _SCRIPT.substitute(
        host=HOST, port=PORT, target=shlex.quote(str(target)), python=shlex.quote(str(interpreter or "")), command=command
    )


def _shell_word(word: str, holes: dict[str, str]) -> str:
    """Quote a word for the shell; a word with a hole is put in double quotes and the hole becomes an expansion."""
    if not any(hole in word for hole in holes):
        return shlex.quote(word)
    for special in ("\\", '"', "$", "`"):
        word = word.replace(special, "\\" + special)
    for hole, expansion in holes.items():
        word = word.replace(hole, expansion)
    return f'"{word}"'
