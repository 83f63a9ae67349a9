"""What is checked before vLLM is started, each with one clear line: version, target and tokenizer, port."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import psutil
from packaging.version import InvalidVersion, Version

from eagle.bundle.record import BundleRecord, read_record
from eagle.bundle.validate import check_bundle
from eagle.errors import BundleError, PreflightError
from eagle.target.identity import tokenizer_hash
from eagle.target.load import load_tokenizer, target_dims
from eagle.target.vllm import INSTALL, VllmBuild

OLDEST = "0.22"  # the first vLLM that reads fc_norm and norm_output (its pull request 42764)


def require_version(build: VllmBuild, interpreter: Path) -> None:
    """Raise PreflightError when vLLM cannot load an Eagle 3.1 draft. A version that cannot be read is let through."""
    try:
        found = Version(build.version)
    except InvalidVersion:
        return
    if found.release < Version(OLDEST).release:
        raise PreflightError(
            f"vllm.interpreter: {interpreter} has vLLM {build.version}; Eagle 3.1 drafts need {OLDEST} or newer; {INSTALL}"
        )


def check_fit(bundle: Path, target: Path, *, trust_remote_code: bool = False) -> BundleRecord:
    """Check that bundle, target and tokenizer belong together; return the bundle's record.

    Raises BundleError for a bundle that breaks vLLM's contract, has other widths than the target, or was made with
    another vocabulary; ConfigError when the target's folder has no tokenizer.
    """
    check_bundle(bundle, target)
    record = read_record(bundle)
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    largest, size = max(tokenizer.get_vocab().values(), default=0), target_dims(target).vocab_size
    if largest >= size:
        raise BundleError(f"target.model: {target}: the tokenizer has token {largest}, config.json's vocab_size is {size}")
    if record.tokenizer is not None and record.tokenizer != tokenizer_hash(tokenizer):
        raise BundleError(
            f"target.model: the tokenizer in {target} is not the one that the draft was trained with; is it the draft's target?"
        )
    return record


def require_free_port(host: str, port: int) -> None:
    """Raise PreflightError when nothing can listen at host:port: in use (by whom, if that can be seen), or no such address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise PreflightError(f"serve.host, serve.port: cannot listen on {host}:{port}: {error.strerror or error}") from None
        raise PreflightError(
            f"serve.port: {port} on {host} is in use{_holder(port)}; stop it, or serve on another port: --port {port + 1}"
        ) from None


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:  # not ours to see
        return ""
    return ""
