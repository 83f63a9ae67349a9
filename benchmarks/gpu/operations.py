"""Every operation against its oracle on the device: the same call with the kernels and without, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.draft.spec import DraftSpec
from eagle.train import objectives
from kernels import dispatch

Tensors = tuple[Tensor, ...]
ULP = {"float32": 2e-6, "bfloat16": 2.0**-7}  # one unit in the last place of bfloat16, some of float32 (sums in another order)
EPS = 1e-5
PAGE = 16


@dataclass(frozen=True)
class Check:
    """One call; `scale`: units of the largest number that may be lost besides, where terms cancel."""

    op: str
    call: Callable[[], Tensors]
    scale: float = 0.5


def checks(spec: DraftSpec, dtype: str, rows: int, device: str) -> Iterator[Check]:
    """Yield the checks of all operations for `rows` rows of a draft of `spec`."""
    torch.manual_seed(rows)
    kind, hidden, vocab = getattr(torch, dtype), spec.hidden_size, spec.draft_vocab_size

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(kind)

    x, residual, weight = random(rows, hidden), random(rows, hidden), (torch.rand(hidden, device=device) + 0.5).to(kind)
    yield Check("add_rms_norm", lambda: dispatch.add_rms_norm(x, residual, weight, EPS))
    grads = random(rows, hidden), random(rows, hidden)
    yield Check("add_rms_norm, gradient", lambda: _norm_gradient(x, residual, weight, grads), 2.0)
    embed, tokens = random(spec.vocab_size, hidden), torch.randint(spec.vocab_size, (rows,), device=device)
    yield Check("input_norm", lambda: dispatch.input_norm(tokens, embed, x, weight, weight, EPS, True))
    features, parts = random(rows, spec.num_aux * hidden), weight.expand(spec.num_aux, hidden).contiguous()
    yield Check("feature_norms", lambda: (dispatch.feature_norms(features, parts, EPS),))
    joined, grad = random(rows, 2 * spec.intermediate_size), random(rows, spec.intermediate_size)
    yield Check("silu_mul", lambda: (dispatch.silu_mul(joined),))
    yield Check("silu_mul, gradient", lambda: _silu_gradient(joined, grad), 2.0)
    yield from _cached(spec, random, rows, device)
    head = random(vocab, hidden) * hidden**-0.5
    yield Check("sample_head", lambda: _head(x, head))
    yield Check("rejection", _rejection(spec, rows, device))
    logits, prob = 4 * random(rows, vocab), torch.randn(rows, vocab, device=device).softmax(-1)
    yield Check("dense_terms", lambda: objectives.dense_terms(logits, prob))
    yield Check("dense_terms, gradient", lambda: _terms_gradient(logits, prob), 2.0)


def _norm_gradient(x: Tensor, residual: Tensor, weight: Tensor, grads: Tensors) -> Tensors:
    x, residual, weight = (tensor.detach().requires_grad_() for tensor in (x, residual, weight))
    return torch.autograd.grad(dispatch.add_rms_norm(x, residual, weight, EPS), (x, residual, weight), grads)


def _silu_gradient(joined: Tensor, grad: Tensor) -> Tensors:
    given = joined.detach().requires_grad_()
    return torch.autograd.grad(dispatch.silu_mul(given), given, grad)


def _terms_gradient(logits: Tensor, prob: Tensor) -> Tensors:
    given = logits.detach().requires_grad_()
    alpha, entropy = objectives.dense_terms(given, prob)
    return torch.autograd.grad((2 * alpha - entropy).sum(), given)


def _cached(spec: DraftSpec, random: Callable[..., Tensor], rows: int, device: str) -> Iterator[Check]:
    heads, kv, width, pages = spec.num_heads, spec.num_kv_heads, spec.head_dim, 8
    keys, values = (random(rows * pages, PAGE, kv, width) for _ in range(2))
    table = torch.randperm(rows * pages, device=device).view(rows, pages).to(torch.int32)
    positions = torch.randint(0, pages * PAGE - 1, (rows,), device=device)
    angle = torch.rand(pages * PAGE, width // 2, device=device)
    qkv = random(rows, (heads + 2 * kv) * width)

    def rope() -> Tensors:
        written = keys.clone(), values.clone()
        q = dispatch.rope_cache(qkv, angle.cos(), angle.sin(), positions, *written, table, heads, 1)
        return (q, *written)

    yield Check("rope_cache", rope)
    q = random(rows, heads, width)
    yield Check("cached_attention", lambda: (dispatch.cached_attention(q, keys, values, table, positions, width**-0.5),), 1.0)


def _head(x: Tensor, head: Tensor) -> Tensors:
    """The logit of the chosen token: of tokens whose logits are equal up to rounding either is right."""
    rows = len(x)
    positions, out = torch.zeros(rows, dtype=torch.int64, device=x.device), torch.empty(rows, dtype=torch.int64, device=x.device)
    dispatch.sample_head(x, head, None, None, None, positions, out=out)
    return ((x.float() @ head.float().T).gather(1, out[:, None]),)


def _rejection(spec: DraftSpec, rows: int, device: str) -> Callable[[], Tensors]:
    k, vocab = 4, spec.vocab_size
    ids = torch.randperm(vocab, device=device)[: spec.draft_vocab_size].sort().values
    q = (2 * torch.randn(rows, k, len(ids), device=device)).softmax(-1)
    index = torch.multinomial(q.flatten(0, 1), 1).view(rows, k)
    p = (2 * torch.randn(rows, k + 1, vocab, device=device)).softmax(-1)
    accept, token = torch.rand(2, rows, k + 1, dtype=torch.float64, device=device)
    chosen = q.gather(2, index[:, :, None])[:, :, 0]
    return lambda: dispatch.rejection(ids[index], chosen, q, p, ids, accept[:, :k].contiguous(), token)


def worst(got: Tensors, want: Tensors, dtype: str, scale: float) -> float:
    """Return the largest difference over what is allowed: 1 unit in the last place of each number and `scale` of the largest."""
    found = 0.0
    for one, other in zip(got, want, strict=True):
        a, b = one.detach().double(), other.detach().double()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        a, b = a.nan_to_num(), b.nan_to_num()
        slack = 1e-6 + ULP[dtype] * (b.abs() + scale * b.abs().max())
        found = max(found, float(((a - b).abs() / slack).max()))
    return found
