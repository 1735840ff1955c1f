"""A plain python model of the KV store: every sequence is just the list of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsm.config import CacheConfig
from gsm.core.batch import Span
from gsm.kv.manager import KVManager
from gsm.kv.step import KVStep

LAYERS, HEADS, K_DIM, V_DIM = 3, 2, 8, 16


def make_config(**settings: object) -> CacheConfig:
    """A small store: hot zone of two pages, one sink."""
    defaults: dict[str, object] = {"page_size": 4, "hot_size": 8, "recent_tokens": 4, "sink_tokens": 1}
    return CacheConfig.model_validate({**defaults, **settings})


def random_tokens(num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """K `[LAYERS, HEADS, n, K_DIM]` and V of that many new tokens."""
    k = torch.randn(LAYERS, HEADS, num_tokens, K_DIM, generator=generator)
    return k, torch.randn(LAYERS, HEADS, num_tokens, V_DIM, generator=generator)


@dataclass
class Tokens:
    """What a sequence should contain."""

    k: Tensor
    v: Tensor
    was_cropped: bool = False

    @classmethod
    def none(cls) -> Tokens:
        return cls(torch.zeros(LAYERS, HEADS, 0, K_DIM), torch.zeros(LAYERS, HEADS, 0, V_DIM))

    def plus(self, k: Tensor, v: Tensor) -> Tokens:
        return Tokens(torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2), self.was_cropped)

    def first(self, num_tokens: int) -> Tokens:
        return Tokens(self.k[:, :, :num_tokens], self.v[:, :, :num_tokens], True)

    def __len__(self) -> int:
        return self.k.shape[2]


def write(manager: KVManager, new: dict[int, tuple[Tensor, Tensor]], layers: int = LAYERS) -> KVStep:
    """Begin a step with new tokens per slot and write its first `layers` layers; the caller ends it."""
    longest = max(k.shape[2] for k, _ in new.values())
    spans = [Span(slot, row, longest - k.shape[2], k.shape[2]) for row, (slot, (k, _)) in enumerate(new.items())]
    step = manager.begin(spans)
    for layer in range(layers):
        k_in = torch.full((len(new), HEADS, longest, K_DIM), torch.nan)
        v_in = torch.full((len(new), HEADS, longest, V_DIM), torch.nan)
        for span, (k, v) in zip(spans, new.values(), strict=True):
            k_in[span.row, :, span.start :], v_in[span.row, :, span.start :] = k[layer], v[layer]
        step.write(layer, k_in, v_in)
    return step


def append(manager: KVManager, new: dict[int, tuple[Tensor, Tensor]]) -> None:
    write(manager, new).commit()


def stored(manager: KVManager, slot: int) -> tuple[Tokens, Tensor]:
    """What the store holds of a slot, and bool `[LAYERS, HEADS, n]`: which tokens are there at all."""
    num_tokens = manager.num_tokens(slot)
    if num_tokens == 0:
        return Tokens.none(), torch.zeros(LAYERS, HEADS, 0, dtype=torch.bool)
    page_size = manager.config.page_size
    num_pages = -(-num_tokens // page_size)
    keys, values, there = [], [], []
    for layer in range(LAYERS):
        group = manager._group_of[layer]
        view = group.layer_view(layer, torch.tensor([slot]), torch.tensor([num_tokens]), num_pages)
        ids = view.page_ids()
        k, v = view.read(ids)
        keys.append(k[0, :, :num_tokens])
        values.append(v[0, :, :num_tokens])
        skip = view.records["skip"][ids[0].clamp_min(0)].unsqueeze(-1)
        present = (ids[0] >= 0).unsqueeze(-1) & (torch.arange(page_size) >= skip)
        there.append(present.flatten(1)[:, :num_tokens])
    return Tokens(torch.stack(keys), torch.stack(values)), torch.stack(there)


def bound(x: Tensor, codec: str) -> Tensor:
    """Largest error of a stored token `[..., dim]` under a codec (float16 rounding of scales included)."""
    if codec == "none":
        return torch.zeros_like(x)
    top = x.abs().amax(-1, keepdim=True).expand_as(x)
    return top / 254 + top * 2.0**-11


def assert_holds(manager: KVManager, slot: int, expected: Tokens) -> None:
    """The store holds exactly the expected tokens: bit for bit in full precision, within the bound when coded.

    The hot zone and the sinks are in full precision, unless a crop moved the hot zone back over coded pages.
    """
    codec = manager.config.warm.codec
    assert manager.num_tokens(slot) == len(expected)
    tokens, there = stored(manager, slot)
    assert there.all()
    assert ((tokens.k - expected.k).abs() <= bound(expected.k, codec)).all()
    assert ((tokens.v - expected.v).abs() <= bound(expected.v, codec)).all()
    first_hot = max(0, len(expected) - manager.config.hot_size)
    sinks = manager.config.sink_tokens
    for part in (slice(0, sinks), slice(first_hot, None)):
        if not expected.was_cropped:
            assert torch.equal(tokens.k[:, :, part], expected.k[:, :, part])
            assert torch.equal(tokens.v[:, :, part], expected.v[:, :, part])


def pages_in_use(manager: KVManager) -> list[int]:
    """Units in use of every pool of every group."""
    pools = [p for g in manager.groups for p in (g.pages, g.hot, g.warm) if p is not None]
    return [pool.num_used for pool in pools]
