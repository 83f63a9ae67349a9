"""The soak's measurement against a stand-in for vLLM that answers by rule, and can do wrong what a soak shall see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import soak
from benchmarks.decoding_run import Run
from eagle.bundle.export import export_draft
from eagle.config import Config
from tests.toys import tiny_target, write_program
from tests.unit.test_bundle import make_draft

# Completions of token ids by rule; refuses what is no JSON or too long; counts what is running.
STAND_IN = '''
import http.server, json, os, sys, threading, time
if "--version" in sys.argv:
    print(json.dumps({"version": "0.32.0", "cpu": True}))
    sys.exit()
home = os.environ["STAND_IN"]
said = json.load(open(os.path.join(home, "said.json")))
open(os.path.join(home, "pid"), "w").write(str(os.getpid()))
lock, running, asked, hoard = threading.Lock(), [0], [0], []
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, code, text=""):
        self.send_response(code); self.end_headers(); self.wfile.write(text.encode())
    def do_GET(self):
        if self.path == "/health":
            self.answer(500 if asked[0] > 5 and said.get("sick") else 200)
        else:
            self.answer(200, f'vllm:num_requests_running{{engine="0"}} {running[0] + said.get("stuck", 0)}.0\\n')
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        with lock:
            asked[0] += 1
            number = asked[0]
        if said.get("leaks"):
            hoard.append(bytearray(os.urandom(1 << 20)))
        try:
            body = json.loads(text)
        except ValueError:
            return self.answer(400, "no JSON")
        if len(body["prompt"]) > 2048 and not said.get("swallows"):
            return self.answer(400, "too long")
        if number > 30 and said.get("dies"):
            os._exit(1)
        if number > 20 and said.get("refuses"):
            return self.answer(503, "busy")
        self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.end_headers()
        with lock:
            running[0] += 1
        try:
            for i in range(body["max_tokens"]):
                token = (sum(body["prompt"]) + i) % 250 + (1 if number > 20 and i == 2 and said.get("wrong") else 0)
                self.wfile.write(f"data: {json.dumps({'choices': [{'text': 'x', 'token_ids': [token]}]})}\\n\\n".encode())
                self.wfile.flush()
                time.sleep(0.001)
            self.wfile.write(b"data: [DONE]\\n\\n")
        except OSError:
            pass
        finally:
            with lock:
                running[0] -= 1
    def log_message(self, *rest): pass
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64
    def handle_error(self, *rest): pass
Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''
EFFORT = soak.Effort(requests=60, at_once=8, cancelled=0.2, bad=2, prompts=6, prompt_tokens=400, new_tokens=6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("soak")
    target = tiny_target(base / "target")
    export_draft(make_draft(target, base / "draft"), base / "runs" / "toy" / "bundle" / "bundle", "float32")
    (base / "data" / "suites").mkdir(parents=True)
    questions = "".join(json.dumps({"question": f"What is {i}?"}) + "\n" for i in range(9))
    (base / "data" / "suites" / "qa.jsonl").write_text(questions)
    write_program(base / "python", STAND_IN)
    return base


def measured(made: Path, monkeypatch: pytest.MonkeyPatch, **said: Any) -> tuple[soak.Measured, dict[str, Any]]:
    monkeypatch.setenv("STAND_IN", str(made))
    monkeypatch.setattr(soak, "REST_SECONDS", 2.0)
    (made / "said.json").write_text(json.dumps(said))
    places = {"target": {"model": str(made / "target")}, "vllm": {"interpreter": str(made / "python")}}
    config = Config.model_validate({**places, "serve": {"stop_timeout_s": 0.5}})
    found = soak.measure(Run(made, made / "runs" / "toy", "toy", config), EFFORT)
    assert not psutil.pid_exists(int((made / "pid").read_text()))
    return found, found.runs[0]


def test_a_server_that_does_all_right(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, run = measured(made, monkeypatch)
    assert (found.value, found.broken, found.why) == (100.0, False, None)
    assert run["requests"] == {"bad JSON": 2, "cancelled": 12, "half sent": 2, "oversized": 2, "unread": 2, "whole": 48}
    assert run["as_they_should"] == run["requests"]
    assert (run["equal"], run["health_after"], run["requests_running_after"], run["processes_left"]) == (48, 200, 0, 0)
    assert min(run["memory_bytes"][when] for when in ("before", "half-way", "after")) > 0
    assert soak.FIGURES[0].holds(found.value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"stuck": 2}, "requests running by /metrics: 2"),
        ({"leaks": True}, "memory grew by"),
        ({"sick": True}, "health answers 500"),
        ({"swallows": True}, "2 requests failed"),
    ],
)
def test_what_is_wrong_with_the_server_breaks_the_figure(
    made: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], words: str
) -> None:
    found, _ = measured(made, monkeypatch, **said)
    assert found.value == 100.0
    assert found.broken
    assert words in str(found.why)


def test_wrong_answers_and_refused_ones_lower_the_value(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, run = measured(made, monkeypatch, wrong=True)
    assert found.value is not None
    assert found.value < 100.0
    assert {miss["position"] for miss in run["differences"]} == {2}
    assert all(miss["logit_gap"] >= soak.GAP for miss in run["differences"])
    assert "answered otherwise" in str(found.why)
    monkeypatch.setattr(soak, "GAP", 1e9)  # were they all rounding, they would count as equal and be listed
    found, run = measured(made, monkeypatch, wrong=True)
    assert (found.value, run["rounding"]) == (100.0, len(run["differences"]))


@pytest.mark.parametrize(("said", "words"), [({"refuses": True}, "whole: answered 503"), ({"dies": True}, "")])
def test_a_server_that_fails_half_way_is_a_result(
    made: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], words: str
) -> None:
    found, run = measured(made, monkeypatch, **said)
    assert found.value is not None
    assert found.value < 100.0
    assert "requests failed" in str(found.why)
    assert "answered otherwise" in str(found.why)
    assert words in "\n".join(run["failures"])
    assert run["health_after"] == (200 if "refuses" in said else 0)


def test_the_same_jobs_come_from_the_same_seed() -> None:
    jobs = soak.make_jobs(soak.Effort(), 7, 3)
    assert jobs == soak.make_jobs(soak.Effort(), 7, 3) != soak.make_jobs(soak.Effort(), 7, 4)
    assert len(jobs) == 1040
    assert {job.prompt for job in jobs} == set(range(7))
