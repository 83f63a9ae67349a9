"""The register step and alias moves on a real SQLite store (migrated once, then copied)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle import manifest
from eagle.config import Config
from eagle.errors import BusyError, ConfigError, GateRejected, PreflightError, StepFailed
from eagle.profiles import load_config
from eagle.registry import client, promote, remeasure
from eagle.registry import step as register
from eagle.registry.client import Store, by_alias, download_artifacts, fetch_version, open_store
from eagle.registry.gate import Candidate
from eagle.steps import STEPS, StepContext, key_parts, run_step
from tests.flows.fakes import make_project, write_output

MODEL = "eagle31-target-model"
INPUTS = STEPS["register"].inputs


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a migrated, empty store in a path with a space and a non-ASCII letter."""
    root = make_project(tmp_path_factory.mktemp("Ordnér mit 100% #1") / "project")
    open_store(load_config(root), root)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "mein Prøjekt"
    make_project(folder)
    (folder / ".state").mkdir()
    shutil.copy(template / ".state" / "mlflow.db", folder / ".state" / "mlflow.db")
    with_own_artifacts(folder)
    return folder


def with_own_artifacts(root: Path) -> None:
    """The copied store's experiment keeps its artifacts elsewhere: use one of this project's own."""
    (root / "params.yaml").write_text((root / "params.yaml").read_text() + "register: {experiment: here}\n")


def make_inputs(root: Path, **said: Any) -> Path:
    base = root / "runs" / "r"
    for name in (*INPUTS, "tune"):
        shutil.rmtree(base / name, ignore_errors=True)
        (base / name).mkdir(parents=True)
        manifest.write_json(base / name / "metrics.json", write_output(name, base / name, said))
    for name in STEPS:
        if (base / name).is_dir() and name != "register":
            manifest.write_manifest(base / name, name, key_parts(STEPS[name], load_config(root), root, base))
    return base


def registered(root: Path, **said: Any) -> dict[str, Any]:
    base = make_inputs(root, **said)
    run_step("register", load_config(root), root, base, force=True)
    return manifest.read_json(base / "register" / "registration.json")


def store_of(root: Path) -> Store:
    return open_store(load_config(root), root)


def aliased(store: Store, *aliases: str) -> list[str | None]:
    found = [by_alias(store, MODEL, alias) for alias in aliases]
    return [None if version is None else str(version.version) for version in found]


def runs(store: Store) -> dict[str, str]:
    return {run.info.run_id: run.info.status for run in store.client.search_runs([store.experiment_id])}


def test_first_model_becomes_champion_and_downloads_whole(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = registered(root)
    assert (made["verdict"], made["alias"], made["version"], made["model"]) == ("passed", "champion", "1", MODEL)
    assert "--speculative-config" in made["serve"]
    assert "/mlartifacts/" in made["serve"]
    store = store_of(root)
    source = manifest.list_files(root / "runs" / "r" / "bundle" / "bundle")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    by_models_uri = Path(download_artifacts(artifact_uri=made["uri"], dst_path=str(tmp_path / "down")))
    assert own_files(by_models_uri) == source
    champion = by_alias(store, MODEL, "champion")
    assert champion is not None
    assert own_files(fetch_version(store, champion, tmp_path / "down again")) == source


def own_files(folder: Path) -> list[dict[str, Any]]:
    """The registered files but MLmodel, which registering adds, and MLflow's own note of where it was fetched from."""
    files = manifest.list_files(folder)
    assert "MLmodel" in {f["path"] for f in files}
    return [f for f in files if f["path"] not in ("MLmodel", "registered_model_meta")]


def test_the_run_holds_params_metrics_curves_dataset_tags_and_evidence(root: Path) -> None:
    made = registered(root)
    store = store_of(root)
    run = store.client.get_run(made["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["distill.learning_rate"] == "0.002"
    assert run.data.metrics["bench.speedup_b1"] == 1.1
    assert run.data.metrics["distill.by_position.1"] == 0.3
    history = store.client.get_metric_history(made["run_id"], "distill.train.loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [(s, 4.0 / s) for s in range(1, 6)]
    digest = manifest.read_manifest(root / "runs" / "r" / "dataset")
    assert digest is not None
    assert run.data.tags["eagle.dataset"] == digest["content_hash"]
    assert run.inputs.dataset_inputs[0].dataset.digest == digest["content_hash"][:36]
    names = {f.path for f in store.client.list_artifacts(made["run_id"], "evidence/bench")}
    assert names == {"evidence/bench/bench.json", "evidence/bench/table.txt"}
    version = store.client.get_model_version(MODEL, "1")
    assert version.tags["eagle.verdict"] == "passed"
    assert version.run_id == made["run_id"]


def test_a_worse_challenger_stays_registered_with_its_reasons(root: Path) -> None:
    registered(root, acceptance=2.0)
    made = registered(root, acceptance=1.8)
    assert (made["verdict"], made["alias"], made["version"]) == ("rejected", "challenger", "2")
    store = store_of(root)
    champion, challenger = (by_alias(store, MODEL, alias) for alias in ("champion", "challenger"))
    assert champion is not None
    assert challenger is not None
    assert (str(champion.version), str(challenger.version)) == ("1", "2")
    decision = promote.decisions(store, MODEL)[1]
    assert (decision.verdict, decision.previous) == ("rejected", "1")
    assert [r["name"] for r in decision.reasons if not r["ok"]] == ["acceptance_over_champion"]
    assert [move.version for move in promote.moves(store, MODEL)] == ["1"]


def test_without_validation_in_vllm_never_champion(root: Path) -> None:
    made = registered(root, validated=False)
    assert (made["verdict"], made["alias"]) == ("rejected", "challenger")
    assert by_alias(store_of(root), MODEL, "champion") is None


def test_champion_is_measured_again_when_the_prompts_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(_store: Store, champion: Any, recorded: Candidate, _context: StepContext, on: str) -> Candidate | None:
        asked.append(str(champion.version))
        return None if len(asked) > 2 else replace(recorded, acceptance_length=1.9, measured_on=on)

    monkeypatch.setattr(remeasure, "remeasure", measured)
    registered(root, acceptance=1.6)
    assert registered(root, acceptance=1.7, prompts="b")["verdict"] == "rejected"
    assert registered(root, acceptance=1.95, prompts="c")["verdict"] == "passed"
    assert registered(root, acceptance=1.4, prompts="d")["verdict"] == "passed"  # the champion does not fit the target any more
    assert asked == ["1", "1", "3"]


def test_a_champion_that_moves_meanwhile_is_the_one_compared_with(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(root, acceptance=1.6)
    registered(root, acceptance=2.0, validated=False)
    real = promote.decide
    moved: list[str] = []

    def slow(store: Store, model: str, *rest: Any) -> Any:
        if not moved:
            moved.append(promote.promote(store, model, "2", why="trial", force=True).version)
            store.client.set_model_version_tag(model, "2", "eagle.candidate", manifest.canonical(strong.to_dict()))
        return real(store, model, *rest)

    strong = replace(promote.recorded_candidate(store_of(root).client.get_model_version(MODEL, "1")), acceptance_length=2.0)
    monkeypatch.setattr(promote, "decide", slow)
    made = registered(root, acceptance=1.7)
    assert moved == ["2"]
    assert made["verdict"] == "rejected"
    assert promote.decisions(store_of(root), MODEL)[-1].previous == "2"


@pytest.mark.parametrize("damage", ["alter", "drop", "add"])
def test_a_damaged_upload_registers_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    base = make_inputs(root)
    store = store_of(root)
    real = type(store.client).log_artifacts

    def damaged(self: Any, run_id: str, local_dir: str, artifact_path: str | None = None) -> None:
        real(self, run_id, local_dir, artifact_path)
        stored = next((root / ".state" / "mlartifacts" / run_id / "artifacts").rglob("model.safetensors"))
        if damage == "alter":
            stored.write_bytes(b"\xff" + stored.read_bytes()[1:])
        elif damage == "drop":
            stored.unlink()
        else:
            (stored.parent / "stray.bin").write_bytes(b"x")

    monkeypatch.setattr(type(store.client), "log_artifacts", damaged)
    with pytest.raises(StepFailed, match="stray.bin|model.safetensors"):
        run_step("register", load_config(root), root, base)
    assert by_alias(store, MODEL, "challenger") is None
    assert store.client.search_model_versions() == []
    assert set(runs(store).values()) == {"FAILED"}
    assert not (base / "register").exists()
    monkeypatch.undo()
    run_step("register", load_config(root), root, base)
    assert by_alias(store, MODEL, "champion") is not None


def test_a_bundle_changed_after_its_step_is_refused(root: Path) -> None:
    base = make_inputs(root)
    weights = base / "bundle" / "bundle" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(StepFailed, match=r"model\.safetensors"):
        run_step("register", load_config(root), root, base)


def test_runs_left_open_by_kill_9_are_closed_by_the_next_attempt(root: Path) -> None:
    base = make_inputs(root)
    store = store_of(root)
    at = client.place(base.resolve())
    left = store.client.create_run(store.experiment_id, tags={"eagle.key": "old", "eagle.place": at}).info.run_id
    other = store.client.create_run(store.experiment_id, tags={"eagle.key": "x", "eagle.place": "elsewhere:/runs"}).info.run_id
    pending = client.create_version(store, MODEL, (root / "x").as_uri(), left, {"eagle.verdict": "pending"})
    run_step("register", load_config(root), root, base)
    status = runs(store)
    assert (status[left], status[other]) == ("KILLED", "RUNNING")
    assert store.client.get_model_version(MODEL, pending).tags["eagle.verdict"] == "abandoned"


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(1), "KILLED")]
)
def test_a_run_never_stays_open(root: Path, error: BaseException, status: str) -> None:
    store = store_of(root)
    with pytest.raises(type(error)), client.tracked_run(store, "n", {}):  # noqa: PT012
        raise error
    assert set(runs(store).values()) == {status}


def test_sigterm_ends_the_run_as_killed(root: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from eagle.profiles import load_config; from eagle.registry import client\n"
        "root = Path(sys.argv[1]); store = client.open_store(load_config(root), root)\n"
        "with client.tracked_run(store, 'n', {}):\n    print('open', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    process.stdout.close()
    assert set(runs(store_of(root)).values()) == {"KILLED"}


def test_an_mlflow_run_id_in_the_environment_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert registered(root)["verdict"] == "passed"


def test_manual_promotion_needs_the_gate_or_force_and_rollback_goes_back(root: Path) -> None:
    registered(root, acceptance=2.0)
    registered(root, acceptance=1.5)
    registered(root, acceptance=2.1)
    store = store_of(root)
    with pytest.raises(GateRejected, match="rejected"):
        promote.promote(store, MODEL, "2")
    with pytest.raises(ConfigError, match="version '9'"):
        promote.promote(store, MODEL, "9")
    with pytest.raises(ConfigError, match="needs --why"):
        promote.promote(store, MODEL, "2", why=" ", force=True)
    with pytest.raises(ConfigError, match="champion already"):
        promote.promote(store, MODEL, "3")
    assert aliased(store, "champion", "previous") == ["3", "1"]
    forced = promote.promote(store, MODEL, "2", why="trial", force=True)
    assert (forced.kind, forced.previous) == ("forced", "3")
    assert "@" in forced.by
    assert aliased(store, "champion", "previous") == ["2", "3"]
    back = [(promote.rollback(store, MODEL).version, aliased(store, "previous")) for _ in range(2)]
    assert back == [("3", ["1"]), ("1", [None])]
    with pytest.raises(StepFailed, match="no earlier champion"):
        promote.rollback(store, MODEL)
    champion = by_alias(store, MODEL, "champion")
    assert champion is not None
    assert str(champion.version) == "1"
    assert [m.kind for m in promote.moves(store, MODEL)] == ["gate", "gate", "forced", "rollback", "rollback"]


def test_an_alias_moved_elsewhere_enters_the_history(root: Path) -> None:
    registered(root, acceptance=2.0)
    registered(root, acceptance=1.5)
    store = store_of(root)
    store.client.set_registered_model_alias(MODEL, "champion", "2")
    assert promote.rollback(store, MODEL).version == "1"
    assert [(m.kind, m.version) for m in promote.moves(store, MODEL)] == [("gate", "1"), ("outside", "2"), ("rollback", "1")]


def test_a_crash_within_a_move_is_settled(root: Path) -> None:
    registered(root, acceptance=2.0)
    registered(root, acceptance=1.5)
    store = store_of(root)
    store.client.set_registered_model_alias(MODEL, "champion", "2")  # and then the power went off
    promote.settle(store, MODEL)
    assert aliased(store, "champion", "previous") == ["2", "1"]
    store.client.set_registered_model_alias(MODEL, "previous", "2")
    promote.settle(store, MODEL)
    assert aliased(store, "previous") == [promote.previous_of(store, MODEL)] == ["1"]
    assert [m.kind for m in promote.moves(store, MODEL)] == ["gate", "outside"]


def test_a_version_says_what_it_was_made_from_and_measured_at(root: Path) -> None:
    registered(root, acceptance=1.75)
    tags = store_of(root).client.get_model_version(MODEL, "1").tags
    found = {name: manifest.read_manifest(root / "runs" / "r" / name) for name in INPUTS}
    assert json.loads(tags["eagle.inputs"]) == {name: made["content_hash"] for name, made in found.items() if made}
    assert (tags["eagle.acceptance_length"], json.loads(tags["eagle.speedup"])) == ("1.75", {"b1": 1.1})
    files = {f["path"]: f["sha256"] for f in manifest.list_files(root / "runs" / "r" / "bundle" / "bundle")}
    assert files.items() <= json.loads(tags["eagle.files"]).items()
    assert tags["eagle.target"].startswith("folder:")
    assert tags["eagle.vllm"] == "0.0-fake"
    assert {r["name"] for r in json.loads(tags["eagle.reasons"])} >= {"acceptance_length", "equal_tokens"}


def test_a_version_whose_upload_never_ended_is_not_promoted_even_by_force(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(root, acceptance=2.0)
    registered(root, acceptance=1.5)
    store = store_of(root)
    pending = store.client.get_model_version(MODEL, "2")
    pending._status = "PENDING_REGISTRATION"
    monkeypatch.setattr(promote, "get_version", lambda *_: pending)
    with pytest.raises(StepFailed, match="PENDING_REGISTRATION"):
        promote.promote(store, MODEL, "2", why="trial", force=True)
    assert aliased(store, "champion") == ["1"]


def test_the_lock_is_respected(root: Path) -> None:
    store = store_of(root)
    with store.lock(), pytest.raises(BusyError, match=r"registry\.lock"), replace(store).lock(timeout=0.1):
        pass


def config_with(root: Path, *overrides: str) -> Config:
    return load_config(root, overrides=overrides)


def test_a_store_that_cannot_be_used_is_said_at_once(root: Path) -> None:
    (root / "file").write_text("not a folder")
    began = time.monotonic()
    with pytest.raises(PreflightError, match=r"paths\.state"):
        open_store(config_with(root, "paths.state=file/state"), root)
    with pytest.raises(PreflightError, match=r"register\.tracking_uri"):
        open_store(config_with(root, "register.tracking_uri=nonsense://x"), root)
    with pytest.raises(PreflightError, match=r"register\.tracking_uri: .*not a database"):
        open_store(config_with(root, "register.tracking_uri=sqlite:///file"), root)
    assert time.monotonic() - began < 60, "a store that cannot be used must not be waited for"


def test_a_relative_sqlite_address_belongs_to_the_project(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(config_with(root, "register.tracking_uri=sqlite:///.state/mlflow.db"), root)
    assert store.uri == f"sqlite:///{root / '.state' / 'mlflow.db'}"
    assert not (tmp_path / "mlflow.db").exists()


def test_a_deleted_experiment_is_named(root: Path) -> None:
    store = store_of(root)
    store.client.delete_experiment(store.experiment_id)
    with pytest.raises(StepFailed, match="mlflow experiments restore"):
        store_of(root)


def test_model_names_follow_the_target(root: Path) -> None:
    assert register.model_name(config_with(root)) == MODEL
    assert register.model_name(config_with(root, "target.model=org/Some Model:7B")) == "eagle31-Some-Model-7B"
    assert register.model_name(config_with(root, "register.model_name=mine")) == "mine"


def test_curves_of_rows_columns_and_names() -> None:
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    assert list(register.curves(rows, "a")) == [("a", rows)]
    assert list(register.curves({"step": [1, 2], "loss": [2.0, 1.0]}, "a")) == [("a", rows)]
    assert list(register.curves({"train": rows, "note": "x"}, "a")) == [("a.train", rows)]


def test_nothing_reports_home() -> None:
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"
