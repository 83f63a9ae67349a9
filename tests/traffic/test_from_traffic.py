"""From a request log to a prompt file: forms, opt-out, retention, sampling, duplicates, bad rows, memory."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle.cli import app
from eagle.config import Config
from eagle.dataset.quarantine import Quarantine
from eagle.dataset.readers import BadRow, read_prompt_file
from eagle.errors import ConfigError, DataError
from eagle.traffic.collect import OptOut, Report, collect, read_opt_out
from eagle.traffic.requests import parse_line

ROOT = Path(__file__).parents[2]
NOW = 1_800_000_000.0
DAY = 86400.0


def chat(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def write_log(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def run(
    tmp_path: Path, rows: list[Any], opt_out: OptOut | None = None, name: str = "log.jsonl", **traffic: Any
) -> tuple[list[Any], Report]:
    log = write_log(tmp_path / name, rows)
    report = collect(log, tmp_path / "out.jsonl", opt_out or OptOut(), Config(traffic=traffic), NOW)
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()], report


def texts(rows: list[Any]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


class TestForms:
    @pytest.mark.parametrize(
        "row",
        [
            chat("Hi there"),
            {"request": chat("Hi there"), "time": "2026-01-01T00:00:00Z"},
            {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat("Hi there")},
            {"body": json.dumps(chat("Hi there"))},
            {"log": 1, "data": {"request": {"body": chat("Hi there")}}},
            chat([{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]),
            {"model": "m", "prompt": "Hi there"},
            {"model": "m", "input": "Hi there"},
            {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi there"}]}]},
            {"input": {"messages": [{"role": "user", "content": "Hi there"}]}, "output": "Hello"},
            chat("Hi there") | {"response": {"choices": []}},
            {"messages": [*chat("Hi there")["messages"], {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]},
        ],
    )  # fmt: skip
    def test_accepted(self, row: Any) -> None:
        found = parse_line(json.dumps(row).encode())
        assert (found.system, found.user) == (None, "Hi there")

    @pytest.mark.parametrize("role", ["system", "developer"])
    def test_system_messages(self, role: str) -> None:
        row = {"messages": [{"role": role, "content": "Be brief"}, {"role": "user", "content": "Hi"}]}
        assert parse_line(json.dumps(row).encode()).system == "Be brief"
        row = {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief"}
        assert parse_line(json.dumps(row).encode()).system == "Be brief"

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"{", "invalid JSON"), (b"[1]", "not an object"), (b"{}", "no request"), (b'{"messages": "x"}', "not a list"),
            (b'{"messages": []}', "no user message"), (b'{"messages": [1]}', "bad message"), (b"\xff", "invalid UTF-8"),
            (b'{"messages": [{"role": "assistant", "content": "x"}]}', "starts with another role"),
            (b'{"messages": [{"role": "user"}]}', "non-string content"), (b'{"prompt": [1, 2]}', "non-string content"),
            (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}', "not only text"),
            (b'{"body": "nonsense"}', "invalid JSON"), (b'{"body": {"body": {"body": {"body": {"prompt": "x"}}}}}', "no request"),
            (b"[" * 100_000, "invalid JSON"), (b'{"input": {"x": 1}}', "no request"),
            (b'{"instructions": 1, "input": "x"}', "non-string"), ('{"prompt": "x"}'.encode("utf-16-le"), "invalid JSON"),
        ],
    )  # fmt: skip
    def test_refused_with_a_reason(self, line: bytes, reason: str) -> None:
        with pytest.raises(BadRow, match=f"^{reason}"):
            parse_line(line)

    @pytest.mark.parametrize(
        "value", [1_700_000_000, 1_700_000_000_000, 1.7e15, "1700000000", "2023-11-14T22:13:20Z", "2023-11-14T22:13:20"]
    )
    def test_times(self, value: Any) -> None:
        assert parse_line(json.dumps({"request": chat("x"), "time": value}).encode()).time == pytest.approx(1_700_000_000)

    @pytest.mark.parametrize("value", [None, "yesterday", True, -5, [], "nan", 1e30])
    def test_no_times(self, value: Any) -> None:
        assert parse_line(json.dumps({"request": chat("x"), "time": value}).encode()).time is None

    def test_users_are_found_wherever_they_stand(self) -> None:
        row = {"request": chat("x", user="a", metadata={"user_id": "b"}), "end_user": 7}
        assert sorted(parse_line(json.dumps(row).encode()).users) == ["7", "a", "b"]


class TestCollect:
    def test_the_pipeline_reads_what_was_written(self, tmp_path: Path) -> None:
        rows, report = run(tmp_path, [chat("Tell me a story about whales"), {"prompt": "Sum up the French revolution"}])
        quarantine = Quarantine()
        prompts = read_prompt_file(tmp_path / "out.jsonl", "out.jsonl", 384, quarantine)
        assert [p.user for p in prompts] == texts(rows)
        assert quarantine.entries == []
        assert {p.kind for p in prompts} == {"traffic"}
        assert report.written == 2

    def test_masking_is_on_unless_switched_off(self, tmp_path: Path) -> None:
        row = {"messages": [{"role": "system", "content": "You serve a@b.org"}, {"role": "user", "content": "Mail to c@d.org"}]}
        rows, report = run(tmp_path, [row])
        assert [m["content"] for m in rows[0]["messages"]] == ["You serve [EMAIL]", "Mail to [EMAIL]"]
        assert report.masked == {"EMAIL": 2}
        assert texts(run(tmp_path, [row], mask=False)[0]) == ["Mail to c@d.org"]

    def test_texts_that_differ_in_what_is_masked_only_are_one(self, tmp_path: Path) -> None:
        rows, report = run(tmp_path, [chat(f"Please write a mail to user{at}@example.org") for at in range(5)])
        assert texts(rows) == ["Please write a mail to [EMAIL]"]
        assert (report.exact, report.masked) == (4, {"EMAIL": 1})

    def test_duplicates(self, tmp_path: Path) -> None:
        long = "Explain in simple words how the moon moves the water of the sea, and why there are two tides a day"
        rows, report = run(tmp_path, [chat(long), chat(long), chat(f"{long} please"), chat("Another question")])
        assert len(rows) == 2
        assert (report.repeated, report.near) == (1, 1)

    def test_retention(self, tmp_path: Path) -> None:
        logged = [
            {"request": chat("a new question"), "time": NOW - DAY}, {"request": chat("an old one"), "time": NOW - 40 * DAY},
            chat("nobody knows when"),
        ]  # fmt: skip
        rows, report = run(tmp_path, logged, retention_days=30)
        assert texts(rows) == ["a new question"]
        assert (report.too_old, report.no_time) == (1, 1)
        assert len(run(tmp_path, logged)[0]) == 3

    def test_opt_out(self, tmp_path: Path) -> None:
        sha = hashlib.sha256
        listed = tmp_path / "opt out.txt"
        listed.write_text(f"# left\nalice\n{sha(b'bob').hexdigest().upper()}\n\n{sha(b'my secret question').hexdigest()}\n")
        logged = [
            chat("from alice", user="alice"), {"request": chat("from bob"), "user_id": "bob"}, chat("  my secret question "),
            chat("from carol", user="carol"), chat("alice"),
        ]  # fmt: skip
        rows, report = run(tmp_path, logged, read_opt_out(listed))
        assert texts(rows) == ["from carol", "alice"]
        assert report.opted_out == 3
        with pytest.raises(ConfigError, match="opt-out list .* cannot be read"):
            read_opt_out(tmp_path / "none.txt")

    def test_the_sample_is_chosen_by_hash_and_stays_in_order(self, tmp_path: Path) -> None:
        logged = [chat(f"{word} question number {at}") for at, word in enumerate(["alpha", "beta", "gamma"] * 40)]
        rows, report = run(tmp_path, logged, max_prompts=10)
        assert len(rows) == 10
        assert report.not_chosen == 110
        order = [row["messages"][0]["content"] for row in logged]
        assert sorted(texts(rows), key=order.index) == texts(rows)
        again, _ = run(tmp_path, list(reversed(logged)), max_prompts=10)
        assert sorted(texts(again)) == sorted(texts(rows))
        more, _ = run(tmp_path, logged, max_prompts=20)
        assert set(texts(rows)) <= set(texts(more))

    def test_a_prompt_sent_often_counts_once(self, tmp_path: Path) -> None:
        logged = [chat("the same every minute")] * 500 + [chat(f"question {at} of many") for at in range(20)]
        rows, _ = run(tmp_path, logged, max_prompts=21)
        assert len(set(texts(rows))) == len(rows) == 21

    def test_bad_rows_are_listed_without_their_content(self, tmp_path: Path) -> None:
        bad = ["not json with secret hunter2", "", '{"a": 1}', chat("   "), chat("x" * 20_000), chat("\ud800")]
        rows, report = run(tmp_path, [*bad, chat("a good one")])
        assert texts(rows) == ["a good one"]
        listed = (tmp_path / "out.quarantine.jsonl").read_text()
        assert [json.loads(line)["row"] for line in listed.splitlines()] == [1, 2, 3, 4, 5, 6]
        assert "hunter2" not in listed
        assert sum(report.left_out.values()) == 6
        assert report.rows == 7

    def test_a_line_that_is_too_long_is_one_bad_row(self, tmp_path: Path) -> None:
        rows, report = run(tmp_path, ['{"prompt": "' + "x" * (17 << 20) + '"}', chat("after it")])
        assert texts(rows) == ["after it"]
        assert report.left_out == {"line too long": 1}

    def test_gzip_and_a_byte_order_mark(self, tmp_path: Path) -> None:
        rows, _ = run(tmp_path, ["\ufeff" + json.dumps(chat("Grüße aus Köln"))], name="log.jsonl.gz")
        assert texts(rows) == ["Grüße aus Köln"]

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "latin-1"])
    def test_another_encoding_is_no_prompt_of_strange_letters(self, tmp_path: Path, encoding: str) -> None:
        """Line by line, JSON's guess of the encoding would have made prompts of UTF-16 that nobody wrote."""
        log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
        letters = "Grüße" if encoding == "latin-1" else "Grüße 中文"
        rows = "".join(json.dumps(chat(f"{letters} Nr. {i}"), ensure_ascii=False) + "\n" for i in range(4))
        log.write_bytes(rows.encode(encoding))
        with pytest.raises(DataError, match="iconv -f UTF-16" if encoding in ("utf-16", "utf-32") else "one JSON object a line"):
            collect(log, out, OptOut(), Config(), NOW)
        assert list(tmp_path.iterdir()) == [log]

    def test_a_gzip_file_under_another_name(self, tmp_path: Path) -> None:
        packed = write_log(tmp_path / "log.jsonl.gz", [chat("x")])
        packed.rename(tmp_path / "log.jsonl")
        with pytest.raises(DataError, match=r"a name that ends in \.gz"):
            collect(tmp_path / "log.jsonl", tmp_path / "out.jsonl", OptOut(), Config(), NOW)

    def test_the_log_is_not_replaced_by_its_own_quarantine(self, tmp_path: Path) -> None:
        log = write_log(tmp_path / "out.quarantine.jsonl", [chat("Something to keep"), "bad"])
        before = log.read_bytes()
        with pytest.raises(ConfigError, match="not the log itself"):
            collect(log, tmp_path / "out.jsonl", OptOut(), Config(), NOW)
        assert log.read_bytes() == before

    @pytest.mark.parametrize("case", ["no log", "folder", "cut gzip", "nothing left", "no folder", "onto the log"])
    def test_nothing_half_written(self, tmp_path: Path, case: str) -> None:
        log = write_log(tmp_path / ("log.jsonl.gz" if case == "cut gzip" else "log.jsonl"), [chat("x")] * 100)
        out = tmp_path / "out" / "prompts.jsonl"
        if case != "no folder":
            out.parent.mkdir()
        if case == "no log":
            log = tmp_path / "lok.jsonl"
        elif case == "folder":
            log = tmp_path
        elif case == "cut gzip":
            log.write_bytes(log.read_bytes()[:-20])
        elif case == "nothing left":
            write_log(log, ["{}"])
        elif case == "onto the log":
            out = log
        before = log.read_bytes() if log.is_file() else b""
        with pytest.raises((DataError, ConfigError)) as caught:
            collect(log, out, OptOut(), Config(), NOW)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("traffic: ")
        assert not out.parent.exists() or sorted(p.name for p in out.parent.iterdir()) in ([], ["log.jsonl", "out"])
        assert case != "onto the log" or log.read_bytes() == before


def test_the_command_ends_with_a_table_and_the_next_command(tmp_path: Path) -> None:
    log = write_log(tmp_path / "my log.jsonl", [chat("Call +49 170 1234567"), "bad", chat("Another thing")])
    out = tmp_path / "prompts of mine.jsonl"
    result = CliRunner().invoke(app, ["--root", str(ROOT), "dataset", "from-traffic", str(log), "--out", str(out)])
    assert result.exit_code == 0, result.output
    for words in ("rows read", "quarantined: invalid JSON", "masked: PHONE", "prompts written", "next: python -m flows.retrain"):
        assert words in result.output
    assert len(out.read_text().splitlines()) == 2


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle", "dataset", "from-traffic", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "y.jsonl")],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """A log of 10 MB is read with less than 5 MB of Python memory at the peak."""
    import tracemalloc

    log = tmp_path / "log.jsonl"
    with log.open("w", encoding="utf-8") as stream:
        for at in range(10_000):
            stream.write(json.dumps(chat(f"{at} " + "lorem ipsum dolor " * 55)) + "\n")
    assert log.stat().st_size > 10e6
    tracemalloc.start()
    try:
        collect(log, tmp_path / "out.jsonl", OptOut(), Config(traffic={"max_prompts": 20}), NOW)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5e6
