"""Readers, quarantine, shipped prompts, duplicates, split: the dataset step's parts without a target."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.config import TemperatureShare
from eagle.dataset import readers
from eagle.dataset.duplicates import drop_duplicates, jaccard, word_ngrams
from eagle.dataset.prompts import Prompt, hash_seed, split_prompts, temperature_of
from eagle.dataset.quarantine import Quarantine
from eagle.dataset.read import Row, load_rows, write_shards
from eagle.dataset.shipped import pick_shipped, read_templates
from eagle.errors import ConfigError, DataError

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "prompts"


def _prompt(text: str, row: int = 1) -> Prompt:
    return Prompt("file:x", "file", text, None, "x", row)


def _user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def _read(path: Path, *lines: object, limit: int = 100) -> tuple[list[Prompt], Quarantine]:
    raw = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(raw)
    quarantine = Quarantine()
    return readers.read_prompt_file(path, path.name, limit, quarantine), quarantine


# --- forms of a row


@pytest.mark.parametrize(
    ("row", "system", "user"),
    [
        ({"prompt": " Hi "}, None, "Hi"),
        ({"instruction": "Sort", "input": "3 1"}, None, "Sort\n\n3 1"),
        ({"question": "Why?", "system": "Be brief"}, "Be brief", "Why?"),
        ({"text": "Tell me", "label": 3}, None, "Tell me"),
        ({"turns": ["First", "Second"], "category": "writing"}, None, "First"),
        ({"messages": [_user("A"), {"role": "assistant", "content": "B"}, _user("C")]}, None, "A"),
        ({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}]}, "S", "A"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]}, None, "AB"),
        ({"prompt": [{"role": "user", "content": "A"}]}, None, "A"),
        ({"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]}, None, "A"),
        ({"conversations": [{"role": "user", "content": "A"}]}, None, "A"),
        ({"messages": [_user("A"), {"role": "assistant", "content": None}, {"role": "tool", "content": "x"}]}, None, "A"),
    ],
)
def test_every_form_gives_its_first_user_text(tmp_path, row, system, user):
    prompts, quarantine = _read(tmp_path / "a.jsonl", row)
    assert quarantine.entries == []
    assert [(p.system, p.user, p.row, p.source) for p in prompts] == [(system, user, 1, "file:a.jsonl")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": []}, "empty conversation"),
        ({"messages": []}, "empty conversation"),
        ({"turns": []}, "empty conversation"),
        ({"messages": [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]}, "starts with the assistant"),
        ({"conversations": [{"from": "gpt", "value": "Hello"}]}, "starts with the assistant"),
        ({"messages": [{"role": "system", "content": "S"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": 7}]}, "non-string content: content of message 1 is int"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": {"x": 1}}]}, "non-string content"),
        ({"messages": [{"role": "user"}]}, "non-string content: content of message 1 is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "non-string content"),
        ({"messages": [{"content": "no role"}]}, "unknown role"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role"),
        ({"messages": "hello"}, "not a list of messages"),
        ({"messages": ["hello"]}, "bad message"),
        ({"turns": [None]}, "non-string content"),
        ({"prompt": None}, "non-string content"),
        ({"prompt": "  \n"}, "empty prompt"),
        ({"prompt": "\ud800 x"}, "unpaired surrogates"),
        ({"prompt": "x" * 100_000}, "prompt too long: 100000 characters"),
        ({"answer": "x"}, "no prompt"),
        ({}, "no prompt"),
        (["x"], "not an object: list"),
        ("x", "not an object: str"),
        (b"", "blank line"),
        (b"   ", "blank line"),
        (b'{"prompt": "caf\xe9"}', "invalid UTF-8: byte 16"),
        (b'{"prompt": "x"', "invalid JSON"),
        (b"[" * 200_000, "invalid JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "invalid JSON"),
    ],
)
def test_bad_rows_are_quarantined_and_their_neighbours_are_not(tmp_path, row, reason):
    prompts, quarantine = _read(tmp_path / "bad.jsonl", {"prompt": "before"}, row, {"prompt": "after"})
    assert [p.user for p in prompts] == ["before", "after"]
    assert [(e.file, e.row) for e in quarantine.entries] == [("bad.jsonl", 2)]
    assert quarantine.entries[0].reason.startswith(reason)
    quarantine.write(tmp_path / "q.jsonl")  # whatever the excerpt holds, it can be written and read
    assert json.loads((tmp_path / "q.jsonl").read_text(encoding="utf-8"))["row"] == 2


def test_truncated_last_line_and_empty_file(tmp_path):
    (tmp_path / "cut.jsonl").write_bytes(b'{"prompt": "whole"}\r\n{"prompt": "cut of')
    quarantine = Quarantine()
    assert [p.user for p in readers.read_prompt_file(tmp_path / "cut.jsonl", "cut", 50, quarantine)] == ["whole"]
    (tmp_path / "empty.jsonl").touch()
    assert readers.read_prompt_file(tmp_path / "empty.jsonl", "empty", 50, quarantine) == []
    found = [(e.file, e.row, e.reason.partition(":")[0]) for e in quarantine.entries]
    assert found == [("cut", 2, "invalid JSON"), ("empty", 0, "empty file")]
    assert quarantine.entries[0].reason.endswith("the last line is cut off")
    assert quarantine.reasons() == {"empty file": 1, "invalid JSON": 1}


def test_overlong_line_is_skipped_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 64)
    prompts, quarantine = _read(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "x" * 500}, {"prompt": "b"})
    assert [(p.user, p.row) for p in prompts] == [("a", 1), ("b", 3)]
    assert [(e.row, e.reason.partition(":")[0]) for e in quarantine.entries] == [(2, "line too long")]


def test_a_byte_order_mark_is_no_error(tmp_path):
    prompts, quarantine = _read(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}')
    assert ([p.user for p in prompts], quarantine.entries) == (["a"], [])


def test_unreadable_file_names_its_sibling(tmp_path):
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(ConfigError, match=r"cannot read .*promts\.jsonl.*closest: 'prompts\.jsonl'"):
        readers.read_prompt_file(tmp_path / "promts.jsonl", "x", 10, Quarantine())


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_arbitrary_bytes_never_stop_the_reader(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("fuzz") / "f.jsonl"
    path.write_bytes(b"\n".join(lines))
    quarantine = Quarantine()
    prompts = readers.read_prompt_file(path, "f", 10, quarantine)
    quarantine.write(path.with_suffix(".q"))
    rows = path.read_bytes().count(b"\n") + (not path.read_bytes().endswith(b"\n"))
    assert len(prompts) + len(quarantine.entries) == (rows if path.stat().st_size else 1)


def test_sample_keeps_order_and_depends_on_the_seed():
    prompts = [_prompt(f"p{n}") for n in range(50)]
    chosen = readers.sample_prompts(prompts, 10, 0)
    assert len(chosen) == 10
    assert [p for p in prompts if p in chosen] == chosen
    assert chosen == readers.sample_prompts(prompts, 10, 0) != readers.sample_prompts(prompts, 10, 1)
    assert readers.sample_prompts(prompts, 0, 0) is prompts


# --- duplicates


def test_near_duplicates_go_and_the_first_stays():
    long = "please write a long and detailed story about a dragon who guards a library in the far north of the country"
    texts = [long, "other words entirely, nothing alike", long + " today", long, long.upper()]
    prompts = [_prompt(text) for text in texts]
    found = drop_duplicates(prompts, 0.85)
    assert [p.text for p in found.prompts] == [long, prompts[1].text]
    assert (found.exact, found.near) == (1, 2)
    only_exact = drop_duplicates(prompts, 1.0)
    assert (len(only_exact.prompts), only_exact.exact, only_exact.near) == (4, 1, 0)


WORDS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9).map(" ".join)
ASCII = st.text(st.characters(max_codepoint=127), min_size=1, max_size=5)


@given(st.lists(WORDS, max_size=30), st.sampled_from([0.4, 0.7, 0.85]))
def test_what_stays_is_unlike_and_what_goes_has_a_reason(texts, threshold):
    prompts = [_prompt(text, row) for row, text in enumerate(texts, start=1)]
    found = drop_duplicates(prompts, threshold)
    assert len(found.prompts) + found.exact + found.near == len(prompts)
    grams = [word_ngrams(p.text) for p in found.prompts]
    for at, prompt in enumerate(prompts):
        if prompt not in found.prompts:
            assert any(jaccard(word_ngrams(prompt.text), g) >= threshold for g in grams), at
    assert drop_duplicates(prompts, threshold) == found


def test_word_ngrams_of_scripts_without_blanks():
    assert word_ngrams("我喜欢猫") == {"我 喜 欢", "喜 欢 猫"}
    assert word_ngrams("Hi, there!") == word_ngrams("hi there") == {"hi there"}
    assert word_ngrams("!!!") == {"!!!"}


# --- split, temperature, seed


def test_split_is_by_text_alone_and_near_the_fraction():
    prompts = [_prompt(f"question number {n}") for n in range(4000)]
    splits = split_prompts(prompts, 0.1)
    share = Counter(splits.values())["heldout"] / len(prompts)
    assert abs(share - 0.1) < 0.02
    fewer = split_prompts(prompts[::7], 0.1)
    assert all(splits[key] == split for key, split in fewer.items())
    wider = split_prompts(prompts, 0.2)
    assert all(wider[key] == "heldout" for key, split in splits.items() if split == "heldout")


@given(st.sets(ASCII, min_size=2, max_size=12), st.sampled_from([0.001, 0.5, 0.899]))
def test_neither_side_of_two_prompts_is_empty(texts, fraction):
    assert set(split_prompts([_prompt(t) for t in texts], fraction).values()) == {"train", "heldout"}


def test_temperatures_follow_the_mix_and_heldout_is_greedy():
    shares = [TemperatureShare(temperature=0.0, weight=0.7), TemperatureShare(temperature=0.8, weight=0.3)]
    drawn = Counter(temperature_of(_prompt(f"q {n}"), "train", shares) for n in range(3000))
    assert abs(drawn[0.0] / 3000 - 0.7) < 0.03
    assert set(drawn) == {0.0, 0.8}
    assert {temperature_of(_prompt(f"q {n}"), "heldout", shares[1:]) for n in range(50)} == {0.0}
    assert hash_seed(0, "answer", "x") != hash_seed(1, "answer", "x")
    assert 0 <= hash_seed(0) < 2**31


# --- shipped prompts


def test_shipped_prompts_are_many_distinct_and_of_all_kinds():
    templates = read_templates(SHIPPED)
    assert len(templates) >= 300
    picked = pick_shipped(templates, 3000, 0)
    assert len({p.text for p in picked}) == 3000
    assert {"chat", "qa", "maths", "code", "summary", "translation"} <= {p.kind for p in picked}
    assert sum(path.stat().st_size for path in SHIPPED.glob("*.jsonl")) < 400_000
    slots = {f"{{{name}}}" for t in templates for name, _ in t.slots}
    assert not [p.text for p in picked if any(slot in p.text for slot in slots - {"{name}"})]


def test_shipped_pick_is_balanced_and_deterministic():
    templates = read_templates(SHIPPED)
    picked = pick_shipped(templates, 120, 3)
    assert set(Counter(p.kind for p in picked).values()) == {120 // len({t.kind for t in templates})}
    assert picked == pick_shipped(templates, 120, 3)
    assert picked != pick_shipped(templates, 120, 4)
    assert len({(p.file, p.row) for p in picked}) == 120  # no row is used twice while others are unused


def test_templates_expand_to_all_combinations_and_keep_other_braces(tmp_path):
    slots = {"x": ["u", "v"], "n": {"min": 1, "max": 5, "step": 2}}
    rows = [{"kind": "a", "template": "{x} and {n}: {other} {}", "slots": slots}, {"kind": "b", "prompt": "{x}"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    picked = pick_shipped(read_templates(tmp_path), 100, 0)
    assert sorted(p.text for p in picked) == sorted([f"{x} and {n}: {{other}} {{}}" for x in "uv" for n in (1, 3, 5)] + ["{x}"])


@pytest.mark.parametrize(
    "row",
    [
        "{", '{"kind": "a"}', '{"kind": "a", "template": "x", "slots": {"y": ["1"]}}',
        '{"kind": "a", "template": "{y}", "slots": {"y": []}}',
        '{"kind": "a", "template": "{y}", "slots": {"y": {"min": 2, "max": 1}}}',
    ],
)
def test_malformed_shipped_row_is_named(tmp_path, row):
    (tmp_path / "t.jsonl").write_text('{"kind": "a", "prompt": "ok"}\n' + row)
    with pytest.raises(DataError, match=r"t\.jsonl, row 2"):
        read_templates(tmp_path)


# --- shards


def _row(number: int) -> Row:
    return Row(f"{number:064x}", "self", "self", 0.8, [1, 2, 3, number], [0, 0, 1, 1], 2, "stop")


def test_shards_round_trip_with_the_same_bytes(tmp_path):
    rows = [_row(n) for n in range(5)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert write_shards(tmp_path / name, "train", rows, 2) == [f"train-0000{n}.parquet" for n in range(3)]
    assert load_rows(tmp_path / "a", "train") == rows
    assert (rows[3].prompt, rows[3].answer) == ([1, 2], [3, 3])
    written = [[path.read_bytes() for path in sorted((tmp_path / name).iterdir())] for name in ("a", "b")]
    assert written[0] == written[1]
    assert str(pq.read_schema(tmp_path / "a" / "train-00000.parquet").field("input_ids").type) == "list<element: int32>"
    with pytest.raises(DataError, match="no heldout shards"):
        load_rows(tmp_path / "a", "heldout")


def test_a_damaged_shard_is_named(tmp_path):
    write_shards(tmp_path, "heldout", [_row(1)], 10)
    (tmp_path / "heldout-00000.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"heldout-00000\.parquet: not readable"):
        load_rows(tmp_path, "heldout")
