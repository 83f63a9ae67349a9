"""`eagle serve` with a stand-in for vLLM: what it checks, how it starts and waits, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from eagle.bundle.export import export_draft
from eagle.bundle.record import BundleRecord, Recommended, read_record, write_record
from eagle.config import Config
from eagle.errors import BundleError, ConfigError, PreflightError
from eagle.serve.checks import check_fit, require_free_port, require_version
from eagle.serve.launch import Wanted, command_of, sweep, want
from eagle.serve.resolve import find_bundle
from eagle.target.identity import tokenizer_hash
from eagle.target.load import load_tokenizer
from eagle.target.vllm import VllmBuild
from tests.toys import tiny_target, write_program
from tests.unit.test_bundle import make_draft

ROOT = Path(__file__).parents[2]

# Says which vLLM it is, or is the server: with a child that ignores SIGTERM, in a session of its own, as an engine might.
STAND_IN = """
import http.server, json, os, subprocess, sys, time
home = os.environ["STAND_IN"]
said = json.load(open(os.path.join(home, "said.json")))
if "--version" in sys.argv:
    print(json.dumps({"version": said.get("version", "0.32.0"), "cpu": True}))
    sys.exit()
json.dump([sys.argv, dict(os.environ)], open(os.path.join(home, "started.json"), "w"))
print("INFO 01-01 00:00:00 [x.py:1] loading weights", flush=True)
if "dies" in said:
    print("ValueError: " + said["dies"], file=sys.stderr)
    sys.exit(1)
stubborn = "import os,signal,sys,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
open(os.path.join(home, "pids"), "w").write(f"{os.getpid()} {child.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"fine")
    def log_message(self, *rest): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a bundle for it."""
    base = tmp_path_factory.mktemp("made é")
    target = tiny_target(base / "target")
    export_draft(make_draft(target, base / "draft"), base / "bundle", "float32")
    write_record(base / "bundle", BundleRecord(tokenizer=tokenizer_hash(load_tokenizer(target))))
    return target, base / "bundle"


@pytest.fixture
def project(made: tuple[Path, Path], tmp_path: Path) -> Path:
    root = tmp_path / "mein Prøjekt"
    root.mkdir()
    stand_in = write_program(root / "py thon", STAND_IN)
    params = {
        "target": {"model": str(made[0])},
        "vllm": {"interpreter": str(stand_in)},
        "serve": {"port": free_port(), "stop_timeout_s": 0.5},
    }
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    say(root)
    return root


def say(root: Path, **said: Any) -> None:
    """What the stand-in shall do."""
    (root / "said.json").write_text(json.dumps(said))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "eagle", "--root", str(root), "serve", *arguments], cwd=ROOT, text=True,
        env={**os.environ, "STAND_IN": str(root), "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], timeout: float = 120.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.fixture
def serving(project: Path, made: tuple[Path, Path]) -> Iterator[subprocess.Popen[str]]:
    """`eagle serve` whose stand-in is healthy."""
    process = start(project, str(made[1]))
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("curl "):
        pytest.fail(f"not served: {line} {ended(process)}")
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    if process.stderr is not None:
        process.stderr.close()


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_however_it_ends_no_server_is_left(
    project: Path, serving: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    pids = [int(pid) for pid in (project / "pids").read_text().split()]
    private = Path(json.loads((project / "started.json").read_text())[1]["PROMETHEUS_MULTIPROC_DIR"]).parent
    assert alive(pids) == pids
    serving.send_signal(number)
    assert serving.wait(timeout=60) == code
    deadline = time.monotonic() + 60
    while alive(pids):
        assert time.monotonic() < deadline, f"still alive: {alive(pids)}"
        time.sleep(0.05)
    assert code == -9 or not private.exists()


def test_a_killed_server_is_reported(project: Path, serving: subprocess.Popen[str]) -> None:
    server, child = (int(pid) for pid in (project / "pids").read_text().split())
    os.kill(server, signal.SIGKILL)
    code, _, err = ended(serving)
    assert code == 7
    assert "vLLM ended with exit code 137" in err
    assert not alive([child])


def test_what_vllm_is_started_with(project: Path, serving: subprocess.Popen[str], made: tuple[Path, Path]) -> None:
    argv, environment = json.loads((project / "started.json").read_text())
    speculative = json.loads(argv[argv.index("--speculative-config") + 1])
    assert (speculative["method"], speculative["model"]) == ("eagle3", str(made[1].resolve()))
    assert argv[argv.index("--scheduler-cls") + 1] == "eagle.serve.plugin.scheduler.PidScheduler"
    assert argv[argv.index("--host") + 1] == "127.0.0.1"
    assert os.listdir(environment["PYTHONPATH"]) == ["eagle"]  # noqa: PTH208 -- nothing else of ours is on vLLM's path
    assert json.loads(Path(environment["EAGLE_PID_SETTINGS"]).read_text())["max_tokens"] == 5
    assert Path(environment["PROMETHEUS_MULTIPROC_DIR"]).is_dir()
    assert (environment["HF_HUB_OFFLINE"], environment["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    url = f"http://127.0.0.1:{argv[argv.index('--port') + 1]}"
    assert httpx.get(f"{url}/health", trust_env=False).text == "fine"
    code, _, err = ended(start(project, str(made[1])))
    assert code == 5
    assert f"serve.port: {url.rpartition(':')[2]} on 127.0.0.1 is in use by" in err


def test_a_server_that_dies_gives_its_reason(project: Path, made: tuple[Path, Path]) -> None:
    say(project, dies="no room for the KV cache")
    code, out, err = ended(start(project, str(made[1])))
    assert (code, out) == (7, "")
    assert "error: serve: vLLM ended with exit code 1 while starting: ValueError: no room for the KV cache; log: " in err


def test_print_starts_nothing_and_prints_what_would_run(project: Path, made: tuple[Path, Path]) -> None:
    code, out, _ = ended(start(project, str(made[1]), "--print", "--port", "8123", "--vllm-args", "--max-model-len 512"))
    assert code == 0
    assert out.count("\n") == 1
    assert not (project / "started.json").exists()
    code, nothing, err = ended(start(project, str(made[1]), "--print", "--draft-tokens", "0"))
    assert (code, "--speculative-config" in nothing, "--scheduler-cls" in nothing) == (0, False, False), err
    shown = subprocess.Popen(["sh", "-c", out], env={**os.environ, "STAND_IN": str(project)}, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (project / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in (project / "pids").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    shown.wait(timeout=30)
    argv, environment = json.loads((project / "started.json").read_text())
    assert argv[-2:] == ["--max-model-len", "512"]
    assert argv[argv.index("--port") + 1] == "8123"
    assert Path(environment["EAGLE_PID_SETTINGS"]).is_file()


def test_arguments_for_vllm_that_no_shell_would_take_are_one_line(project: Path, made: tuple[Path, Path]) -> None:
    code, out, err = ended(start(project, str(made[1]), "--print", "--vllm-args", "--foo 'x"))
    assert (code, out, err) == (2, "", "error: --vllm-args: --foo 'x: no closing quotation; quote as in a shell\n")


def test_the_champion_of_an_empty_registry_is_one_line(project: Path) -> None:
    code, out, err = ended(start(project, "--champion"))
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith("no model 'eagle31-target'; the registry is empty: make run registers a draft")


@pytest.mark.parametrize(
    ("given", "champion", "word"),
    [(None, False, "give one of"), ("somewhere", True, "give one of"), ("models:/x", False, "no address of a registered model")],
)
def test_an_unclear_bundle_is_one_line(project: Path, given: str | None, champion: bool, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        find_bundle(given, champion, Config(), project)


def test_no_bundle_no_vllm_and_an_old_vllm_are_one_line_each(
    project: Path, made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", str(project))
    config = Config(target={"model": str(made[0])}, vllm={"interpreter": str(project / "py thon")})
    with pytest.raises(BundleError, match="no folder /no/such/bundle"):
        want(Path("/no/such/bundle"), config, project)
    say(project, version="0.21.3")
    with pytest.raises(PreflightError, match=r"has vLLM 0\.21\.3; Eagle 3\.1 drafts need 0\.22 or newer"):
        want(made[1], config, project)
    require_version(VllmBuild("0.22.0rc1", False), Path("py"))
    require_version(VllmBuild("main-abc", False), Path("py"))
    with pytest.raises(PreflightError, match="vLLM not found"):
        want(made[1], Config(target={"model": str(made[0])}), project)


def test_another_tokenizer_of_the_same_size_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    target, bundle = made
    assert check_fit(bundle, target).tokenizer is not None
    other = tiny_target(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"filler', '"fillet').replace("<|filler", "<|fillet"), encoding="utf-8")
    with pytest.raises(BundleError, match="tokenizer .* is not the one that the draft was trained with"):
        check_fit(bundle, other)
    with pytest.raises(BundleError, match="hidden_size"):
        check_fit(bundle, tiny_target(tmp_path / "wide", hidden=128))


def test_a_damaged_record_is_one_line(made: tuple[Path, Path], tmp_path: Path) -> None:
    assert read_record(tmp_path) == BundleRecord()
    (tmp_path / "serving.json").write_text('{"recommended": [{"batch": 0, "draft_tokens": 1}]}')
    with pytest.raises(BundleError, match=r"recommended\.0\.batch"):
        read_record(tmp_path)
    for text, place in (
        ('{"costs": {"version": 99}}', "costs"), ("[]", "file"),
        ('{"recommended": [{"batch": 1, "draft_tokens": 2}, {"batch": 1, "draft_tokens": 3}]}', "recommended"),
    ):  # fmt: skip
        (tmp_path / "serving.json").write_text(text)
        with pytest.raises(BundleError, match=f"serving.json: {place}: .*export the bundle again"):
            read_record(tmp_path)
    (tmp_path / "serving.json").write_text("{")
    with pytest.raises(BundleError, match="cannot be read"):
        read_record(tmp_path)


def test_an_address_that_is_not_ours_is_one_line() -> None:
    with pytest.raises(PreflightError, match="cannot listen on 203.0.113.7"):
        require_free_port("203.0.113.7", 8000)


def test_folders_of_killed_servers_are_swept(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name, owner in (("eagle-serve-dead", str(gone.pid)), ("eagle-serve-live", str(os.getpid())), ("eagle-serve-odd", "x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").write_text(owner)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eagle-serve-live", "eagle-serve-odd"]


def test_measured_settings_and_cuda(project: Path, made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA build the asynchronous class is used; prompts may be cut there."""
    monkeypatch.setenv("STAND_IN", str(project))
    config = Config(target={"model": str(made[0])}, vllm={"interpreter": str(project / "py thon")})
    wanted = want(made[1], config, project)
    cuda = Wanted(**{**vars(wanted), "build": VllmBuild("0.32.0", False)})
    assert "--no-enable-chunked-prefill" in command_of(wanted, project)
    assert "--no-enable-chunked-prefill" not in command_of(cuda, project)
    assert "--gpu-memory-utilization" in command_of(cuda, project)
    recommended = (Recommended(batch=1, draft_tokens=0), Recommended(batch=8, draft_tokens=0))
    assert BundleRecord(recommended=recommended).off
