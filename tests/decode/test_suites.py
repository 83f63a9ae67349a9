"""The benchmark's prompts and how suites are put together."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from eagle.bench.suites import KINDS, SHIPPED, Suite, load_suite
from eagle.bench.workload import load_workload
from eagle.dataset.duplicates import jaccard, word_ngrams
from eagle.dataset.shipped import read_templates
from eagle.errors import ConfigError, DataError
from eagle.target.template import render_prompt
from tests.toys import tiny_target, tiny_tokenizer
from tests.training.builders import write_dataset

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "prompts"
RENDER = partial(render_prompt, tiny_tokenizer())
ROOMY = 20_000  # the toy tokenizer has one token a byte


def load(name: str, root: Path = ROOT, limit: int = ROOMY, **more: object) -> Suite:
    return load_suite(name, root=root, render=RENDER, max_prompt_tokens=limit, **more)  # type: ignore[arg-type]


def shipped() -> list[dict[str, str]]:
    return [json.loads(line) for path in sorted((ROOT / SHIPPED).glob("*.jsonl")) for line in path.open(encoding="utf-8")]


def text_of(ids: list[int]) -> str:
    text = str(tiny_tokenizer().decode(ids))
    return text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")


def write(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def likeness(prompts: list[str], others: Iterable[str]) -> list[tuple[float, str]]:
    """Return for each prompt the highest Jaccard similarity with any of `others`, and that one; exact, no sketches."""
    grams = [word_ngrams(prompt) for prompt in prompts]
    holders = defaultdict(list)
    for at, mine in enumerate(grams):
        for gram in mine:
            holders[gram].append(at)
    best = [(0.0, "")] * len(prompts)
    for other in others:
        theirs = word_ngrams(other)
        for at in {at for gram in theirs for at in holders.get(gram, ())}:
            best[at] = max(best[at], (jaccard(grams[at], theirs), other))
    return best


def test_shipped_files() -> None:
    rows = shipped()
    assert all(row.keys() == {"kind", "prompt"} and row["prompt"] == row["prompt"].strip() for row in rows)
    assert Counter(row["kind"] for row in rows) == dict.fromkeys(KINDS, 20)
    assert {path.stem for path in (ROOT / SHIPPED).glob("*.jsonl")} == set(KINDS)
    for row in rows:
        words = len(row["prompt"].split())
        assert words <= 170, "the 384 tokens that a prompt may have by default must hold it"
        if row["kind"] == "summary":
            passage = max(row["prompt"].split("\n\n"), key=len)
            assert 80 <= len(passage.split()) <= 150, passage


def test_no_prompt_is_one_that_training_can_expand() -> None:
    expanded = [t.expand(at).text for t in read_templates(ROOT / "data" / "prompts") for at in range(t.size)]
    assert len(expanded) > 10_000, "all of them, not a sample"
    prompts = [row["prompt"] for row in shipped()]
    for prompt, (score, other) in zip(prompts, likeness(prompts, expanded), strict=True):
        assert score < 0.3, f"{prompt!r} is like {other!r}"
    # The same measure finds what it is for: a training prompt with one word changed.
    changed = expanded[0].replace("any advice", "some advice").replace("week", "month")
    assert likeness([changed], expanded)[0][0] > 0.5


def test_shipped_prompts_differ_from_each_other() -> None:
    for (one, left), (other, right) in itertools.combinations([(r["prompt"], word_ngrams(r["prompt"])) for r in shipped()], 2):
        assert jaccard(left, right) < 0.2, (one, other)


def test_default() -> None:
    suite = load("default")
    assert len(suite.prompts) == len(set(suite.ids)) == 120
    assert suite.kinds == list(KINDS) * 20
    assert suite.dropped == {}
    first = next(row["prompt"] for row in shipped() if row["kind"] == "chat")
    assert suite.prompts[0] == RENDER([{"role": "user", "content": first}])
    few = load("default", count=8)
    assert few.prompts == suite.prompts[:8]
    assert few.kinds == [*KINDS, *KINDS[:2]]
    assert load("default", count=8) == few


def test_too_long_is_dropped_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    every = load("default")
    limit = sorted(len(ids) for ids in every.prompts)[-4]
    capsys.readouterr()
    suite = load("default", limit=limit)
    assert max(len(ids) for ids in suite.prompts) == limit, "the limit itself is allowed"
    assert len(suite.prompts) == 117
    assert suite.dropped == {"prompt too long": 3}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert all(line.startswith("bench: data/suites/") and f"more than {limit}" in line and ", row " in line for line in told)


def test_mixed() -> None:
    suite = load("mixed")
    blocks = [(kind, len(list(run))) for kind, run in itertools.groupby(suite.kinds)]
    pairs = [("summary", "chat"), ("rag", "maths"), ("translation", "qa")]
    assert blocks == [(kind, 4) for first, second in pairs for kind in (first, second, first)]
    assert suite.switches == list(range(4, 36, 4))
    assert len(set(suite.ids)) == 36, "coming back is to the task, not to the same prompts"
    assert load("mixed") == suite
    assert load("mixed", block=10).switches == list(range(10, 90, 10))


@pytest.mark.parametrize(("count", "switches"), [(36, list(range(4, 36, 4))), (12, [4, 8]), (8, [2, 4, 6]), (3, [1, 2]), (2, [1])])
def test_mixed_goes_there_and_back_within_the_count(count: int, switches: list[int]) -> None:
    suite = load("mixed", count=count)
    assert (len(suite.prompts), suite.switches) == (count, switches)
    if count >= 3:
        block = switches[0]
        assert suite.kinds[: 3 * block] == ["summary"] * block + ["chat"] * block + ["summary"] * block


def test_heldout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "some", tiny_target(tmp_path / "target"), train=1, heldout=6, tokens=3)
    every = load("heldout", dataset=tmp_path / "some")
    assert len(every.prompts) == 6
    few, wanted = load("heldout", dataset=tmp_path / "some", count=4), load_workload(tmp_path / "some", 4)
    assert (few.prompts, few.ids, few.kinds) == (wanted.prompts, wanted.ids, wanted.kinds)
    with pytest.raises(ConfigError, match="data set"):
        load("heldout", count=4)
    longest = every.longest
    capsys.readouterr()
    with pytest.raises(DataError, match="no usable row; 6 left out"):
        load("heldout", dataset=tmp_path / "some", limit=min(len(ids) for ids in every.prompts) - 1)
    fits = [ids for ids in every.prompts if len(ids) < longest]
    suite = load("heldout", dataset=tmp_path / "some", limit=longest - 1)
    assert suite.prompts == fits != []
    assert suite.dropped == {"prompt too long": 6 - len(fits)}
    assert "heldout, row " in capsys.readouterr().err


FORMS: dict[str, dict[str, object]] = {
    "prompt": {"prompt": "Say hello."},
    "question": {"question": "Say hello."},
    "turns": {"question_id": 1, "category": "writing", "turns": ["Say hello.", "Now in rhyme."], "reference": []},
    "messages": {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello."}]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Say hello."}, {"from": "gpt", "value": "Hello."}]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packing", ["jsonl", "json", "jsonl.gz", "json.gz", "lines named json"])
def test_forms_and_packings(tmp_path: Path, form: str, packing: str) -> None:
    rows = [FORMS[form], {**FORMS[form], "system": "Be brief."}]
    text = "\n".join(json.dumps(row) for row in rows) if "lines" in packing or "jsonl" in packing else json.dumps(rows, indent=1)
    path = tmp_path / f"suite.{packing.removeprefix('lines named ')}"
    path.write_bytes(gzip.compress(text.encode()) if packing.endswith("gz") else text.encode())
    suite = load(path.name, tmp_path)
    assert len(suite.prompts) == 2
    assert text_of(suite.prompts[0]) == "Say hello."
    assert "Be brief." in text_of(suite.prompts[1])
    assert suite.kinds == ["writing" if form == "turns" else "suite"] * 2, "without a kind of its own it has the file's name"
    assert suite.dropped == {}
    assert load(str(path)).prompts == suite.prompts, "an absolute path is taken as it is"


def test_bad_rows_are_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [{"prompt": f"Question number {n}?"} for n in range(3)]
    bad = ["{not json", [1, 2], {"answer": "no prompt"}, {"prompt": "  "}, {"turns": []}, {"prompt": 7}, ""]
    path = write(tmp_path / "mine.jsonl", [good[0], *bad, *good[1:]])
    suite = load(path.name, tmp_path)
    assert [text_of(ids) for ids in suite.prompts] == [row["prompt"] for row in good]
    assert sum(suite.dropped.values()) == len(bad)
    assert {"invalid JSON", "not an object", "no prompt", "empty prompt", "non-string content"} <= suite.dropped.keys()
    told = capsys.readouterr().err
    assert "bench: mine.jsonl, row 2, left out: invalid JSON" in told
    assert "bench: mine.jsonl, row 6, left out: empty conversation" in told
    assert "row 7" not in told, "the sixth bad row is in the sum"
    assert "suite 'mine.jsonl': 7 rows left out in all" in told


def test_a_row_that_the_template_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def no_system(messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "system":
            raise DataError("the target's chat template refuses these messages: no system role")
        return RENDER(messages)

    write(tmp_path / "mine.jsonl", [{"prompt": "One?"}, {"prompt": "Two?", "system": "Be kind."}])
    suite = load_suite("mine.jsonl", root=tmp_path, render=no_system, max_prompt_tokens=99)
    assert len(suite.prompts) == 1
    assert suite.dropped == {"template": 1}
    assert "mine.jsonl, row 2, left out: template: " in capsys.readouterr().err


def test_a_count_is_spread_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "sorted.jsonl", [{"prompt": f"Question {n}", "category": f"topic {n // 10}"} for n in range(80)])
    assert load("sorted.jsonl", tmp_path, count=8).kinds == [f"topic {n}" for n in range(8)]
    assert "asked for" not in capsys.readouterr().err
    assert len(load("sorted.jsonl", tmp_path, count=99).prompts) == 80
    assert "suite 'sorted.jsonl' has 80 prompts for the 99 asked for" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [[], ["{"], [{"prompt": "far too long a question"}]])
def test_nothing_usable(tmp_path: Path, rows: list[object]) -> None:
    write(tmp_path / "none.jsonl", rows)
    with pytest.raises(DataError, match=r"suite 'none.jsonl': no usable row; 1 left out, the first is none.jsonl, row \d"):
        load("none.jsonl", tmp_path, limit=20)


@pytest.mark.parametrize(
    ("name", "near"), [("defualt", "default"), ("Mixed", "mixed"), ("mtbench.jsonl", "mt_bench.jsonl"), ("zzz", None)]
)
def test_unknown_name(tmp_path: Path, name: str, near: str | None) -> None:
    write(tmp_path / "mt_bench.jsonl", [])
    with pytest.raises(ConfigError) as caught:
        load(name, tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert f"suite '{name}'" in text
    assert "default, heldout, mixed" in text
    assert (f"(closest: '{near}')" in text) if near else ("closest" not in text)


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "Hello?"}\n' * 99)[:-12])
    (tmp_path / "no.jsonl.gz").write_bytes(b"not packed at all")
    for name in ("folder.jsonl", "torn.jsonl.gz", "no.jsonl.gz"):
        with pytest.raises(ConfigError, match=f"suite '{name}'"):
            load(name, tmp_path)
    with pytest.raises(DataError, match="restore that folder"):
        load("default", tmp_path)
    for wrong in ({"count": 0}, {"block": 0}, {"limit": 0}):
        with pytest.raises(ValueError, match="positive"):
            load("default", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "rows", "first"),
    [
        ("mt_bench/question.jsonl", 80, "Compose an engaging travel blog post"),
        ("humaneval/HumanEval.jsonl.gz", 164, "from typing import List"),
        ("eagle_eval/humaneval_question.jsonl", 80, "Complete the code I provided."),
        ("eagle_eval/gsm8k_question.jsonl", 80, "Darrell and Allen's ages"),
        ("eagle_eval/qa_question.jsonl", 80, "Who played anna in once upon a time?"),
        ("gsm8k_train_questions/train_questions.jsonl", 7473, "Natalia sold clips"),
        ("mbpp/sanitized-mbpp.json", 427, "Write a function to find the shared elements"),
        ("self_instruct/seed_tasks.jsonl", 175, "Is there anything I can eat"),
        ("self_instruct/user_oriented_instructions.jsonl", 252, "The sentence you are given"),
    ],
)
def test_real_files(name: str, rows: int, first: str) -> None:
    if not (SHARED / name).is_file():
        pytest.skip(f"no {SHARED / name} on this machine")
    suite = load(name, SHARED)
    assert len(suite.prompts) == rows
    assert suite.dropped == {}
    assert text_of(suite.prompts[0]).startswith(first)
    if name.startswith("mt_bench"):
        assert len(set(load(name, SHARED, count=8).kinds)) == 8, "one of each of its categories"
