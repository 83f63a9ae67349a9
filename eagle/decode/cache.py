"""KV memory of the reference engine: preallocated, batched, rows of different lengths.

Owns where keys and values lie, which positions a forward pass writes, and which keys each query may see. Nothing is
ever concatenated: a forward over T new tokens of n rows writes n*T entries in place and attends to views. Entries
beyond a row's length are left over from rejected tokens; they are masked until they are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle.errors import ConfigError

ATTENTION = "eagle_ragged"


@dataclass(frozen=True)
class Branches:
    """Tokens of a forward pass that do not follow each other in a line.

    `base[i]`: positions of row i below it are a common past. `positions` [n, T] (int64): where each of the T new tokens
    stands in its text. `visible` [n, T, W] (bool): which of the W entries from `base[i]` on (earlier branches and the
    new tokens themselves, W = start + T - base, the same for all rows) each new token sees.
    """

    base: list[int]
    positions: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Planned:
    """The lines of the planned tokens, `index` [n * T]; None: they are at (first + row) * max_length + start on. `rows` [n]:
    which rows they belong to; None: `first` and those after it."""

    index: Tensor | None
    rows: Tensor | None
    first: int
    start: int


class KeyValueStore:
    """Keys and values of some layers, `[layers, batch, max_length, kv_heads, head_dim]`, written by row and place.

    `plan` says what the next forward pass covers; `write` and `view` are then called once per layer.
    """

    def __init__(
        self, layers: int, batch: int, max_length: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        # Zeros, not empty: a masked key has weight 0, and 0 * NaN would still be NaN.
        self._memory = torch.zeros(2, layers, batch, max_length, kv_heads, head_dim, dtype=dtype, device=device)
        flat = self._memory.view(2, layers, batch * max_length, kv_heads * head_dim)
        self._joined = flat
        self._flat = [(flat[0, i], flat[1, i]) for i in range(layers)]
        self._columns = torch.arange(max_length, device=device)
        self.batch, self.max_length = batch, max_length
        self._rows: slice | Tensor = slice(0, 0)
        self._end = self._start = self._first = 0
        self._index: Tensor | None = None
        self._level = True  # all rows start at the same place
        self._branches: Branches | None = None
        self.positions = self._columns.new_zeros(0, 0)

    @property
    def bytes(self) -> int:
        """Bytes of the whole store, at its maximum length and batch."""
        return self._memory.numel() * self._memory.element_size()

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """Keys and values themselves, [layers, batch, max_length, kv_heads, head_dim]; for code that places entries by itself."""
        keys, values = self._memory.unbind(0)
        return keys, values

    def plan(self, starts: list[int], width: int, rows: list[int] | None = None, branches: Branches | None = None) -> Tensor:
        """Prepare a forward over `width` tokens per row; row `rows[i]` (default: i) is written from place `starts[i]` on.

        Rows that lie side by side are attended to in place; others are copied together first, layer by layer. Returns
        the positions [n, width] (int64). Raises ValueError when they go beyond the store.
        """
        first, count, end = rows[0] if rows else 0, len(starts), max(starts) + width
        if end > self.max_length or (max(rows) if rows else count - 1) >= self.batch:
            raise ValueError(f"{count} rows up to position {end} do not fit {self.batch} rows of {self.max_length}")
        together = rows is None or rows == list(range(first, first + count))
        self._rows = slice(first, first + count) if together else torch.tensor(rows, device=self._columns.device)
        self._end, self._start, self._first, self._branches = end, starts[0], first, branches
        self._level = min(starts) == max(starts)
        columns = self._columns[:width]
        if self._level:
            places = (columns + starts[0]).expand(count, width)
        else:
            places = columns + torch.tensor(starts, device=columns.device)[:, None]
        if self._level and together:
            self._index = None
        else:
            index = self._columns.new_tensor(rows if rows is not None else range(count))
            self._index = (index[:, None] * self.max_length + places).flatten()
        self.positions = places if branches is None else branches.positions
        return self.positions

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, T, kv_heads, head_dim] of the planned places."""
        if self._index is None:
            columns = slice(self._start, self._end)
            self._memory[0, layer, self._rows, columns] = keys
            self._memory[1, layer, self._rows, columns] = values
        else:
            flat_keys, flat_values = self._flat[layer]
            flat_keys.index_copy_(0, self._index, keys.reshape(len(self._index), -1))
            flat_values.index_copy_(0, self._index, values.reshape(len(self._index), -1))

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, kv_heads, S, head_dim] up to the furthest planned place: views, if rows lie together."""
        keys, values = self._memory[0, layer, :, : self._end], self._memory[1, layer, :, : self._end]
        return keys[self._rows].transpose(1, 2), values[self._rows].transpose(1, 2)

    def lines(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, [batch * max_length, kv_heads * head_dim]: place p of row b is b * max_length + p."""
        return self._flat[layer]

    @property
    def planned(self) -> Planned:
        """Where the planned tokens go, for code that writes and reads `lines` itself."""
        return Planned(self._index, self._rows if isinstance(self._rows, Tensor) else None, self._first, self._start)

    def mask(self, groups: int, dtype: torch.dtype, window: int | None = None) -> Tensor | None:
        """Return the additive mask [n or 1, 1, groups * T, S] of the plan, or None where `attend` needs none.

        A query at position t sees keys t - window < s <= t, of branches only those that it follows. The T rows are
        repeated `groups` times, see `attend`.
        """
        width = self.positions.shape[1]
        if self._branches is not None:
            hidden = self._hidden_branches(self._branches, window)
        elif self._level and (width == 1 or self._start == 0) and (window is None or self._end <= window):
            return None
        else:
            positions = (self.positions[:1] if self._level else self.positions)[:, :, None]
            columns = self._columns[: self._end]
            hidden = columns > positions
            if window is not None:
                hidden |= columns <= positions - window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        return bias.repeat(1, groups, 1)[:, None] if groups > 1 else bias[:, None]

    def _hidden_branches(self, branches: Branches, window: int | None) -> Tensor:
        """Return which entries [n, T, S] the queries of a plan with branches do not see."""
        count, width, extent = branches.visible.shape
        base = torch.tensor(branches.base, device=self._columns.device)
        columns = self._columns[: self._end]
        hidden = (columns >= base[:, None, None]).expand(count, width, self._end).clone()
        places = base[:, None] + self._columns[:extent]
        hidden.scatter_(2, places[:, None].expand(count, width, extent), ~branches.visible)
        if window is not None:
            if extent != width:
                raise ValueError("a sliding window is applied to branches of one pass only")
            stands = columns.expand(count, self._end).scatter(1, places, branches.positions)
            hidden |= stands[:, None] <= branches.positions[:, :, None] - window
        return hidden

    def keep(self, rows: list[int], places: Tensor, starts: list[int]) -> None:
        """Copy the entries at `places` [n, D] of each row to `starts[i]` and on: the accepted branch becomes the line."""
        index = self._columns.new_tensor(rows)[:, None] * self.max_length
        wanted = self._columns.new_tensor(starts)[:, None] + self._columns[: places.shape[1]]
        entries = self._joined.index_select(2, (index + places).flatten())
        self._joined.index_copy_(2, (index + wanted).flatten(), entries)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `destination`, all layers."""
        self._memory[:, :, destination, :length] = self._memory[:, :, source, :length]


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention of query [n, heads, T, d] over keys and values [n, kv_heads, S, d]; returns [n, T, heads, d].

    The heads that share a key head are laid out as further query rows, so keys are never repeated in memory
    (a copy of the whole cache per layer and step). `mask` is `KeyValueStore.mask` for groups = heads / kv_heads;
    None means plain causal attention from position 0 when T > 1, and no restriction when T = 1.
    """
    count, heads, width, dim = query.shape
    groups = heads // keys.shape[1]
    if mask is None and width > 1:
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=groups > 1)
    else:
        grouped = query.reshape(count, keys.shape[1], groups * width, dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).reshape(count, heads, width, dim)
    return out.transpose(1, 2)


class CachedAttention:
    """The `attend` argument of `DraftModel.step` for decoding: stores keys and values and attends to the whole prefix.

    Call `store.plan` before each step.
    """

    def __init__(self, store: KeyValueStore, groups: int, dtype: torch.dtype) -> None:
        self.store, self._groups, self._dtype = store, groups, dtype

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [n, heads, T, d], keys and values [n, kv_heads, T, d] after rope; returns [n, heads, T, d]."""
        self.store.write(layer, keys.transpose(1, 2), values.transpose(1, 2))
        mask = self.store.mask(self._groups, self._dtype)
        return attend(query, *self.store.view(layer), mask).transpose(1, 2)


class TargetCache(Cache):
    """The store behind transformers' cache interface, so that the target runs through its own modules."""

    def __init__(self, store: KeyValueStore) -> None:
        super().__init__(layers=[])
        self.store = store

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, kv_heads, T, d] of one layer and return views of all [n, kv_heads, S, d]."""
        self.store.write(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return self.store.view(layer_idx)


class MaskMaker:
    """Masks in the form the target's class expects: one tensor, or one per kind of layer (sliding or full)."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self._dtype = dtype
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else ["full_attention"]))
        unknown = kinds - {"sliding_attention", "full_attention"}
        if unknown:
            raise ConfigError(f"target.model: layers of kind '{sorted(unknown)[0]}' are not supported by the reference engine")
        self._window = window if "sliding_attention" in kinds else None
        self._mixed = len(kinds) == 2

    def __call__(self, store: KeyValueStore) -> Tensor | dict[str, Tensor | None] | None:
        """Return the `attention_mask` argument for the store's current plan."""
        sliding = store.mask(self._groups, self._dtype, self._window)
        if not self._mixed:
            return sliding
        return {"sliding_attention": sliding, "full_attention": store.mask(self._groups, self._dtype)}


def _target_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attend` with the signature of transformers' attention functions."""
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise ConfigError("target.model: attention with sinks or soft-capping is not supported by the reference engine")
    return attend(query, key, value, attention_mask, scaling).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _target_attention)


@contextmanager
def ragged_attention(target: PreTrainedModel) -> Iterator[None]:
    """Let the target use this module's attention inside the context; its own setting is restored afterwards."""
    before = target.config._attn_implementation
    target.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        target.set_attn_implementation(before)
