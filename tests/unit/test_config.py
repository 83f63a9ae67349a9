"""The configuration: profiles, overrides, and one clear line for each kind of mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.config import Config, ControlConfig
from eagle.decode.control import ControlSettings
from eagle.errors import ConfigError
from eagle.profiles import load_config, project_root

ROOT = Path(__file__).parents[2]


def test_params_yaml_holds_every_key_at_its_default() -> None:
    written = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    assert load_config(ROOT) == Config()
    assert written == Config().model_dump(mode="json", by_alias=True), "regenerate with: eagle config"


@pytest.mark.parametrize("profile", sorted(p.stem for p in (ROOT / "profiles").glob("*.yaml")))
def test_every_shipped_profile_is_valid_and_differs_from_the_default(profile: str) -> None:
    assert load_config(ROOT, profile) != Config()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("distil.learning_rate=1", ["unknown key 'distil'", "closest: 'distill'"]),
        ("distill.lerning_rate=1", ["unknown key 'distill.lerning_rate'", "closest: 'distill.learning_rate'"]),
        ("distill.learning_rate=fast", ["distill.learning_rate", "valid number", "'fast'"]),
        ("draft.layers=99", ["draft.layers", "less than or equal to 16", "99"]),
        ("draft.layers=2.5", ["draft.layers", "2.5"]),
        ("draft.heads=6", ["draft", "heads (6) must be a multiple of kv_heads (4)"]),
        ("dataset.temperatures=[{temperatur: 1, weight: 1}]", ["temperature"]),
        ("dataset.heldout_fraction=.nan", ["dataset.heldout_fraction"]),
        ("register.gate.min_acceptance=2", ["closest: 'register.gate.min_acceptance_length'"]),
        ("distill", ["must be section.key=value"]),
        ("runtime.seed=-1", ["runtime.seed"]),
        ("distill.objective=lk", ["distill.objective", "'lk'"]),
        ("distill.dpace_smoothing=1.5", ["distill.dpace_smoothing", "less than or equal to 1"]),
        ("policy.updates=2", ["updates (2) above 1 need method group or naive"]),
        ("policy.token_cost=-1", ["policy.token_cost", "greater than or equal to 0"]),
        ("rivals.medusa_heads=0", ["rivals.medusa_heads", "greater than or equal to 1"]),
        ("rivals.medusa_nodes=65", ["rivals.medusa_nodes", "less than or equal to 64"]),
        ("rivals.eagle2_minutes=0", ["rivals.eagle2_minutes", "greater than 0"]),
        ("rivals.eagle2_feature_weight=-1", ["rivals.eagle2_feature_weight", "greater than or equal to 0"]),
        ("rivals.medusa_learning_rate=2", ["rivals.medusa_learning_rate", "less than or equal to 1"]),
        ("watch.window=60", ["closest: 'watch.window_s'"]),
        ("watch.degraded_tolerance=0.01", ["watch", "must be above drifting_tolerance"]),
        ("watch.false_alarms_per_month=0", ["watch.false_alarms_per_month", "greater than 0"]),
        ("traffic.retention_days=0", ["traffic.retention_days", "greater than 0"]),
        ("rivals.medusa_step=2", ["closest: 'rivals.medusa_steps'"]),
        ("draft.layers=true", ["draft.layers", "must be a number, not true or false"]),
        ("bench.batch_sizes=[1,true]", ["bench.batch_sizes", "must be a number"]),
        ("distill.stages=[{dpeth: 1, steps: 5}]", ["unknown key 'distill.stages.0.dpeth'", "closest: 'distill.stages.0.depth'"]),
    ],
)
def test_a_bad_override_gives_one_line_with_place_and_closest_key(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT, overrides=[override])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("--set")
    assert all(word in message for word in words), message


def test_a_group_of_one_needs_another_baseline() -> None:
    with pytest.raises(ConfigError, match="group_size 1 leaves no other draft"):
        load_config(ROOT, overrides=["policy.method=naive", "policy.group_size=1"])
    config = load_config(ROOT, overrides=["policy.method=group", "policy.group_size=1", "policy.baseline=adjacent"])
    assert config.policy.group_size == 1


def test_a_bad_profile_file_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "mine.yaml"
    bad.write_text("draft:\n  layerz: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.yaml: unknown key 'draft\.layerz' \(closest: 'draft\.layers'\)"):
        load_config(ROOT, str(bad))
    bad.write_text("draft: [\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.yaml:\d+: not valid YAML"):
        load_config(ROOT, str(bad))
    bad.write_text("draft:\n  layers: 2\n  layers: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: not valid YAML: 'layers' stands twice"):
        load_config(ROOT, str(bad))
    bad.write_bytes(b"draft: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(ROOT, str(bad))
    bad.write_text("- 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="top level must be a mapping"):
        load_config(ROOT, str(bad))


def test_an_unknown_profile_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="no profile 'tinny' \\(closest: 'tiny'\\)"):
        load_config(ROOT, "tinny")


def test_no_project_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no params\.yaml"):
        project_root(tmp_path)


def test_overrides_win_over_the_profile_and_scientific_notation_is_a_number() -> None:
    config = load_config(ROOT, "tiny", ["distill.learning_rate=1e-4", "draft.layers=3"])
    assert config.distill.learning_rate == 1e-4
    assert config.draft.layers == 3
    assert config.draft.heads == load_config(ROOT, "tiny").draft.heads


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_as_override_is_a_config_or_a_config_error(key: str, value: str) -> None:
    try:
        load_config(ROOT, overrides=[f"{key}={value}"])
    except ConfigError as error:
        assert str(error).isprintable()  # noqa: PT017


def test_the_controllers_defaults_are_those_of_the_library() -> None:
    assert ControlSettings(**ControlConfig().model_dump()) == ControlSettings()
