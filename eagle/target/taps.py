"""Hidden states of chosen layers, tapped during the target's own forward pass.

Layer ids have vLLM's meaning: 0 = the embeddings, i = the residual stream after i decoder layers, before the final
norm. transformers' `hidden_states[i]` is the same for i < L; its last entry is after the final norm, so id L needs
the hook on the last layer that is used here.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from eagle.errors import ConfigError


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return vLLM's default ids (2, L/2, L-3), ascending and distinct, without those outside 1..L; at least one.

    A target of one layer has none of them inside, so its only layer is taken.
    """
    wanted = {2, num_layers // 2, num_layers - 3}
    return tuple(sorted(i for i in wanted if 1 <= i <= num_layers)) or (num_layers,)


def resolve_aux_layers(configured: list[int] | tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layer ids to tap, ascending and distinct (vLLM sorts and dedups them as well).

    Raises ConfigError for an empty list or an id outside 0..num_layers.
    """
    if configured is None:
        return default_aux_layers(num_layers)
    if not configured:
        raise ConfigError("target.aux_layers: give at least one layer id, or null for the default")
    for index in configured:
        if not 0 <= index <= num_layers:
            raise ConfigError(f"target.aux_layers: {index} is outside 0..{num_layers} of this target ({num_layers} layers)")
    return tuple(sorted(set(configured)))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder's list of layers (Llama, Qwen, Mistral and alike). ConfigError for another architecture."""
    find: Any = getattr(model, "get_decoder", None)
    decoder = find() if find is not None else getattr(model, "model", None)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ConfigError(f"target.model: {type(model).__name__} has no model.layers; hidden states cannot be tapped")
    return layers


class HiddenTaps:
    """Context manager that keeps the hidden states of `layers` of each forward pass of `model`.

    Inside the context, after a forward over T tokens of B sequences, `concat()` is [B, T, A*H] in the model's dtype
    and ascending id order, A = number of distinct ids. States of the former forward are replaced, not collected.
    Raises ConfigError for an id outside 0..L or an architecture without `model.layers`.
    """

    def __init__(self, model: nn.Module, layers: tuple[int, ...] | list[int]) -> None:
        self._blocks = decoder_layers(model)
        self.layers = resolve_aux_layers(layers, len(self._blocks))
        self._states: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> HiddenTaps:
        for index in self.layers:
            if index == 0:  # what enters the first layer, which is the embedding after any scaling of it
                handle = self._blocks[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                handle = self._blocks[index - 1].register_forward_hook(self._keeper(index))
            self._handles.append(handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._states.clear()

    def concat(self) -> Tensor:
        """Return the tapped states of the last forward, concatenated on the last axis: [B, T, A*H]."""
        missing = [index for index in self.layers if index not in self._states]
        if missing:
            raise RuntimeError(f"no hidden state of layer {missing[0]}: run a forward pass inside the context first")
        return torch.cat([self._states[index] for index in self.layers], dim=-1)

    def clear(self) -> None:
        """Drop the kept states, so that their memory can be freed before the next forward."""
        self._states.clear()

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._states[0] = (args[0] if args else kwargs["hidden_states"]).detach()

    def _keeper(self, index: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._states[index] = (output[0] if isinstance(output, tuple) else output).detach()

        return keep
