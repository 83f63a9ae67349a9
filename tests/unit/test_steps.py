"""The step runner: completeness by rename, up-to-date with reasons, resume, locks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from eagle import manifest, steps
from eagle.config import Config
from eagle.errors import BusyError, ConfigError, StepFailed
from eagle.plan import make_plan
from eagle.profiles import load_config

ROOT = Path(__file__).parents[2]
calls: list[str] = []


def first(context: steps.StepContext) -> dict[str, Any]:
    """A step that counts its calls, resumes from its work folder and can be told to fail."""
    calls.append("first")
    mark = context.work / "mark"
    resumed = mark.exists()
    mark.write_text("x", encoding="utf-8")
    if context.config.runtime.seed == 13:
        raise StepFailed("step first: told to fail")
    (context.out / "data.txt").write_text(str(context.config.dataset.shipped_prompts), encoding="utf-8")
    return {"resumed": resumed}


def second(context: steps.StepContext) -> dict[str, Any]:
    """A step that reads the first one's output."""
    calls.append("second")
    (context.out / "copy.txt").write_bytes((context.inputs["first"] / "data.txt").read_bytes())
    return {"ok": 1}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        steps.Step("first", f"{__name__}:first", ("dataset",), (), ("eagle/config",)),
        steps.Step("second", f"{__name__}:second", ("policy",), ("first",), ("eagle/config",)),
    )
    monkeypatch.setattr(steps, "STEPS", {row.name: row for row in rows})
    monkeypatch.setattr(steps, "target_fingerprint", lambda *_: "toy")
    monkeypatch.setattr("eagle.plan.STEPS", {row.name: row for row in rows})
    calls.clear()


def changed(**sections: dict[str, Any]) -> Config:
    return load_config(ROOT, overrides=[f"{s}.{k}={v}" for s, values in sections.items() for k, v in values.items()])


@pytest.mark.usefixtures("table")
def test_a_finished_step_is_up_to_date_until_something_it_is_made_of_changes(tmp_path: Path) -> None:
    config = Config()
    assert steps.run_step("first", config, ROOT, tmp_path)
    assert steps.run_step("second", config, ROOT, tmp_path)
    assert not steps.run_step("first", config, ROOT, tmp_path)
    assert not steps.run_step("second", config, ROOT, tmp_path)
    assert calls == ["first", "second"]
    other = changed(dataset={"shipped_prompts": 7})
    assert steps.status(steps.STEPS["first"], other, ROOT, tmp_path).reason == (
        f"config dataset.shipped_prompts: {Config().dataset.shipped_prompts} -> 7"
    )
    assert steps.run_step("first", other, ROOT, tmp_path)
    assert steps.status(steps.STEPS["second"], other, ROOT, tmp_path).reason == "input first changed"
    (tmp_path / "first" / "data.txt").unlink()
    assert steps.status(steps.STEPS["first"], other, ROOT, tmp_path).reason == "file changed or gone: data.txt"


@pytest.mark.usefixtures("table")
def test_a_section_that_the_step_does_not_read_changes_nothing(tmp_path: Path) -> None:
    steps.run_step("first", Config(), ROOT, tmp_path)
    assert not steps.run_step("first", changed(policy={"steps": 3}), ROOT, tmp_path)


@pytest.mark.usefixtures("table")
def test_a_failed_step_leaves_no_folder_and_resumes_its_work(tmp_path: Path) -> None:
    failing = changed(runtime={"seed": 13})
    for _ in range(2):
        with pytest.raises(StepFailed):
            steps.run_step("first", failing, ROOT, tmp_path)
        assert not (tmp_path / "first").exists()
    assert (tmp_path / "first.work" / "mark").exists()
    steps.run_step("first", Config(), ROOT, tmp_path)
    metrics = json.loads((tmp_path / "first" / "metrics.json").read_text(encoding="utf-8"))
    assert metrics == {"resumed": False}, "work of another configuration must not be taken over"
    assert not (tmp_path / "first.work").exists()


@pytest.mark.usefixtures("table")
def test_a_failed_rerun_keeps_the_former_output(tmp_path: Path) -> None:
    steps.run_step("first", Config(), ROOT, tmp_path)
    with pytest.raises(StepFailed):
        steps.run_step("first", changed(runtime={"seed": 13}), ROOT, tmp_path)
    assert (tmp_path / "first" / "data.txt").exists()


@pytest.mark.usefixtures("table")
def test_missing_input_busy_folder_and_unknown_name_are_told(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="input 'first' is missing"):
        steps.run_step("second", Config(), ROOT, tmp_path)
    with FileLock(tmp_path / "first.lock"), pytest.raises(BusyError, match="another process"):
        steps.run_step("first", Config(), ROOT, tmp_path)
    with pytest.raises(ConfigError, match="closest: 'second'"):
        steps.run_step("secnd", Config(), ROOT, tmp_path)


def test_a_step_by_hand_is_found_but_is_no_part_of_the_flow(tmp_path: Path) -> None:
    assert steps.get_step("rivals") is steps.OPTIONAL_STEPS["rivals"]
    assert not set(steps.OPTIONAL_STEPS) & set(steps.STEPS)
    assert [row.step for row in make_plan(Config(), ROOT, tmp_path).rows] == list(steps.STEPS)
    with pytest.raises(ConfigError) as caught:
        steps.get_step("rival")
    assert all(words in str(caught.value) for words in ("closest: 'rivals'", ", ".join(steps.STEPS), "by hand only: rivals"))
    with pytest.raises(StepFailed, match="input 'dataset' is missing"):
        steps.run_step("rivals", Config(), ROOT, tmp_path)


@pytest.mark.usefixtures("table")
def test_same_work_gives_the_same_manifest_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        steps.run_step("first", Config(), ROOT, tmp_path / name)
    one, two = ((tmp_path / n / "first" / "manifest.json").read_bytes() for n in ("a", "b"))
    assert one == two


@pytest.mark.usefixtures("table")
def test_plan_marks_what_follows_a_change(tmp_path: Path) -> None:
    steps.run_step("first", Config(), ROOT, tmp_path)
    steps.run_step("second", Config(), ROOT, tmp_path)
    assert [row.up_to_date for row in make_plan(Config(), ROOT, tmp_path).rows] == [True, True]
    plan = make_plan(changed(dataset={"shipped_prompts": 7}), ROOT, tmp_path)
    assert [row.up_to_date for row in plan.rows] == [False, False]
    assert plan.rows[1].reason == "input first runs first"


def test_crash_between_the_two_renames_is_mended(tmp_path: Path, table: None) -> None:
    steps.run_step("first", Config(), ROOT, tmp_path)
    (tmp_path / "first").rename(tmp_path / "first.old")
    assert not steps.run_step("first", Config(), ROOT, tmp_path)


def test_an_altered_file_is_found_by_hash(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("abc", encoding="utf-8")
    made = manifest.write_manifest(tmp_path, "s", {})
    assert manifest.altered_file(tmp_path, made) is None
    (tmp_path / "x").write_text("abd", encoding="utf-8")
    assert manifest.missing_file(tmp_path, made) is None
    assert manifest.altered_file(tmp_path, made) == "x"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("damage", ["content_hash", "parts", "files"])
def test_a_damaged_manifest_means_not_made(tmp_path: Path, damage: str) -> None:
    config = Config()
    assert steps.run_step("first", config, ROOT, tmp_path)
    path = tmp_path / "first" / "manifest.json"
    content = json.loads(path.read_text())
    del content[damage]
    path.write_text(json.dumps(content))
    assert steps.status(steps.STEPS["first"], config, ROOT, tmp_path).reason == "not made yet"
    assert steps.status(steps.STEPS["second"], config, ROOT, tmp_path).reason == "not made yet"
    assert steps.run_step("first", config, ROOT, tmp_path)


@pytest.mark.usefixtures("table")
def test_only_work_for_the_same_key_is_promised_to_go_on(tmp_path: Path) -> None:
    config, step = Config(), steps.STEPS["first"]
    parts = steps.key_parts(step, config, ROOT, tmp_path)
    (tmp_path / "first.work").mkdir()
    assert steps.status(step, config, ROOT, tmp_path).reason == "not made yet"
    (tmp_path / "first.work" / steps.WORK_KEY).write_text(json.dumps(manifest.hash_json(parts)))
    assert steps.status(step, config, ROOT, tmp_path).reason == "interrupted, nothing to resume from yet"
    (tmp_path / "first.work" / "state.json").write_text("{}")
    assert steps.status(step, config, ROOT, tmp_path).reason == "interrupted, will resume"
    assert steps.status(step, changed(dataset={"shipped_prompts": 7}), ROOT, tmp_path).reason == "not made yet"
    hold = "import sys, pathlib, time; from eagle.locks import owned_lock\n"
    hold += "with owned_lock(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "first.lock")], cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        reason = steps.status(step, config, ROOT, tmp_path).reason
        other.kill()
    assert f"process {other.pid}" in reason
    assert "at work" in reason
