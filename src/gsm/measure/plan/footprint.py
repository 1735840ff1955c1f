"""Bytes of one sequence's cache, plain and in tiers.

Plain is what transformers allocates: `ModelArch.kv_bytes`. Tiers are what `gsm.kv` allocates; the sizes of a page's
parts are read from an empty `StreamGroup`, so they cannot drift from the store. Both are held against real caches in
tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from gsm.arch import LayerGeometry, ModelArch
from gsm.config import CacheConfig
from gsm.core.scorers import make_scorer
from gsm.core.view import Window
from gsm.kv.group import Geometry, StreamGroup
from gsm.measure.plan.record import Parts

_ELEMENT_TYPES = {4: torch.float32, 2: torch.float16, 1: torch.int8}


@dataclass(frozen=True)
class PageBytes:
    """Bytes of one page of one kv head: a full-precision copy, codes, the key summary, and its record in the tables."""

    hot: int
    coded: int
    summary: int
    record: int


def tier_parts(arch: ModelArch, num_tokens: int, cache: CacheConfig, element_bytes: int) -> Parts:
    """The parts of one sequence of ``num_tokens`` tokens in GSM's pages; a layer without pages keeps its state."""
    parts = [_layer_parts(layer, num_tokens, cache, element_bytes) for layer in arch.layers]
    return Parts(**{name: sum(getattr(part, name) for part in parts) for name in Parts.model_fields})


def attended_bytes(arch: ModelArch, num_tokens: int, cache: CacheConfig, element_bytes: int) -> tuple[int, float]:
    """(tokens attended per kv head, KV bytes read) by one decode step at a context of ``num_tokens``."""
    attended = min(num_tokens, cache.sparse.budget_for(num_tokens)) if cache.sparse.enabled else num_tokens
    # a selected page may lie in the hot zone too; for a bound it is taken as coded
    hot_tokens = cache.sink_tokens + (cache.recent_tokens if attended < num_tokens else cache.hot_size)
    total = 0.0
    for layer in arch.layers:
        if not _has_pages(layer):
            total += layer.kv_bytes(num_tokens, element_bytes)
            continue
        page = page_bytes(*_stored_dims(layer), cache, element_bytes)
        tokens = attended if layer.window is None else min(attended, layer.window)
        hot = min(tokens, hot_tokens)
        scored = min(num_tokens, layer.window or num_tokens) * page.summary if attended < num_tokens else 0
        total += layer.num_kv_heads * (hot * page.hot + (tokens - hot) * page.coded + scored) / cache.page_size
    return attended, total


def page_bytes(k_dim: int, v_dim: int, cache: CacheConfig, element_bytes: int) -> PageBytes:
    """Sizes of the parts of a page, as the page store lays them out."""
    return _page_bytes(k_dim, v_dim, cache.page_size, cache.warm.codec, cache.sparse.scorer, element_bytes)


@lru_cache(maxsize=64)
def _page_bytes(k_dim: int, v_dim: int, page_size: int, codec: str, scorer: str, element_bytes: int) -> PageBytes:
    geometry = Geometry(1, k_dim, v_dim, _ELEMENT_TYPES[element_bytes], torch.device("cpu"))
    group = StreamGroup(geometry, page_size, codec, make_scorer(scorer, 1.0), num_layers=1)
    # of a page's record, counters and places are integers; the key summary is int8 codes with their floats
    fields = group.pages.fields.values()
    summary = sum(_field_bytes(field) for field in fields if field.dtype == torch.int8 or field.is_floating_point())
    hot = group.hot.unit_bytes
    return PageBytes(
        hot=hot,
        coded=group.warm.unit_bytes if group.warm is not None else hot,
        summary=summary,
        record=group.pages.unit_bytes - summary + group.table.element_size(),
    )


def _field_bytes(field: torch.Tensor) -> int:
    return math.prod(field.shape[1:]) * field.element_size()


def _layer_parts(layer: LayerGeometry, num_tokens: int, cache: CacheConfig, element_bytes: int) -> Parts:
    if not _has_pages(layer):
        return Parts(states=layer.kv_bytes(num_tokens, element_bytes))
    gone = _unseen_pages(layer, num_tokens, cache)
    pages = -(-num_tokens // cache.page_size) - gone
    hot_pages = _hot_pages(num_tokens, cache, gone) if cache.warm.codec != "none" else pages
    kept = min(pages, _kept_pages(cache)) if cache.cold == "drop" else pages
    page = page_bytes(*_stored_dims(layer), cache, element_bytes)
    return Parts(
        codes=layer.num_kv_heads * max(0, kept - hot_pages) * page.coded,
        hot_copies=layer.num_kv_heads * min(kept, hot_pages) * page.hot,
        summaries=layer.num_kv_heads * kept * page.summary,
        tables=layer.num_kv_heads * kept * page.record,
        states=layer.state_elements * element_bytes,
    )


def _has_pages(layer: LayerGeometry) -> bool:
    return layer.kind in ("full", "sliding") and layer.kv_source is None


def _stored_dims(layer: LayerGeometry) -> tuple[int, int]:
    """Latent attention stores latent and rotary part as one key, and no value."""
    return (layer.k_dim + layer.v_dim, 0) if layer.latent else (layer.k_dim, layer.v_dim)


def _unseen_pages(layer: LayerGeometry, num_tokens: int, cache: CacheConfig) -> int:
    """Pages that a windowed layer gave back at the beginning of the step that wrote the last token."""
    if layer.window is None or num_tokens == 0:
        return 0
    return Window(layer.window, layer.chunked).first_visible(num_tokens - 1) // cache.page_size


def _hot_pages(num_tokens: int, cache: CacheConfig, gone: int) -> int:
    """Pages in full precision: the sinks, and all from the page that holds the oldest hot token on, less those gone."""
    pages = -(-num_tokens // cache.page_size)
    first_hot = max(gone, max(0, num_tokens - cache.hot_size) // cache.page_size)
    return min(pages - gone, max(0, min(cache.num_sink_pages, first_hot) - gone) + pages - first_hot)


def _kept_pages(cache: CacheConfig) -> int:
    """Pages that a dropping policy keeps at most per kv head; a threshold alone sets no such limit."""
    if cache.policy != "recent" and cache.warm_size is None:
        return 1 << 60
    return cache.num_sink_pages + cache.num_hot_pages + -(-(cache.warm_size or 0) // cache.page_size)
