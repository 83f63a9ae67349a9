"""The suite `robustness`: templates, contexts, the statistics, and the whole of it on a tiny run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.robustness import worst_loss
from eagle import manifest
from eagle.bench.bootstrap import Counts, relative_loss
from eagle.bench.conditions import CONTEXTS, PLACE, Condition, Room, make_conditions
from eagle.bench.contexts import LEAST, read_turns, with_context
from eagle.bench.perturb import perturbations
from eagle.bench.robustness import evaluate, measure_robustness
from eagle.bench.suites import load_suite
from eagle.cli import app
from eagle.config import Config
from eagle.dataset.prompts import Prompt
from eagle.dataset.read import Row, write_shards
from eagle.dataset.shipped import read_templates
from eagle.draft.io import save_draft
from eagle.errors import ConfigError, DataError, StepFailed
from eagle.target.template import render_prompt
from tests.decode.test_bench import _process_settings  # noqa: F401 -- the fixture
from tests.decode.test_compare import make_run
from tests.decode.test_suites import likeness
from tests.toys import TEMPLATE, tiny_tokenizer
from tests.training.builders import make_draft

ROOT = Path(__file__).parents[2]
HELLO = [{"role": "user", "content": "user says hello\nto the system"}]
WITH_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are an assistant.<|im_end|>\n{% endif %}" + TEMPLATE
)
SYSTEMS = [Prompt("file:x", "terse", "Be brief.", None, "x", 1)]


def dressed(name: str, template: str = TEMPLATE, messages: list[dict[str, str]] = HELLO) -> str | None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return perturbations(tokenizer, SYSTEMS)[name](messages)


def test_only_the_templates_own_part_is_changed() -> None:
    text = HELLO[0]["content"]
    opening, end = "<|im_start|>human\n", "<|im_end|>\n<|im_start|>partner\n"
    assert dressed("roles") == opening + text + end
    assert dressed("newlines-double") == f"<|im_start|>user\n\n{text}<|im_end|>\n\n<|im_start|>assistant\n\n"
    assert dressed("newlines-none") == f"<|im_start|>user {text}<|im_end|> <|im_start|>assistant "
    usual = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert dressed("system-terse") == f"<|im_start|>system\nBe brief.<|im_end|>\n{usual}"
    assert dressed("alpaca") == f"### Instruction:\n{text}\n\n### Response:\n"
    assert dressed("dialogue") == f"User: {text}\n\nAssistant:"
    assert dressed("bare") == f"{text}\n"
    renamed = dressed("roles", WITH_DEFAULT)
    assert renamed is not None
    assert renamed.startswith("<|im_start|>context\nYou are an assistant."), "a word of the text is no role"


def test_the_default_system_prompt_is_left_out_where_there_is_one() -> None:
    rest = f"<|im_start|>user\n{HELLO[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert dressed("system-none", WITH_DEFAULT) == rest
    assert dressed("system-none") is None, "this template puts none"
    llama = (
        "{{ '<|endoftext|>' }}"
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system<|im_start|>\n\nDate: today<|im_end|>{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_start|>\n\n{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}"
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = llama, "<|endoftext|>"
    without = perturbations(tokenizer, SYSTEMS)["system-none"](HELLO)
    assert without == (
        f"<|endoftext|><|im_start|>user<|im_start|>\n\n{HELLO[0]['content']}<|im_end|><|im_start|>assistant<|im_start|>\n\n"
    )


def test_a_template_without_roles_or_newlines_is_said_to_have_none() -> None:
    plain = "{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}"
    for name in ("roles", "newlines-double", "newlines-none", "system-none"):
        assert dressed(name, plain) is None


def write_turns(folder: Path, count: int = 40, size: int = 60) -> Path:
    """A data set of rendered questions with finished answers of about `size` characters, and some that cannot be used."""
    tokenizer = tiny_tokenizer()
    folder.mkdir(parents=True)
    rows = []
    for number in range(count):
        prompt = render_prompt(tokenizer, [{"role": "user", "content": f"Question number {number:03d}?"}])
        said = [*tokenizer(f"Answer {number:03d} ".ljust(size, "x"))["input_ids"], 2]
        finish = "stop" if number % 4 else "length"
        ids = [*prompt, *(said if finish == "stop" else said[:-1])]
        mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
        rows.append(Row(f"{number:064d}", "self", "self", 0.0, ids, mask, len(prompt), finish))
    own = render_prompt(tokenizer, [{"role": "system", "content": "Be kind."}, *HELLO])
    rows.append(Row("f" * 64, "self", "self", 0.0, [*own, 70, 2], [0] * len(own) + [1, 1], len(own), "stop"))
    write_shards(folder, "train", rows, 100)
    return folder


def test_contexts_are_real_turns_within_the_length(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    turns = read_turns(write_turns(tmp_path / "d"), tokenizer)
    assert len(turns) == 30, "cut answers and other system prompts are left out"
    assert (turns[0].user, turns[0].answer) == ("Question number 001?", "Answer 001 ".ljust(60, "x"))
    for length in (512, 1024, 2048):
        ids = with_context(tokenizer, HELLO, turns, length, start=3)
        assert ids is not None
        assert LEAST * length <= len(ids) <= length
        text = str(tokenizer.decode(ids))
        asked = render_prompt(tokenizer, HELLO)
        assert ids[-len(asked) :] == asked
        assert text.startswith("<|im_start|>user\nQuestion number 005?<|im_end|>\n<|im_start|>assistant\nAnswer 005")
        assert text.count("<|im_start|>assistant\n") == text.count("Answer") + 1
    assert with_context(tokenizer, HELLO, turns[:2], 2048, 0) is None, "two turns do not fill it"
    assert with_context(tokenizer, HELLO, turns, 20, 0) is None, "the prompt alone is longer"
    (tmp_path / "e").mkdir()
    write_shards(tmp_path / "e", "train", [], 10)
    with pytest.raises(DataError, match="no training row with a finished answer"):
        read_turns(tmp_path / "e", tokenizer)


def test_shipped_prompts_are_parallel_and_not_those_of_training() -> None:
    files = {name: (ROOT / PLACE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ("languages", "code")}
    rows = {name: [json.loads(line) for line in lines] for name, lines in files.items()}
    kinds = [row["kind"] for row in rows["languages"]]
    assert set(kinds) == {"en", "de", "fr", "es", "it", "pt", "nl", "pl", "ru", "zh", "ja"}
    assert all(kinds.count(kind) == 8 for kind in kinds)
    prompts = [row["prompt"] for row in rows["code"]] + [row["prompt"] for row in rows["languages"] if row["kind"] == "en"]
    expanded = [t.expand(at).text for t in read_templates(ROOT / "data" / "prompts") for at in range(t.size)]
    for prompt, (score, other) in zip(prompts, likeness(prompts, expanded), strict=True):
        assert score < 0.3, f"{prompt!r} is like {other!r}"


def counts(per_prompt: list[list[int]], k: int = 2) -> Counts:
    return Counts.of(per_prompt, k)


def test_counts_are_vllms() -> None:
    found = counts([[0, 1, 2], [2], []])
    assert found.acceptance_length == 1 + 5 / 4
    assert found.by_position == [3 / 4, 2 / 4]
    assert counts([[], []]).acceptance_length == 1.0


def test_pairs_are_surer_than_strangers() -> None:
    """Prompts differ much more from each other than the two sides do: only pairs can tell."""
    random = np.random.default_rng(0)
    easy = [1 if at % 2 else 9 for at in range(40)]
    base = counts([[2] * n + [0] * (10 - n) for n in easy])
    other = counts([[2] * (n - 1) + [1] + [0] * (10 - n) for n in easy])
    pairs = relative_loss(base, other, paired=True, seed=1)
    alone = relative_loss(base, other, paired=False, seed=1)
    true = 1 - other.acceptance_length / base.acceptance_length
    assert pairs.value == alone.value == pytest.approx(true)
    assert 0 < pairs.low < true < pairs.high
    assert alone.low < 0 < alone.high
    assert relative_loss(base, base, paired=True, seed=1).as_json() == {"value": 0.0, "low": 0.0, "high": 0.0}
    # The interval covers the truth about as often as it says.
    inside = 0
    for seed in range(200):
        draws = random.binomial(10, 0.3, size=(40, 2))
        one, two = (counts([[1] * int(n) + [0] * (10 - int(n)) for n in draws[:, side]], 1) for side in (0, 1))
        found = relative_loss(one, two, paired=False, seed=seed, samples=400)
        inside += found.low <= 0.0 <= found.high
    assert 180 <= inside <= 199
    with pytest.raises(ValueError, match="in pairs"):
        relative_loss(base, base.take([0]), paired=True, seed=0)


def test_losses_compare_the_same_prompts() -> None:
    ids = [[1, 2], [1, 2, 3]]
    conditions = [
        Condition("template", "plain", None, ids, ["a", "b"]),
        Condition("template", "bare", "plain", ids[1:], ["b"]),
        Condition("template", "roles", "plain", skipped="nothing to change"),
    ]
    found = evaluate(
        conditions,
        {"plain": {"run": counts([[0], [2]]), "compared": counts([[0], [0]])},
         "bare": {"run": counts([[1]]), "compared": counts([[0]])}},
        0,
    )  # fmt: skip
    plain, bare, roles = found["conditions"]
    assert plain["measured"]["run"]["loss"] is None
    assert bare["measured"]["run"]["loss"]["value"] == round(1 - 2 / 3, 4), "against prompt b alone"
    assert bare["compared"]["value"] == 0.5
    assert roles["measured"] == {}
    lonely = Condition("language", "language-de", "language-en", ids[:1], ["0"])
    alone = evaluate([lonely], {"language-de": {"run": counts([[1]])}}, 0)
    assert alone["conditions"][0]["measured"]["run"]["loss"] is None, "its baseline had no prompts"
    assert alone["worst"] == {}
    assert found["worst"] == {"template": {"name": "bare", "loss": bare["measured"]["run"]["loss"]}}
    assert worst_loss(found, ["bare", "roles"]).value == pytest.approx(33.33)
    assert worst_loss(found, ["roles"]).value is None


@pytest.fixture
def project(tmp_path: Path) -> tuple[Config, Path]:
    config, base = make_run(tmp_path, rivals=False)
    (tmp_path / "data").symlink_to(ROOT / "data")
    write_turns(tmp_path / "turns", count=90, size=90)
    for path in (base / "dataset").glob("train-*"):
        path.unlink()
    for path in (tmp_path / "turns").glob("train-*"):
        path.rename(base / "dataset" / path.name)
    values = config.model_dump(by_alias=True)
    values["dataset"]["max_prompt_tokens"] = 1500  # one token a byte
    return Config.model_validate(values), base


def test_conditions_of_a_project(project: tuple[Config, Path]) -> None:
    _, base = project
    tokenizer = tiny_tokenizer()
    made = make_conditions(tokenizer, ROOT, base / "dataset", Room(1500, 10, 2048), 3)
    by_name = {condition.name: condition for condition in made}
    plain = by_name["plain"]
    suite = load_suite("default", root=ROOT, render=partial(render_prompt, tokenizer), max_prompt_tokens=1500, count=3)
    assert (plain.prompts, plain.keys) == (suite.prompts, suite.ids)
    for condition in made:
        assert condition.skipped or 0 < len(condition.prompts) == len(condition.keys) <= 3
        if condition.against and condition.paired:
            assert set(condition.keys) <= set(by_name[condition.against].keys)
    assert by_name["system-none"].skipped
    assert by_name["context-4096"].skipped == "target and draft take 2048 positions"
    tight = {c.name: c for c in make_conditions(tokenizer, ROOT, base / "dataset", Room(1500, 10, 200), 40)}
    assert "fits 200 positions" in str(tight["system-policy"].skipped)
    assert 0 < len(tight["language-ru"].prompts) < 8
    assert all(len(ids) <= 190 for c in tight.values() if c.name != "plain" for ids in c.prompts)
    for length in CONTEXTS[1:3]:
        assert all(LEAST * (length - 10) <= len(ids) <= length - 10 for ids in by_name[f"context-{length}"].prompts)


def test_the_command_on_two_runs(project: tuple[Config, Path], tmp_path: Path) -> None:
    config, base = project
    other = tmp_path / "runs" / "other"
    save_draft(other / "policy" / "draft", make_draft(tmp_path / "target", seed=5, fc_norm=False, norm_output=False))
    manifest.write_manifest(other / "policy", "policy", {})
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", by_alias=True)))
    asked = ["bench", "--suite", "robustness", "--dir", str(base), "--prompts", "1", "--compare", str(other)]
    done = CliRunner().invoke(app, ["--root", str(tmp_path), *asked], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    out = base / "bench-robustness"
    assert {path.name for path in out.iterdir()} == {"robustness.json", "robustness.md", "suite.json"}
    result = json.loads((out / "robustness.json").read_text())
    assert result["drafts"]["compared"]["fc_norm"] is False
    assert result["drafts"]["run"]["fc_norm"] is True
    for row in result["conditions"]:
        assert bool(row["skipped"]) != bool(row["measured"])
        for found in row["measured"].values():
            assert found["acceptance_length"] == pytest.approx(1 + sum(found["acceptance_by_position"]), abs=1e-3)
            assert (found["loss"] is None) == (row["against"] is None)
    text = (out / "robustness.md").read_text()
    assert "fc_norm false, norm_output false" in text
    assert "- system-none: the target's template has nothing" in text
    with pytest.raises(ConfigError, match="same run"):
        measure_robustness(config, tmp_path, base, compare=base)
    with pytest.raises(StepFailed, match="no finished draft"):
        measure_robustness(config, tmp_path, base, compare=tmp_path)
    with pytest.raises(ConfigError, match="--compare: only the suite 'robustness'"):
        CliRunner().invoke(app, ["--root", str(tmp_path), "bench", "--compare", str(other)], catch_exceptions=False)
