"""The oracle: what each fused operation must compute, in plain differentiable torch, one operation a line.

Every other implementation (`eager`, the Triton kernels) is tested against these for value and gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Return `x` in the dtype that norms are computed in: float32 for the 16-bit types, its own otherwise."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then RMSNorm of the sum (Zhang and Sennrich, arXiv:1910.07467; the norm of Llama).

        s = x + residual                                    rounded to the promoted dtype of the two
        y = s / sqrt(mean(s^2) + eps) * weight              in float32, rounded once to the dtype of s

    x [..., H], residual [..., H] or None (then s = x), weight [H]; returns (y, s), both [..., H] in the dtype of s.
    float64 is computed in float64. Hugging Face's LlamaRMSNorm rounds before the product with the weight, a
    difference of at most one unit in the last place in 16-bit types and none in float32.
    """
    total = x if residual is None else x + residual
    wide = widened(total)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(total.dtype), total


def input_norm(
    tokens: Tensor, embed: Tensor, hidden: Tensor, embed_weight: Tensor, hidden_weight: Tensor, eps: float, normed_residual: bool
) -> tuple[Tensor, Tensor]:
    """The input of an EAGLE-3 draft's first layer (Li et al. 2025, arXiv:2503.01840; vLLM's llama_eagle3.py).

        y = cat(norm(embed[token]) * embed_weight, norm(hidden) * hidden_weight)     residual = hidden, or the normed hidden

    tokens int64 [N], embed [V, H], hidden [N, H], weights [H]; returns (y [N, 2H], residual [N, H]) in the dtype of hidden.
    """
    embedded = add_rms_norm(widened(embed[tokens]), None, embed_weight, eps)[0].to(hidden.dtype)
    normed = add_rms_norm(hidden, None, hidden_weight, eps)[0]
    return torch.cat((embedded, normed), dim=-1), (normed if normed_residual else hidden)


def feature_norms(features: Tensor, weights: Tensor, eps: float) -> Tensor:
    """RMSNorm of each of A tapped hidden states side by side (EAGLE 3.1's `fc_norm`): [N, A*H] with weights [A, H]."""
    parts = features.unflatten(-1, weights.shape)
    return torch.stack([add_rms_norm(parts[..., i, :], None, w, eps)[0] for i, w in enumerate(weights)], dim=-2).flatten(-2)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gated activation of Llama's MLP (Shazeer 2020, arXiv:2002.05202): silu(gate) * up of [..., 2I], gate first: [..., I].

    In float32, rounded once; unfused 16-bit code rounds silu(gate) too.
    """
    gate, up = widened(gate_up).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def cache_slots(positions: Tensor, table: Tensor, page: int) -> Tensor:
    """Return the place [n] int64 of positions [n] in a paged cache, -1 where a position is negative or beyond the table.

    table int [n, m]: page of the cache that holds positions j*page .. j*page + page - 1 of a row. A contiguous cache is one
    with a page a row.
    """
    valid = (positions >= 0) & (positions < table.shape[1] * page)
    safe = torch.where(valid, positions, 0)
    slots = table.long().gather(1, (safe // page)[:, None])[:, 0] * page + safe % page
    return torch.where(valid, slots, -1)


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor, table: Tensor, heads: int
) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864, neox halves) of q and k; k and v are written into the cache.

        rope(x) = cat(a cos - b sin, b cos + a sin),  (a, b) = halves of x

    qkv [n, (heads + 2 kv) * d], one token a row; cos, sin float32 [L, d/2]; positions int64 [n]; keys, values
    [pages, page, kv, d], written in place; table as in `cache_slots`. Returns q [n, heads, d]. A row whose position is
    outside of the table writes nothing and its q is 0. In float32, rounded once.
    """
    page, kv, width = keys.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, width)).split([heads, kv, kv], dim=1)
    slots = cache_slots(positions, table, page)
    valid = slots >= 0
    at = torch.where(valid, positions, 0)
    c, s = cos[at, None], sin[at, None]

    def rotate(x: Tensor) -> Tensor:
        a, b = widened(x).chunk(2, dim=-1)
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)

    keys.flatten(0, 1)[slots[valid]] = rotate(k)[valid].to(keys.dtype)
    values.flatten(0, 1)[slots[valid]] = v[valid].to(values.dtype)
    return torch.where(valid[:, None, None], rotate(q), 0.0)


def cached_attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Softmax attention of one query a row over positions 0..positions[i] of its row of the cache, grouped heads (GQA).

    q [n, heads, d]; keys, values [pages, page, kv, d], table and positions as in `rope_cache`. Returns [n, heads, d] in q's
    dtype; 0 for a row whose position is outside of the table. Entries beyond the position are not looked at.
    """
    page, kv = keys.shape[1:3]
    known = (positions >= 0) & (positions < table.shape[1] * page)
    seen = (torch.arange(table.shape[1] * page, device=q.device) <= positions[:, None]) & known[:, None]
    k, v = (torch.where(seen[..., None, None], widened(held[table.long()].flatten(1, 2)), 0.0) for held in (keys, values))
    score = torch.einsum("nkgd,nskd->nkgs", widened(q).unflatten(1, (kv, -1)), k) * scale
    weight = torch.where(seen[:, None, None], score, float("-inf")).softmax(-1)
    out = torch.einsum("nkgs,nskd->nkgd", weight, v).flatten(1, 2)
    return torch.where(known[:, None, None], out, 0.0).to(q.dtype)


def philox(seeds: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """First word, int64 in [0, 2^32), of Philox-4x32-10 (Salmon et al. 2011) with key `seeds` and counter (first, second, 0, 0).

    All int64, broadcast; the numbers of Triton's `tl.philox`.
    """
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = (first & low, second & low, torch.zeros_like(first), torch.zeros_like(first))
    k0, k1 = seeds & low, (seeds >> 32) & low
    for _ in range(10):
        b, a = 0xCD9E8D57 * c2, 0xD2511F53 * c0  # wraps modulo 2^64, so both halves are right
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ k0, b & low, ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [n, vocab] float64 for rows with seeds [n] at positions [n] (int64): -log(E), E = -log(1 - u).

    u = (philox + 1/2) / 2^32. Small E decide the draw, and there E is as fine as u: no draw is lost to rounding.
    """
    bits = philox(seeds[:, None], torch.arange(vocab, device=seeds.device)[None], positions[:, None])
    return -torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-32))


def sample_head(
    x: Tensor, weight: Tensor, ids: Tensor | None, temperature: Tensor | None, seeds: Tensor | None, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Draft token of each row from the pruned vocabulary: the arg max of its logits, or a draw by Gumbel's trick.

        z = x W^T;  T = 0: token = argmax z;  T > 0: token = argmax z / T + gumbel,  log q = (z / T)[token] - logsumexp(z / T)

    x [n, H], weight [Vd, H], ids int64 [Vd] (target id of each, None = itself), temperature float32 [n] or None (all 0),
    seeds int64 [n] and positions int64 [n], the counter of the random numbers. Returns (target ids int64 [n], log q float32
    [n] or None without temperatures; 0 where T = 0). Of equal maxima the first, NaN above all, as torch.argmax does.
    """
    logits = widened(x) @ widened(weight).T
    if temperature is None or seeds is None:
        token, log_q = logits.argmax(-1), None
    else:
        drawn = temperature > 0
        scaled = logits / torch.where(drawn, temperature, 1.0)[:, None]
        noise = torch.where(drawn[:, None], gumbel(seeds, positions, len(weight)), 0.0)
        token = (scaled + noise).argmax(-1)
        log_q = torch.where(drawn, scaled.log_softmax(-1).gather(1, token[:, None])[:, 0], 0.0)
    return (token if ids is None else ids[token]), log_q


def dense_terms(logits: Tensor, prob: Tensor) -> tuple[Tensor, Tensor]:
    """Overlap and soft cross-entropy of the draft q = softmax(logits) with the target's p (Leviathan et al. 2023).

        alpha = sum min(p, q)     entropy = -sum over p > 0 of p log q

    logits, prob [N, Vd] (rows of prob sum to at most 1); both results [N], float32 (float64 for float64 logits).
    """
    log_q = widened(logits).log_softmax(-1)
    p = prob.to(log_q.dtype)
    return torch.minimum(p, log_q.exp()).sum(1), -torch.where(p > 0, p * log_q, 0.0).sum(1)
