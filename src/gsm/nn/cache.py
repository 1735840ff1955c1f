"""The tiered, paged cache for models that are not from transformers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gsm.config import ConfigLike, load_config
from gsm.core.batch import Span
from gsm.core.view import AttentionSpec
from gsm.errors import InputError, KVError
from gsm.integrations.transformers.step import AttentionStep
from gsm.kv.manager import KVManager
from gsm.kv.report import KVStats


class KVCache:
    """Keys and values of a decoder's own past, for `num_layers` modules of `gsm.nn.DecoderAttention`.

    The configuration is the product's own (`gsm.load_config`): tiers, sparse reading, eviction. Rows of a batch grow
    together. Use it as

        with torch.no_grad(), cache.step(x) as step:
            for block in blocks:
                x = block(x, cache=step)

    An exception inside the block takes the step back.
    """

    def __init__(self, num_layers: int, config: ConfigLike = None) -> None:
        self.config = load_config(config).cache
        self.manager = KVManager(num_layers, self.config)
        self.slots: list[int] = []
        self._finalizer = weakref.finalize(self, self.manager.abandon, self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens of every row."""
        return self.manager.num_tokens(self.slots[0]) if self.slots else 0

    @contextmanager
    def step(self, x: Tensor) -> Iterator[CacheStep]:
        """Take the new tokens `x [B, T, ...]` (only its shape and device matter) through all layers."""
        if torch.is_grad_enabled():
            raise InputError("a cache keeps no gradients; decode under torch.no_grad() or torch.inference_mode()")
        batch, num_new = x.shape[:2]
        if self.slots and len(self.slots) != batch:
            raise InputError(f"the cache holds {len(self.slots)} rows but the input has {batch}; start a new cache")
        while len(self.slots) < batch:
            self.slots.append(self.manager.add_sequence())
        positions = torch.arange(self.num_tokens, self.num_tokens + num_new, device=x.device)
        kv = self.manager.begin([Span(slot, row, 0, num_new) for row, slot in enumerate(self.slots)])
        try:
            yield CacheStep(AttentionStep(kv, self.config), positions)
        except BaseException:
            kv.abort()
            raise
        kv.commit()

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of every row."""
        for slot in self.slots:
            self.manager.crop(slot, num_tokens)

    def free(self) -> None:
        """Give all pages back now. The cache is empty afterwards."""
        while self.slots:
            self.manager.free(self.slots.pop())

    def stats(self) -> KVStats:
        return self.manager.stats()


class CacheStep:
    """One step of a `KVCache`. Every layer writes and reads once."""

    def __init__(self, step: AttentionStep, positions: Tensor) -> None:
        self._step = step
        self.positions = positions  # int64 [T] of the new tokens
        self._done: set[int] = set()

    def attend(self, layer: int, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store `k`, `v [B, H, T, d]` and attend; `query [B, Hq, T, d]` -> `[B, Hq, T, v_dim]`."""
        if layer in self._done:
            raise KVError(f"layer {layer} attends twice in one step; give every DecoderAttention its own layer_idx")
        self._done.add(layer)
        self._step.kv.write(layer, k, v)
        spec = AttentionSpec(scale=query.shape[-1] ** -0.5)
        return self._step.attend(layer, query, k, v, spec).transpose(1, 2)
