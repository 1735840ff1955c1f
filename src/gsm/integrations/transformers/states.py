"""The recurrent and convolution states of hybrid models, kept by transformers' own cache layers beside our pages.

Such a state is small and of fixed size, and it is overwritten in place: it can be copied and reordered, but not taken
back. What that forbids is refused here in one sentence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from gsm.arch import ModelArch
from gsm.errors import KVError


def make_layers(model_config: PretrainedConfig, arch: ModelArch) -> list[Any]:
    """One transformers cache layer per layer of a model with states (those of attention stay empty), or none at all."""
    if not any(layer.kind == "linear" or layer.state_elements for layer in arch.layers):
        return []
    return list(DynamicCache(config=model_config).layers)


class States:
    """The states of one cache: a view of those of its layers that have any."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self.spoiled = False  # a forward pass failed in the middle

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self._layers for tensor in _tensors(layer))

    @property
    def is_croppable(self) -> bool:
        """Whether drafts can be taken back: convolutions alone, and recorded for that."""
        return not any(state is not None for layer in self._layers for state in layer.recurrent_states.values())

    def check(self) -> None:
        """Raises KVError where an interrupted forward pass left some states one step ahead of others."""
        if self.spoiled:
            raise KVError(
                "a forward pass of this hybrid model failed in the middle and its recurrent state cannot be taken "
                "back; start again with a new cache"
            )

    def spoil(self) -> None:
        """A forward pass failed: some states may have moved on."""
        self.spoiled = any(True for layer in self._layers for _ in _tensors(layer))

    def check_crop(self, num_tokens: int) -> None:
        """Refuse to take back tokens that a recurrent state has seen. Raises KVError."""
        for layer in self._layers:
            if num_tokens and any(True for _ in _tensors(layer)) and not (layer.record_past and self.is_croppable):
                raise KVError(
                    f"cannot take back {num_tokens} tokens: a recurrent state cannot be undone; fork the cache before "
                    "going on, and generate without drafts (prompt lookup, assistant) on this model"
                )

    def crop(self, num_tokens: int) -> None:
        """Take back the last tokens of convolution states that were recorded for that."""
        for layer in self._layers:
            if layer.record_past and any(True for _ in _tensors(layer)):
                LinearAttentionCacheLayerMixin.crop(layer, -num_tokens)

    def select(self, indices: Tensor) -> None:
        """Row i becomes what row `indices[i]` was."""
        for layer in self._layers:
            LinearAttentionCacheLayerMixin.reorder_cache(layer, indices.long())  # type: ignore[arg-type]


def _tensors(layer: LinearAttentionCacheLayerMixin) -> Iterator[Tensor]:
    """What a layer holds of the past."""
    for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
        if state is not None:
            yield state


def twin_layers(layers: list[Any]) -> list[Any]:
    """Independent copies with the same states."""
    with torch.no_grad():
        return copy.deepcopy(layers)
