"""The draft network against a plain reading of vLLM's llama_eagle3.py, its files, and the attention of many rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle import manifest
from eagle.config import DraftConfig
from eagle.draft.attention import ChainAttention, PrefixAttention, chain_reference
from eagle.draft.init import init_from_target, initialise
from eagle.draft.io import load_draft, save_draft
from eagle.draft.model import DraftModel
from eagle.draft.ops import linear
from eagle.draft.spec import DraftSpec, expected_tensors
from eagle.errors import BundleError, ConfigError
from eagle.target.load import TargetDims, target_dims
from tests.toys import tiny_target
from tests.training.builders import make_draft

SHAPES = [
    {},
    {"layers": 1},
    {"layers": 4, "heads": 8, "kv_heads": 8},
    {"vocab_size": None},
    {"hidden_size": 48, "head_dim": 16},
    {"fc_norm": False, "norm_output": False},
    {"norm_before_residual": True, "kv_heads": 1},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), tie=False)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Plain:
    """One sequence, one step at a time, keys in a list: written from vLLM's sources, over the state dict's names."""

    def __init__(self, model: DraftModel) -> None:
        self.w = {name: t.detach() for name, t in model.state_dict().items()}
        self.embed = model.embed_tokens.weight.detach()
        self.spec = spec = model.spec
        config = LlamaConfig(
            hidden_size=spec.hidden_size, num_attention_heads=spec.num_heads, head_dim=spec.head_dim,
            rope_parameters=dict(spec.rope_parameters), max_position_embeddings=spec.max_position_embeddings,
        )
        self.rope = LlamaRotaryEmbedding(config)
        self.cache: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(spec.num_layers)]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return plain_norm(x, self.w[f"{name}.weight"], self.spec.rms_norm_eps)

    def combine(self, aux: Tensor) -> Tensor:
        if self.spec.fc_norm:
            aux = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(aux.chunk(self.spec.num_aux))])
        return self.w["fc.weight"] @ aux

    def attention(self, i: int, x: Tensor, position: int) -> Tensor:
        spec, at = self.spec, f"layers.{i}.self_attn"
        q, k, v = ((self.w[f"{at}.{n}_proj.weight"] @ x).view(1, -1, 1, spec.head_dim) for n in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *self.rope(x[None], torch.tensor([[position]])))
        keys, values = self.cache[i]
        keys.append(k)
        values.append(v)
        out = F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), enable_gqa=True)
        return self.w[f"{at}.o_proj.weight"] @ out.flatten()

    def step(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits, normed, feedback) and append this position's keys."""
        residual = hidden
        for i in range(self.spec.num_layers):
            at = f"layers.{i}"
            if i == 0:
                normed = self.norm("layers.0.hidden_norm", hidden)
                residual = normed if self.spec.norm_before_residual else hidden
                x = torch.cat([self.norm("layers.0.input_layernorm", self.embed[token]), normed])
            else:
                residual = hidden + residual
                x = self.norm(f"{at}.input_layernorm", residual)
            residual = self.attention(i, x, position) + residual
            x = self.norm(f"{at}.post_attention_layernorm", residual)
            gate, up = (self.w[f"{at}.mlp.{n}_proj.weight"] @ x for n in ("gate", "up"))
            hidden = self.w[f"{at}.mlp.down_proj.weight"] @ (F.silu(gate) * up)
        total = hidden + residual
        normed = self.norm("norm", total)
        return self.w["lm_head.weight"] @ normed, normed, normed if self.spec.norm_output else total

    def cut(self, length: int) -> None:
        self.cache = [(k[:length], v[:length]) for k, v in self.cache]


@pytest.mark.parametrize("changes", SHAPES)
def test_names_shapes_and_files(target: Path, tmp_path: Path, changes: dict) -> None:
    model = make_draft(target, **changes)
    expected = expected_tensors(model.spec)
    assert {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()} == expected
    assert ("d2t" in expected) == ("t2d" in expected) == model.spec.reduced_vocab
    assert ("embed_tokens.weight" in expected) == (model.spec.hidden_size != model.spec.target_hidden_size)
    save_draft(tmp_path / "draft", model)
    again = load_draft(tmp_path / "draft", target)
    assert again.spec == model.spec
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in model.state_dict().items())
    assert load_file(tmp_path / "draft" / "model.safetensors").keys() == expected.keys()
    save_draft(tmp_path / "half", model, "bfloat16")
    half = load_draft(tmp_path / "half", target)
    assert half.fc.weight.dtype == torch.bfloat16
    assert half.rotary.cos.dtype == torch.float32


@pytest.mark.parametrize("changes", SHAPES)
def test_rounds_equal_a_plain_reading_of_vllm(target: Path, changes: dict) -> None:
    model = make_draft(target, **changes)
    spec = model.spec
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, spec.vocab_size, (2, 9), generator=random)
    aux = torch.randn(2, 9, spec.num_aux * spec.target_hidden_size, generator=random)
    own = torch.randint(0, spec.vocab_size, (2, 3), generator=random)  # what the chains of two rounds take as their tokens
    rows, cols = torch.tensor([0, 1]), torch.tensor([7, 3])
    with torch.no_grad():
        prefix = PrefixAttention()
        normed, feedback = model.step(tokens[:, 1:], model.fuse(aux[:, :-1]), torch.arange(8).expand(2, -1), prefix)
        steps = [(normed[rows, cols], feedback[rows, cols])]
        chain = ChainAttention(prefix, rows, cols)
        for j in range(1, 4):
            out, back = model.step(own[:, j - 1][None], steps[-1][1][None], (cols + j)[None], chain)
            steps.append((out[0], back[0]))
        for at in range(2):
            plain = Plain(model)
            for t in range(int(cols[at]) + 1):
                logits, normed_t, hidden = plain.step(int(tokens[at, t + 1]), plain.combine(aux[at, t]), t)
            for j, (got_normed, got_feedback) in enumerate(steps):
                if j:
                    logits, normed_t, hidden = plain.step(int(own[at, j - 1]), hidden, int(cols[at]) + j)
                torch.testing.assert_close(got_normed[at], normed_t, rtol=2e-4, atol=2e-4)
                torch.testing.assert_close(got_feedback[at], hidden, rtol=2e-4, atol=2e-4)
                torch.testing.assert_close(model.logits(got_normed[at]), logits, rtol=2e-4, atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 9), heads=st.sampled_from([(2, 1), (4, 2), (2, 2)]), rounds=st.integers(1, 12),
    steps=st.integers(1, 3), seed=st.integers(0, 999),
)
def test_chain_attention_equals_one_softmax(
    batch: int, length: int, heads: tuple[int, int], rounds: int, steps: int, seed: int
) -> None:
    """Output and every gradient, duplicates among the rounds included."""
    random = torch.Generator().manual_seed(seed)
    n, kv = heads
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=random).requires_grad_()  # noqa: E731
    k, v = draw(batch, kv, length, 4), draw(batch, kv, length, 4)
    prefix = PrefixAttention()
    prefix(0, draw(batch, n, length, 4), k, v)
    rows = torch.randint(0, batch, (rounds,), generator=random)
    cols = torch.randint(0, length, (rounds,), generator=random)
    chain = ChainAttention(prefix, rows, cols)
    inputs, outs = [], []
    for _ in range(steps):
        inputs.append((draw(1, n, rounds, 4), draw(1, kv, rounds, 4), draw(1, kv, rounds, 4)))
        outs.append(chain(0, *inputs[-1]))
    wide = [x.repeat_interleave(n // kv, 1) for x in (k, v)]
    plain = []
    for s in range(steps):
        own = [torch.cat([x[i].repeat_interleave(n // kv, 1) for x in inputs[: s + 1]]) for i in (1, 2)]
        plain.append(chain_reference(inputs[s][0][0], *own, *wide, chain.mask.double(), chain.flat)[None])
    weights = [torch.randn(out.shape, dtype=torch.float64, generator=random) for out in outs]
    leaves = [k, v, *(x for step in inputs for x in step)]
    mine, theirs = (
        torch.autograd.grad(sum((o * w).sum() for o, w in zip(result, weights, strict=True)), leaves) for result in (outs, plain)
    )
    for a, b in zip((*outs, *mine), (*plain, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # torch's kernel keeps its log-sum-exp in fp32


def test_linear_and_half_precision_gradients(target: Path) -> None:
    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    for w in (weight, weight.t()[:, :4].reshape(4, 6)):
        ours = torch.autograd.grad(linear(x, w).square().sum(), (x, weight))
        plain = torch.autograd.grad(F.linear(x, w).square().sum(), (x, weight))
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b)
    model = make_draft(target)
    tokens, aux = torch.randint(0, 320, (3, 12)), torch.randn(3, 12, 2 * 64)
    gradients = []
    for half in (False, True):
        model.zero_grad()
        with model.half_precision(half):
            normed, _ = model.step(tokens, model.fuse(aux), torch.arange(12).expand(3, -1), PrefixAttention())
            assert normed.dtype == torch.float32
            model.logits(normed).float().square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == dict(model.named_parameters()).keys()
    for name, exact in gradients[0].items():
        cosine = F.cosine_similarity(exact.flatten(), gradients[1][name].flatten(), dim=0)
        assert cosine > 0.99, (name, cosine)
    assert model.fc.prepared is None
    assert model.layers[0].mlp.prepared is None


def test_rope_scaling_is_the_targets_and_survives_config_json(target: Path, tmp_path: Path) -> None:
    scaled = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    dims = target_dims(target)
    model = make_draft(target)
    for rope in (scaled, {"rope_type": "default", "rope_theta": 1e5}):
        spec = DraftSpec(**{**model.spec.__dict__, "rope_parameters": rope})
        manifest.write_json(tmp_path / "config.json", spec.to_vllm_config("bfloat16"))
        assert DraftSpec.from_vllm_config(manifest.read_json(tmp_path / "config.json")) == spec
        read = AutoConfig.from_pretrained(tmp_path)  # how vLLM reads it
        assert read.rope_parameters == rope
        draft = DraftModel(spec, torch.randn(320, 64))
        x, positions = torch.randn(1, 2, 7, 32), torch.tensor([[0, 1, 5, 63, 64, 200, 5000]])
        cos, sin = draft.rotary(positions)
        theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=32, rope_parameters=dict(rope)))(x, positions)
        q = torch.cat((x[..., :16] * cos - x[..., 16:] * sin, x[..., 16:] * cos + x[..., :16] * sin), -1)
        torch.testing.assert_close(q, apply_rotary_pos_emb(x, x, *theirs)[0])
    unusual = TargetDims(**{**dims.__dict__, "rope_parameters": {"rope_type": "longrope", "rope_theta": 7.0, "factor": 2.0}})
    assert DraftSpec.from_config(DraftConfig(), unusual, (1, 2)).rope_parameters == {"rope_type": "default", "rope_theta": 7.0}


def test_config_json_says_everything_vllm_reads(target: Path) -> None:
    config = make_draft(target).spec.to_vllm_config("float32")
    for key in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "num_aux_hidden_states", "target_hidden_size"):
        assert key in config
    assert config["eagle_aux_hidden_state_layer_ids"] == config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["num_aux_hidden_states"] == 2
    for key, value, message in (
        ("hidden_size", None, "no key 'hidden_size'"), ("num_hidden_layers", "4", "num_hidden_layers must be a positive integer"),
        ("fc_norm", 1, "fc_norm must be true or false"), ("eagle_aux_hidden_state_layer_ids", [2, 1], "ascending and distinct"),
        ("num_aux_hidden_states", 3, "2 layer ids are given"), ("norm_before_fc", True, "norm_before_fc is True"),
    ):
        with pytest.raises(BundleError, match=message):
            DraftSpec.from_vllm_config({**config, key: value})


def test_a_wrong_checkpoint_is_refused_with_the_tensors_name(target: Path, tmp_path: Path) -> None:
    save_draft(tmp_path, make_draft(target))
    path = tmp_path / "model.safetensors"
    good = load_file(path)

    def refused(tensors: dict[str, Tensor], message: str) -> None:
        save_file(tensors, path)
        with pytest.raises(BundleError, match=message):
            load_draft(tmp_path, target)

    refused({n: t for n, t in good.items() if n != "fc.weight"}, "'fc.weight' is missing")
    refused({n: t for n, t in good.items() if n != "d2t"}, "'d2t' is missing")
    refused({**good, "layers.1.hidden_norm.weight": torch.ones(64)}, "unexpected tensor 'layers.1.hidden_norm.weight'")
    refused({**good, "norm.weight": torch.ones(63)}, r"'norm.weight' has shape \(63,\)")
    refused({**good, "d2t": good["d2t"].int()}, "'d2t' has dtype")
    refused({**good, "d2t": good["d2t"].flip(0)}, "'d2t' does not map to ascending ids")
    refused({**good, "t2d": ~good["t2d"]}, "name different vocabularies")
    path.write_bytes(b"no tensors")
    with pytest.raises(BundleError, match="cannot be read as safetensors"):
        load_draft(tmp_path, target)
    other = tiny_target(tmp_path / "other", hidden=32)
    save_file(good, path)
    with pytest.raises(ConfigError, match="needs an embedding of shape"):
        load_draft(tmp_path, other)


@pytest.mark.parametrize("tie", [False, True])
def test_start_from_the_target(tmp_path: Path, tie: bool) -> None:
    target = tiny_target(tmp_path, tie=tie)
    model = make_draft(target)
    initialise(model, output_scale=0.3, generator=torch.Generator().manual_seed(0))
    init_from_target(model, target)
    weights = load_file(target / "model.safetensors")
    head = weights["model.embed_tokens.weight" if tie else "lm_head.weight"]
    assert torch.equal(model.lm_head.weight, head[model.draft_ids()])
    assert torch.equal(model.norm.weight, weights["model.norm.weight"])
    assert torch.equal(model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    assert model.layers[0].mlp.down_proj.weight.std() < 0.4 * model.layers[0].mlp.up_proj.weight.std()
    narrow = make_draft(target, hidden_size=48, head_dim=16)
    before = narrow.lm_head.weight.clone()
    init_from_target(narrow, target)
    assert torch.equal(before, narrow.lm_head.weight)
    with pytest.raises(ValueError, match="embed must be the target's embedding"):
        DraftModel(model.spec, None)
