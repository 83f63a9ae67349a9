"""`eagle bench --engine vllm` against a stand-in server: what is sent, counted, compared, refused, and left behind."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from eagle.bundle.record import BundleRecord, Recommended, write_record
from eagle.errors import ConfigError
from eagle.servebench.arms import can_be_served, parse_methods
from tests.serve.test_launch import made as made  # noqa: F401 -- the fixture
from tests.toys import write_program

ROOT = Path(__file__).parents[2]

# Answers completions of token ids token by token; a server with drafts counts them. Also plays vLLM's own client.
STAND_IN = '''
import http.server, json, os, sys, threading
if "--version" in sys.argv:
    print(json.dumps({"version": "0.32.0", "cpu": True}))
    sys.exit()
home = os.environ["STAND_IN"]
said = json.load(open(os.path.join(home, "said.json")))
def value(name):
    return sys.argv[sys.argv.index(name) + 1]
if "--result-filename" in sys.argv:
    count, each = int(value("--num-prompts")), int(value("--output-len"))
    assert len(json.load(open(value("--dataset-path")))) == count
    found = {"output_throughput": 10.0, "median_ttft_ms": 5.0, "median_tpot_ms": 2.0, "completed": count - said.get("lost", 0)}
    found["total_output_tokens"] = found["completed"] * each
    json.dump(found, open(os.path.join(value("--result-dir"), value("--result-filename")), "w"))
    sys.exit()
drafts = json.loads(value("--speculative-config")) if "--speculative-config" in sys.argv else None
open(os.path.join(home, f"{os.getpid()}.server"), "w").write(json.dumps(drafts))
lock, rounds, ended = threading.Lock(), [0], [0]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        lines = [f'vllm:request_success_total{{model_name="m",engine="0",finished_reason="length"}} {ended[0]}']
        if drafts:
            n = rounds[0]
            counts = {"drafts": n, "draft_tokens": 3 * n, "accepted_tokens": 2 * n}
            lines += [f'vllm:spec_decode_num_{k}_total{{model_name="m",engine="0"}} {v}' for k, v in counts.items()]
            lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",engine="0",position="{i}"}} {v}'
                      for i, v in enumerate((n, n, 0))]
        self.wfile.write(("\\n".join(lines) + "\\n").encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] and body["temperature"] == 0 and body["stream"], body
        if "refuses" in said:
            self.send_response(400); self.end_headers(); self.wfile.write(said["refuses"].encode())
            return
        self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.end_headers()
        tokens = [(sum(body["prompt"]) + i) % 250 for i in range(body["max_tokens"] - said.get("short", 0))]
        if drafts and said.get("wrong"):
            tokens[2] += 1
        step = 3 if drafts else 1
        for at in range(0, len(tokens), step):
            with lock:
                rounds[0] += 1
            event = {"choices": [{"text": "x", "token_ids": tokens[at : at + step]}]}
            self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())
        with lock:
            ended[0] += 1
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *rest): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
'''


@pytest.fixture
def project(made: tuple[Path, Path], tmp_path: Path) -> Path:  # noqa: F811
    root = tmp_path / "mein Prøjekt"
    run = root / "runs" / "default"
    (run / "bundle").mkdir(parents=True)
    for source in made[1].rglob("*"):
        place = run / "bundle" / "bundle" / source.relative_to(made[1])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(source.read_bytes())
    params = {
        "target": {"model": str(made[0])},
        "vllm": {"interpreter": str(write_program(root / "py thon", STAND_IN))},
        "serve": {"stop_timeout_s": 0.5},
        "bench": {"max_new_tokens": 6, "load_requests": 4, "load_rates": [50.0, 100.0]},
    }
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    (root / "questions.jsonl").write_text("".join(json.dumps({"question": f"What is {i}?"}) + "\n" for i in range(5)))
    (root / "said.json").write_text("{}")
    return root


def bench(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    said = ["--suite", "questions.jsonl", "--engine", "vllm", *arguments]
    return subprocess.run(
        [sys.executable, "-m", "eagle", "--root", str(root), "bench", *said], cwd=ROOT, text=True, capture_output=True, check=False,
        env={**os.environ, "STAND_IN": str(root), "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip


def results(root: Path, name: str) -> Any:
    (found,) = (root / "runs" / "default").glob(f"served-*/{name}")
    return json.loads(found.read_text())


def servers_left(root: Path) -> list[int]:
    return [int(path.stem) for path in root.glob("*.server") if psutil.pid_exists(int(path.stem))]


def test_every_arm_is_measured_on_the_same_prompts(project: Path) -> None:
    done = bench(project, "--batch", "1,3", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    found = results(project, "served.json")
    rows = {(row["method"], row["concurrency"]): row for row in found["rows"]}
    assert set(rows) == {(m, c) for m in ("none", "ngram", "eagle31", "eagle31-pid") for c in (1, 3)}  # no schedule is known
    assert "eagle31-schedule left out" in done.stderr
    for (method, level), row in rows.items():
        assert row["tokens"] == 2 * max(3, level) * 6  # 5 prompts over 2 turns, whole batches at least
        assert row["acceptance_length"] == (None if method == "none" else 3.0)
        assert (row["speedup"] is None) == (method == "none")
        assert row["memory_bytes"] > 0
    assert rows["eagle31", 1]["drafts"] == 2 * 3 * 2  # the warm-up is not counted
    assert rows["eagle31", 1]["acceptance_by_position"] == [1.0, 1.0, 0.0]
    assert found["equality"]["equal"] == {"ngram": 1.0, "eagle31": 1.0, "eagle31-pid": 1.0}
    assert [row["tokens_per_second"]["median"] for row in found["client"]] == [10.0] * 4
    assert "vllm bench serve" in done.stderr
    assert "100.00 %" in done.stderr
    (table,) = (project / "runs" / "default").glob("served-*/served.csv")
    assert len(list(csv.DictReader(table.open()))) == 8
    assert not servers_left(project)


def test_each_server_is_told_how_to_speculate(project: Path) -> None:
    folder = project / "runs" / "default" / "bundle" / "bundle"
    write_record(folder, BundleRecord(recommended=(Recommended(batch=1, draft_tokens=4), Recommended(batch=8, draft_tokens=0))))
    done = bench(project, "--batch", "1", "--rounds", "2", "--methods", "eagle31-pid,eagle31-schedule,ngram,eagle31")
    assert done.returncode == 0, done.stderr
    told = [json.loads(path.read_text()) for path in project.glob("*.server")]
    lengths = {json.dumps(t.get("num_speculative_tokens_per_batch_size")): t["num_speculative_tokens"] for t in told if t}
    assert len(told) == 5
    assert None in told  # none is always measured
    assert {t["method"] for t in told if t} == {"eagle3", "ngram"}
    assert lengths["[[1, 1, 4], [2, 8, 0]]"] in (4, 5)
    assert {row["name"] for row in results(project, "served.json")["rows"]} >= {"Eagle 3.1, K=4", "Eagle 3.1 + PID, K<=5"}


def test_a_text_that_differs_is_listed(project: Path) -> None:
    (project / "said.json").write_text('{"wrong": true}')
    done = bench(project, "--batch", "1", "--rounds", "2", "--methods", "eagle31")
    assert done.returncode == 0, done.stderr
    equal = results(project, "served.json")["equality"]
    assert equal["equal"]["eagle31"] == pytest.approx(2 / 6)
    assert [miss["position"] for miss in equal["mismatches"]] == [2] * 6
    assert all(miss["logit_gap"] >= 0 for miss in equal["mismatches"])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"refuses": "this model's room is 8 tokens"}, "answers 400: this model's room is 8 tokens"),
        ({"short": 1}, "answered 5 tokens of 6"),
        ({"lost": 1}, "own client got 2 of 3 answers"),
    ],
)
def test_what_is_not_whole_is_no_result(project: Path, said: dict[str, Any], words: str) -> None:
    (project / "said.json").write_text(json.dumps(said))
    done = bench(project, "--batch", "1", "--rounds", "2", "--methods", "none")
    assert done.returncode == 7, done.stderr
    assert words in done.stderr.splitlines()[-1]
    assert not list((project / "runs" / "default").glob("served-*/"))
    assert not servers_left(project)


def test_load_sends_requests_when_they_are_due(project: Path) -> None:
    done = bench(project, "--suite", "load", "--methods", "eagle31-pid")
    assert done.returncode != 0  # the shipped prompts are not in this project
    (project / "data" / "suites").mkdir(parents=True)
    (project / "data" / "suites" / "qa.jsonl").write_bytes((project / "questions.jsonl").read_bytes())
    done = bench(project, "--suite", "load", "--methods", "eagle31-pid")
    assert done.returncode == 0, done.stderr
    rows = results(project, "load.json")["rows"]
    assert [(row["rate"], row["arm"]) for row in rows] == [
        (rate, arm) for rate in (50.0, 100.0) for arm in ("none", "Eagle 3.1 + PID, K<=5")
    ]
    assert all(row["requests"] == 4 and row["good"] == 4 for row in rows)


def test_a_run_without_a_bundle_says_which_step_makes_one(project: Path) -> None:
    done = bench(project, "--dir", str(project / "runs" / "other"))
    assert done.returncode == 7
    assert "eagle step bundle" in done.stderr


def test_methods_are_known_and_measured_once() -> None:
    assert parse_methods("eagle31, ngram,eagle31") == ["none", "eagle31", "ngram"]
    with pytest.raises(ConfigError, match="'eagle31-pit'.*eagle31-pid"):
        parse_methods("eagle31-pit")
    off = BundleRecord(recommended=(Recommended(batch=1, draft_tokens=0),))
    assert can_be_served(["none", "eagle31-schedule"], off) == ["none"]
