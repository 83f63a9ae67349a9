"""Other layouts of a draft, what vLLM cannot do, and the command that writes them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

from eagle.bundle.export import export_draft, find_draft_folder, fresh_folder
from eagle.bundle.limits import check_limits, portable
from eagle.bundle.speculators import Verifier, export_speculators, speculators_config
from eagle.bundle.validate import check_bundle
from eagle.cli import app
from eagle.draft.io import load_draft, read_spec
from eagle.draft.spec import ROPE_KEYS, DraftSpec
from eagle.errors import BundleError, ConfigError, EagleError
from eagle.target.load import load_target
from tests.contract.cases import ROPES, Case, make_draft, make_target, prompts
from tests.contract.reference import greedy_chains

CASE = Case(rope="llama3", aux=4, norm_before_residual=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(CASE, tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(CASE, target, tmp_path_factory.mktemp("run") / "policy" / "draft")


@pytest.fixture
def spec(draft: Path) -> DraftSpec:
    return read_spec(draft)


@pytest.fixture
def keys(draft: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a bundle whose config.json has other values; a value of ... removes the key."""

    def change(**values: Any) -> Path:
        folder = tmp_path / "bundle"
        export_draft(draft, folder, "float32")
        content = {**json.loads((folder / "config.json").read_text()), **values}
        (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
        return folder

    return change


class TestLimits:
    @pytest.mark.parametrize(
        ("rope", "told"),
        [
            ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not one that vLLM and transformers compute alike"),
            ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not one that"),
            ({"rope_type": "yarm", "factor": 2.0}, r"closest: 'yarn'"),
            ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is no key of rope_type 'default'"),
            ({"rope_type": "linear", "factor": 2.0, "rope_dim": 16}, "rope_dim is no key of rope_type 'linear'"),
            ({"type": "linear", "factor": 2.0}, "is no key of rope_type 'default'"),
            ({"rope_type": "linear", "factor": 2}, "factor is 2; vLLM's linear rotary embedding takes 2.0 only"),
            ({"rope_type": "linear"}, "factor must be a positive number for rope_type 'linear', got None"),
            ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
             "original_max_position_embeddings must be a positive number"),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": None}, "beta_fast must be"),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 2.0},
             "attention_factor is no key"),
        ],
    )  # fmt: skip
    def test_a_rotary_embedding_that_vllm_reads_otherwise(self, keys: Callable[..., Path], rope: dict[str, Any], told: str) -> None:
        bundle = keys(rope_scaling=rope)
        with pytest.raises(BundleError, match=told):
            check_bundle(bundle)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"num_heads": 3}, "num_attention_heads 3 is no multiple of num_key_value_heads 2"),
            ({"head_dim": 33}, "head_dim 33 is odd"),
            ({"draft_vocab_size": 321}, "draft_vocab_size 321 is larger than vocab_size 320"),
        ],
    )
    def test_numbers(self, spec: DraftSpec, change: dict[str, int], told: str) -> None:
        with pytest.raises(BundleError, match=told):
            check_limits(replace(spec, **change))

    @pytest.mark.parametrize("key", ["num_attention_heads", "head_dim"])
    def test_the_export_refuses_before_it_writes(self, draft: Path, tmp_path: Path, key: str) -> None:
        broken = tmp_path / "draft"
        broken.mkdir()
        content = json.loads((draft / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps({**content, key: content[key] - 1}))
        (broken / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
        for write in (
            lambda out: export_draft(broken, out, "float32"),
            lambda out: export_speculators(broken, out, Verifier(tmp_path, "x", ()), 3, "float32"),
        ):
            with pytest.raises(BundleError, match=key):
                write(tmp_path / "out")
            assert not (tmp_path / "out").exists()

    @given(kind=st.sampled_from(sorted(ROPE_KEYS)), factor=st.integers(1, 64), fill=st.booleans())
    def test_what_is_made_portable_is_accepted_and_stays_so(self, kind: str, factor: int, fill: bool) -> None:
        made = {"rope_type": kind, "rope_theta": 1e4, **{key: factor for key in ROPE_KEYS[kind]}}
        if kind == "yarn":
            made |= {"beta_slow": 1 if fill else None}
            del made["original_max_position_embeddings"]
        wanted = portable(replace(_spec(), rope_parameters=made))
        check_limits(wanted)
        assert portable(wanted) == wanted
        assert wanted.rope_parameters.get("factor", factor) == factor

    def test_every_rope_of_the_contract_passes(self, spec: DraftSpec) -> None:
        for rope in ROPES.values():
            check_limits(replace(spec, rope_parameters={"rope_type": "default", **rope}))


def _spec() -> DraftSpec:
    return DraftSpec(64, 64, 128, 1, 4, 2, 32, 320, 200, (1, 2), 1e-5, {"rope_type": "default", "rope_theta": 1e4}, 2048)


class TestSpeculators:
    def test_every_number_of_the_draft_is_in_the_file(self, draft: Path, target: Path, tmp_path: Path) -> None:
        spec = export_speculators(draft, tmp_path / "out", Verifier.of(target), 3, "bfloat16")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        layer = config["transformer_layer_config"]
        assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
        assert config["speculators_config"]["verifier"] == {
            "name_or_path": str(target.resolve()), "architectures": ["LlamaForCausalLM"],
        }  # fmt: skip
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
        assert {key: config[key] for key in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")} == {
            "fc_norm": True, "norm_output": True, "norm_before_residual": True, "norm_before_fc": False,
        }  # fmt: skip
        assert config["eagle_aux_hidden_state_layer_ids"] == list(spec.aux_layers)
        assert layer["num_aux_hidden_states"] == len(spec.aux_layers) == 4
        assert layer["rope_parameters"] == spec.rope_parameters
        assert (layer["num_hidden_layers"], layer["head_dim"], layer["vocab_size"]) == (4, 32, 320)
        made, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(draft / "model.safetensors")
        assert made.keys() - source.keys() == {"embed_tokens.weight"}
        assert all(torch.equal(made[name], source[name].to(made[name].dtype)) for name in source)
        assert made["fc.weight"].dtype == torch.bfloat16
        assert torch.equal(made["embed_tokens.weight"], load_file(target / "model.safetensors")["model.embed_tokens.weight"])

    def test_the_flags_are_the_drafts(self, spec: DraftSpec) -> None:
        for flag in ("fc_norm", "norm_output", "norm_before_residual"):
            for value in (True, False):
                made = speculators_config(replace(spec, **{flag: value}), Verifier(Path("x"), "x", ("A",)), 3, "float32")
                assert made[flag] is value

    def test_another_width_cannot_be_said(self, target: Path, tmp_path: Path) -> None:
        wide = make_draft(replace(CASE, hidden=96), target, tmp_path / "draft")
        with pytest.raises(BundleError, match="the draft is 96 wide, its target 64.*--format vllm"):
            export_speculators(wide, tmp_path / "out", Verifier.of(target), 3, "float32")
        assert not (tmp_path / "out").exists()

    @pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="the package speculators is not installed")
    @pytest.mark.parametrize(
        "change", [{}, {"depth": 1, "fc_norm": False, "norm_output": False, "aux": 3, "vocab": 320, "rope": "yarn"}]
    )
    def test_the_package_loads_it_and_computes_the_same(self, tmp_path: Path, change: dict[str, Any]) -> None:
        from speculators import SpeculatorModel, SpeculatorModelConfig

        case = replace(CASE, **change)
        target = make_target(case, tmp_path / "targets")
        ours = make_draft(case, target, tmp_path / "draft")
        export_speculators(ours, tmp_path / "out", Verifier.of(target), 3, "float32")
        config = SpeculatorModelConfig.from_pretrained(str(tmp_path / "out"))
        config.transformer_layer_config._attn_implementation = "eager"
        loaded = SpeculatorModel.from_pretrained(str(tmp_path / "out"), config=config).eval()
        assert {name: tuple(loaded.state_dict()[name].shape) for name in load_file(ours / "model.safetensors")} == {
            name: tuple(tensor.shape) for name, tensor in load_file(ours / "model.safetensors").items()
        }
        draft, model = load_draft(ours, target).eval(), load_target(target, "float32")
        assert torch.equal(loaded.embed_tokens.weight, draft.embed_tokens.weight)
        context = max(prompts(), key=len)
        theirs = _first_steps(loaded, model, draft, context)
        wanted, _ = greedy_chains(model, draft, [context[: at + 2] for at in range(len(context) - 1)], 1)
        assert torch.equal(theirs, wanted[:, 0])


@torch.inference_mode()
def _first_steps(loaded: Any, target: Any, draft: Any, context: list[int]) -> torch.Tensor:
    """What the package's model drafts first at every position of a context but the last: target ids [T - 1]."""
    from eagle.target.taps import HiddenTaps

    ids = torch.tensor([context])
    with HiddenTaps(target, draft.spec.aux_layers) as taps:
        target(input_ids=ids, use_cache=False)
        states = taps.concat()[:, :-1]
    tokens = loaded(states, ids[:, 1:], document_ids=torch.zeros_like(ids[:, 1:]), ttt_steps=1)[0][0]
    return tokens + loaded.d2t[tokens] if loaded.d2t is not None else tokens


class TestCommand:
    @pytest.fixture
    def project(self, target: Path, draft: Path, tmp_path: Path) -> Callable[..., Any]:
        """Run `eagle bundle ...` in a project whose target is the toy."""
        (tmp_path / "params.yaml").write_text(f"target:\n  model: {target}\n")

        def run(*words: str) -> Any:
            return CliRunner().invoke(app, ["--root", str(tmp_path), "bundle", *words])

        return run

    def test_a_run_becomes_either_layout(self, project: Callable[..., Any], draft: Path, target: Path, tmp_path: Path) -> None:
        run = draft.parents[1]
        done = project("export", str(run), "--out", str(tmp_path / "a" / "vllm"))
        assert done.exit_code == 0, done.output
        check_bundle(tmp_path / "a" / "vllm", target)
        done = project("export", str(run), "--format", "speculators", "--out", str(tmp_path / "b"))
        assert done.exit_code == 0, done.output
        assert "4 layers, vocabulary 200 of 320" in done.output
        config = json.loads((tmp_path / "b" / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(target.resolve())
        assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "params.yaml"], "something private was left"

    def test_another_name_for_the_target(self, project: Callable[..., Any], draft: Path, tmp_path: Path) -> None:
        words = ("export", str(draft), "--format", "speculators", "--out", str(tmp_path / "b"), "--verifier", "org/model")
        assert project(*words).exit_code == 0
        config = json.loads((tmp_path / "b" / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"

    def test_validate_is_still_there(self, project: Callable[..., Any], draft: Path, tmp_path: Path) -> None:
        export_draft(draft, tmp_path / "bundle", "float32")
        done = project("validate", str(tmp_path / "bundle"))
        assert done.exit_code == 0
        assert "sound" in done.output

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["export", "{root}/policy/drafd", "--out", "{out}"], r"no folder .*drafd \(closest: 'draft'\)"),
            (["export", "{root}/policy", "--format", "vllm", "--out", "{root}"], "is there already"),
            (["export", "{target}", "--out", "{out}"], "no key"),
            (["export", "{root}", "--out", "{out}", "--verifier", "a/b"], "--verifier: only the speculators layout"),
        ],
    )
    def test_bad_input_is_one_line_and_leaves_nothing(
        self, project: Callable[..., Any], draft: Path, target: Path, tmp_path: Path, words: list[str], told: str
    ) -> None:
        out = tmp_path / "out"
        filled = [word.format(root=draft.parents[1], out=out, target=target) for word in words]
        done = project(*filled)
        assert isinstance(done.exception, EagleError)
        with pytest.raises(type(done.exception), match=told):
            raise done.exception
        assert not out.exists()

    def test_a_folder_without_a_draft(self, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match="holds no draft"):
            find_draft_folder(tmp_path)

    def test_what_fails_leaves_no_folder(self, tmp_path: Path) -> None:
        def fail() -> None:
            with fresh_folder(tmp_path / "out") as private:
                (private / "half").write_text("x")
                raise BundleError("no")

        with pytest.raises(BundleError, match="no"):
            fail()
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "out").mkdir()
        with fresh_folder(tmp_path / "out") as private:
            (private / "whole").write_text("x")
        assert (tmp_path / "out" / "whole").read_text() == "x"
        with pytest.raises(ConfigError, match="is there already"), fresh_folder(tmp_path / "out"):
            pass
