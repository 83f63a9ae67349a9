"""The dataset step as a whole, on a tiny random target with the transformers backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle.config import Config
from eagle.dataset.quarantine import Quarantine
from eagle.dataset.read import load_rows
from eagle.dataset.selfprompt import self_prompt_requests, self_prompts
from eagle.dataset.step import run
from eagle.errors import ConfigError, DataError
from eagle.steps import StepContext
from eagle.target.generate import Completion
from eagle.target.load import load_tokenizer
from tests.toys import tiny_target, tiny_tokenizer

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "prompts"
GOOD = [{"prompt": f"Say the word number {n}, please, and then {n + 1}."} for n in range(6)]
BAD = (
    b'{"messages": []}\n'
    b'{"messages": [{"role": "assistant", "content": "Hello"}]}\n'
    b'{"messages": [{"role": "user", "content": 12}]}\n'
    b'{"prompt": "' + b"long " * 20_000 + b'"}\n'
    b'{"prompt": "caf\xe9"}\n'
    b"\n"
    b'{"prompt": "a usable one among them"}\n'
    b'{"prompt": "cut in the mid'
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, scale=1.0)


def _context(root: Path, target: Path, name: str = "a", **dataset: object) -> StepContext:
    section = {
        "backend": "transformers", "shipped_prompts": 0, "self_prompts": 0, "max_prompt_tokens": 200, "max_new_tokens": 12,
        "min_new_tokens": 1, "heldout_fraction": 0.3, "shard_rows": 16,
    } | dataset  # fmt: skip
    sections = {"runtime": {"threads": 1}, "target": {"model": str(target), "dtype": "float32"}, "dataset": section}
    config = Config.model_validate(sections)
    out, work = root / name, root / f"{name}.work"
    out.mkdir()
    work.mkdir()
    return StepContext(config, root, {}, out, work)


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_all_sources_together_and_the_same_bytes_again(tmp_path, target):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompts").symlink_to(SHIPPED)
    _write(tmp_path / "mine.jsonl", [*GOOD, GOOD[0]])
    contexts = [
        _context(tmp_path, target, name, prompt_files=["mine.jsonl"], shipped_prompts=24, self_prompts=10, self_prompt_tokens=16,
                 max_prompt_tokens=2000)
        for name in ("a", "b")
    ]  # fmt: skip
    metrics = [run(context) for context in contexts]
    assert metrics[0] == metrics[1]
    files = [sorted(p for p in context.out.iterdir()) for context in contexts]
    assert [p.name for p in files[0]] == [p.name for p in files[1]]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]
    expected = {"dataset.json", "stats.json", "quarantine.jsonl", "train-00000.parquet", "heldout-00000.parquet"}
    assert expected <= {p.name for p in files[0]}

    out = contexts[0].out
    stats = json.loads((out / "stats.json").read_text())
    assert stats["prompts_offered"] == {"file:mine.jsonl": 7, "self": pytest.approx(10, abs=5), "shipped": 24}
    assert stats["duplicates_dropped"]["exact"] >= 1
    tokenizer = load_tokenizer(target)
    train, heldout = load_rows(out, "train"), load_rows(out, "heldout")
    assert metrics[0]["train_rows"] == len(train) == stats["splits"]["train"]["rows"]
    assert {row.temperature for row in heldout} == {0.0}
    assert len({row.temperature for row in train}) > 1
    assert not {row.id for row in train} & {row.id for row in heldout}
    assert [row.id for row in train] == sorted(row.id for row in train)
    for row in [*train, *heldout]:
        assert row.loss_mask == [0] * row.prompt_length + [1] * len(row.answer)
        assert 1 <= len(row.answer) <= 12
        assert (row.finish == "stop") == (row.answer[-1] == 2)
        assert tokenizer.decode(row.prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_file_full_of_troubles_finishes_with_each_one_listed(tmp_path, target):
    (tmp_path / "bad.jsonl").write_bytes(BAD)
    (tmp_path / "empty.jsonl").touch()
    _write(tmp_path / "good.jsonl", GOOD)
    context = _context(tmp_path, target, prompt_files=["bad.jsonl", "empty.jsonl", "good.jsonl"])
    metrics = run(context)
    lines = (context.out / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert [(e["file"], e["row"], e["reason"].partition(":")[0]) for e in entries] == [
        ("bad.jsonl", 1, "empty conversation"), ("bad.jsonl", 2, "starts with the assistant"),
        ("bad.jsonl", 3, "non-string content"), ("bad.jsonl", 4, "prompt too long"),
        ("bad.jsonl", 5, "invalid UTF-8"), ("bad.jsonl", 6, "blank line"),
        ("bad.jsonl", 8, "invalid JSON"), ("empty.jsonl", 0, "empty file"),
    ]  # fmt: skip
    assert all(len(e["excerpt"]) <= 480 for e in entries)
    assert metrics["quarantined"] == 8
    assert metrics["train_rows"] + metrics["heldout_rows"] == 7


def test_self_prompts_that_ended_come_first_and_cut_ones_fill_up():
    tokenizer = tiny_tokenizer()
    config = Config.model_validate({"dataset": {"self_prompts": 3}})
    assert len(self_prompt_requests(tokenizer, Config.model_validate({"dataset": {"self_prompts": 8}}))) == 10
    texts = [
        ("first cut", "length"), (" second ", "stop"), ("", "stop"), ("third cut", "length"), ("fourth", "stop"), ("fi\n", "stop"),
    ]  # fmt: skip
    completions = [
        Completion(tokenizer(text)["input_ids"] + ([2] if finish == "stop" else []), finish) for text, finish in texts
    ]
    quarantine = Quarantine()
    chosen = self_prompts(tokenizer, completions, config, quarantine)
    assert [(p.text, p.row) for p in chosen] == [("second", 2), ("fourth", 5), ("fi", 6)]
    assert [p.text for p in self_prompts(tokenizer, completions[:4], config, quarantine)] == ["first cut", "second", "third cut"]
    assert {(e.file, e.row, e.reason) for e in quarantine.entries} == {("self", 3, "empty prompt")}


def test_prompts_over_the_token_limit_and_short_answers_are_quarantined(tmp_path, target):
    _write(tmp_path / "p.jsonl", [*GOOD, {"prompt": "word " * 60}])
    context = _context(tmp_path, target, prompt_files=["p.jsonl"], max_prompt_tokens=120, max_new_tokens=40, min_new_tokens=8)
    metrics = run(context)
    stats = json.loads((context.out / "stats.json").read_text())
    assert stats["quarantined"]["prompt too long"] == 1
    kept = [row for split in ("train", "heldout") for row in load_rows(context.out, split)]
    assert all(len(row.answer) >= 8 for row in kept)
    assert metrics["quarantined"] == 7 - len(kept)


def test_no_usable_prompt_at_all_is_an_error_with_the_first_reason(tmp_path, target):
    (tmp_path / "bad.jsonl").write_bytes(BAD.partition(b"\n")[0])
    with pytest.raises(DataError, match=r"0 usable prompts.*bad\.jsonl row 1 \(empty conversation\)"):
        run(_context(tmp_path, target, prompt_files=["bad.jsonl"]))
    with pytest.raises(ConfigError, match=r"no file .*gone\.jsonl"):
        run(_context(tmp_path, target, "b", prompt_files=["gone.jsonl"]))


def test_a_template_that_refuses_a_row_quarantines_it(tmp_path, tmp_path_factory):
    strict = tiny_target(tmp_path_factory.mktemp("strict"), layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16)
    jinja = strict / "chat_template.jinja"
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    jinja.write_text(refusal + jinja.read_text())
    _write(tmp_path / "p.jsonl", [*GOOD, {"prompt": "Hello", "system": "Be brief"}])
    context = _context(tmp_path, strict, prompt_files=["p.jsonl"])
    run(context)
    entry = json.loads((context.out / "quarantine.jsonl").read_text())
    assert (entry["file"], entry["row"]) == ("p.jsonl", 7)
    assert entry["reason"].startswith("template: ")
    assert "no system role" in entry["reason"]
