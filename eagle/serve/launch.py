"""`eagle serve`: from a bundle and a configuration to a running server, checked before anything is started."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import eagle
from eagle import manifest
from eagle.config import Config
from eagle.progress import say
from eagle.serve.checks import check_fit, require_free_port, require_version
from eagle.serve.command import server_command
from eagle.serve.plan import Speculation, plan_speculation
from eagle.serve.plugin import mend
from eagle.serve.plugin.settings import VARIABLE
from eagle.serve.supervise import Server, running
from eagle.target.load import ensure_target, load_tokenizer, target_dims
from eagle.target.resolve import DEMO_NAME
from eagle.target.vllm import VllmBuild, require_vllm, vllm_build, worker_environment

PRIVATE, OWNER = "eagle-serve-", "owner"
WHOLE_PROMPTS = 8192  # longest context that a CPU server takes in one piece
SPIN_COUNT = "5000"  # see eagle/target/vllm_worker.py
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 -- compared with, not listened on


@dataclass(frozen=True)
class Wanted:
    """What is to be served, checked: folders, vLLM, and how speculation is set. `name`: the model's name for clients."""

    bundle: Path
    target: Path
    name: str
    interpreter: Path
    build: VllmBuild
    speculation: Speculation
    config: Config
    root: Path
    more: tuple[str, ...]

    @property
    def url(self) -> str:
        """Where the server answers, as seen from this machine."""
        host = WILDCARDS.get(self.config.serve.host, self.config.serve.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.config.serve.port}"


def want(
    bundle: Path, config: Config, root: Path, *, draft_tokens: int | None = None, more: tuple[str, ...] = ()
) -> Wanted:
    """Resolve and check everything that can be checked without starting vLLM.

    Raises PreflightError (vLLM missing or too old), BundleError (bundle, target and tokenizer do not fit) and ConfigError,
    one line each.
    """
    interpreter = require_vllm(config.vllm, root)
    build = vllm_build(interpreter)
    require_version(build, interpreter)
    cache = root / config.paths.cache
    cache.mkdir(parents=True, exist_ok=True)
    target = ensure_target(config.target, root, cache).resolve()
    folder = bundle.resolve()
    record = check_fit(folder, target, trust_remote_code=config.target.trust_remote_code)
    speculation = plan_speculation(folder, record, config, build.version, cpu=build.cpu, draft_tokens=draft_tokens)
    name = DEMO_NAME if config.target.model == "demo" else Path(config.target.model).name
    return Wanted(folder, target, name, interpreter, build, speculation, config, root, more)


def command_of(wanted: Wanted, private: Path, python_path: str = "") -> list[str]:
    """Return the server's command; what the controller needs is put into the folder `private`: settings, module, metrics."""
    config, speculation = wanted.config, wanted.speculation
    variables: dict[str, str] = {}
    if config.runtime.threads and wanted.build.cpu:
        variables["OMP_NUM_THREADS"] = str(config.runtime.threads)
    if wanted.build.cpu and "GOMP_SPINCOUNT" not in os.environ:
        variables["GOMP_SPINCOUNT"] = SPIN_COUNT
    options = ["--served-model-name", wanted.name, *_whole_prompts(wanted)]
    if _has_library(wanted):
        variables |= _stage(private, python_path)
    if speculation.scheduler is not None and speculation.settings is not None:
        variables |= _controller(private, speculation.settings.model_dump(mode="json"))
        options += ["--scheduler-cls", speculation.scheduler]
    return server_command(
        wanted.target, wanted.interpreter, config, speculation.config, cpu=wanted.build.cpu,
        host=config.serve.host, port=config.serve.port, environment=variables, more=[*options, *wanted.more],
    )  # fmt: skip


def _whole_prompts(wanted: Wanted) -> list[str]:
    """On CPU a prompt is not cut: vLLM 0.32 rewinds a seeded request's generator after a part, which CPU generators refuse."""
    longest = target_dims(wanted.target).max_position_embeddings
    if not wanted.build.cpu or longest > WHOLE_PROMPTS:
        return []
    return ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(4096, longest))]


def _has_library(wanted: Wanted) -> bool:
    """Whether vLLM must find this package: for the controller, and on CPU for what is mended in vLLM's sampling of drafts."""
    speculation = wanted.speculation
    return speculation.scheduler is not None or (speculation.config is not None and wanted.build.cpu)


def _stage(private: Path, python_path: str) -> dict[str, str]:
    """Lay out this package as a plugin for vLLM's interpreter and return the environment that leads there.

    Only the package is put on its path, not the folder that holds it: what else lies there is not meant for vLLM.
    """
    library = private / "lib"
    about = library / "eagle_serve-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    manifest.write_text(about / "METADATA", "Metadata-Version: 2.1\nName: eagle-serve\nVersion: 1\n")
    manifest.write_text(about / "entry_points.txt", mend.ENTRY_POINT)
    link = library / "eagle"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(eagle.__file__).resolve().parent, target_is_directory=True)
    variables = {"PYTHONPATH": os.pathsep.join(part for part in (str(library), python_path) if part)}
    if os.environ.get("VLLM_PLUGINS") is not None:  # a list of those that may be loaded
        variables["VLLM_PLUGINS"] = ",".join(filter(None, (os.environ["VLLM_PLUGINS"], mend.NAME)))
    return variables


def _controller(private: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Write the controller's settings, make the folder of its metrics, and return the environment that names both."""
    metrics, file = private / "metrics", private / "pid.json"
    metrics.mkdir(exist_ok=True)
    manifest.write_json(file, settings)
    return {VARIABLE: str(file), "PROMETHEUS_MULTIPROC_DIR": str(metrics)}


def print_command(wanted: Wanted) -> str:
    """Return the command as a line for a shell. What it refers to is kept in a new folder below `paths.state`/serve."""
    state = (wanted.root / wanted.config.paths.state / "serve").resolve()
    state.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix="printed-", dir=state)) if _has_library(wanted) else state
    return shlex.join(command_of(wanted, private))


@contextmanager
def serving(wanted: Wanted) -> Iterator[Server]:
    """Start the server and wait until it is healthy; it ends with the block. Its log is `paths.state`/serve/vllm-PORT.log.

    Raises PreflightError when the port is not free, StepFailed when vLLM does not come up.
    """
    config = wanted.config
    require_free_port(config.serve.host, config.serve.port)
    state = (wanted.root / config.paths.state / "serve").resolve()
    state.mkdir(parents=True, exist_ok=True)
    log = state / f"vllm-{config.serve.port}.log"
    sweep(Path(tempfile.gettempdir()))
    private = Path(tempfile.mkdtemp(prefix=PRIVATE))  # short: the paths of vLLM's sockets may not be long
    try:
        manifest.write_text(private / OWNER, str(os.getpid()))
        environment = worker_environment(private, wanted.root)
        environment["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
        command = command_of(wanted, private, environment.get("PYTHONPATH", ""))
        say(f"serve: starting vLLM {wanted.build.version} with {_summary(wanted)}; log: {log}")
        with running(command, environment, wanted.url, log, cwd=private, grace=config.serve.stop_timeout_s) as server:
            seconds = server.wait_healthy(config.vllm.start_timeout_s)
            say(f"serve: up after {seconds:.0f} s at {wanted.url}, metrics at {wanted.url}/metrics; Ctrl-C ends it")
            try:
                yield server
            finally:
                say("serve: ending vLLM")
    finally:
        shutil.rmtree(private, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the private folders in `folder` whose server was started by a process that is gone (`kill -9`)."""
    for owner in folder.glob(f"{PRIVATE}*/{OWNER}"):
        try:
            left = not psutil.pid_exists(int(owner.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # another user's, or just being removed
            continue
        if left:
            shutil.rmtree(owner.parent, ignore_errors=True)


def _summary(wanted: Wanted) -> str:
    told = wanted.speculation.config
    if told is None:
        return f"{wanted.name}, no speculation"
    ranges = told.get("num_speculative_tokens_per_batch_size")
    how = {
        "pid": f"0 to {told['num_speculative_tokens']} draft tokens set by the controller",
        "schedule": f"draft tokens by batch size {json.dumps(ranges)}",
        "fixed": f"{told['num_speculative_tokens']} draft tokens",
    }[wanted.speculation.control]
    return f"{wanted.name} and {wanted.bundle}, {how}"


def curl_line(wanted: Wanted) -> str:
    """Return a line for a shell that asks the server something: a chat when the target has a chat template."""
    chat = bool(load_tokenizer(wanted.target, trust_remote_code=wanted.config.target.trust_remote_code).chat_template)
    question = "What is the capital of France?"
    body: dict[str, object] = {"model": wanted.name, "max_tokens": 64, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return shlex.join(["curl", "-s", f"{wanted.url}{path}", "-H", "Content-Type: application/json", "-d", json.dumps(body)])
