"""Bytes of one sequence's cache, plain and in tiers.

Plain is what transformers allocates: `ModelArch.kv_bytes`. Tiers are what `gsm.kv` allocates: per stream (layer, kv
head) a page has codes or a full-precision copy, a key summary, and a record with its table entry. The formulas are
held against both in tests.
"""

from __future__ import annotations

from gsm.arch import LayerGeometry, ModelArch
from gsm.config import CacheConfig
from gsm.core.codec import CODECS
from gsm.measure.plan.record import Parts

# One page: where its copies lie (4 + 4), its reference counts (2 + 4 + 4 on the free list), its table entry (4).
_RECORD_BYTES = 22
_UNIT_BYTES = 8  # reference count and free-list place of a unit of a pool
_SCALE_BYTES = 2


def tier_parts(arch: ModelArch, num_tokens: int, cache: CacheConfig, element_bytes: int) -> Parts:
    """The parts of one sequence of ``num_tokens`` tokens in GSM's pages; a layer without pages keeps its state."""
    parts = [_layer_parts(layer, num_tokens, cache, element_bytes) for layer in arch.layers]
    return Parts(**{name: sum(getattr(part, name) for part in parts) for name in Parts.model_fields})


def _layer_parts(layer: LayerGeometry, num_tokens: int, cache: CacheConfig, element_bytes: int) -> Parts:
    if layer.kind not in ("full", "sliding") or layer.kv_source is not None:
        return Parts(states=layer.kv_bytes(num_tokens, element_bytes))
    pages = -(-num_tokens // cache.page_size)
    hot_pages = _hot_pages(num_tokens, cache) if cache.warm.codec != "none" else pages
    kept = pages if cache.cold != "drop" or cache.policy == "keep_all" else min(pages, _kept_pages(cache))
    streams = layer.num_kv_heads
    page_elements = cache.page_size * (layer.k_dim + layer.v_dim)
    return Parts(
        codes=streams * max(0, kept - hot_pages) * (coded_page_bytes(layer, cache, element_bytes) + _UNIT_BYTES),
        hot_copies=streams * min(kept, hot_pages) * (page_elements * element_bytes + _UNIT_BYTES),
        summaries=streams * kept * summary_bytes(layer),
        tables=streams * kept * _RECORD_BYTES,
        states=layer.state_elements * element_bytes,
    )


def coded_page_bytes(layer: LayerGeometry, cache: CacheConfig, element_bytes: int) -> int:
    """Bytes of one page's codes and scales."""
    page, k, v = cache.page_size, layer.k_dim, layer.v_dim
    if cache.warm.codec == "none":
        return page * (k + v) * element_bytes
    # the element type of codes does not depend on the model's dtype, so any will do
    import torch

    total = 0
    for shape, dtype in CODECS[cache.warm.codec].fields(page, k, v, torch.float32).values():
        elements = 1
        for size in shape:
            elements *= size
        total += elements * dtype.itemsize
    return total


def summary_bytes(layer: LayerGeometry) -> int:
    """Centre and spread of a page's keys in int8, with a scale each."""
    return 2 * (layer.k_dim + _SCALE_BYTES)


def attended_bytes(arch: ModelArch, num_tokens: int, cache: CacheConfig, element_bytes: int) -> tuple[int, float]:
    """(tokens attended per kv head, KV bytes read) by one sparse decode step at a context of ``num_tokens``."""
    attended = min(num_tokens, cache.sparse.budget_for(num_tokens)) if cache.sparse.enabled else num_tokens
    total = 0.0
    for layer in arch.layers:
        if layer.kind not in ("full", "sliding"):
            total += layer.kv_bytes(num_tokens, element_bytes)
            continue
        tokens = attended if layer.window is None else min(attended, layer.window)
        # a selected page may lie in the hot zone too; for a bound it is taken as coded
        hot_tokens = cache.recent_tokens if attended < num_tokens else cache.hot_size
        hot = min(tokens, hot_tokens + cache.sink_tokens)
        coded = coded_page_bytes(layer, cache, element_bytes) / cache.page_size
        scored = num_tokens / cache.page_size * summary_bytes(layer) if attended < num_tokens else 0
        plain = (layer.k_dim + layer.v_dim) * element_bytes
        total += layer.num_kv_heads * (hot * plain + (tokens - hot) * coded + scored)
    return attended, total


def _hot_pages(num_tokens: int, cache: CacheConfig) -> int:
    """Pages in full precision: the sinks, and all from the page that holds the oldest hot token on."""
    pages = -(-num_tokens // cache.page_size)
    first_hot = max(0, num_tokens - cache.hot_size) // cache.page_size
    return min(pages, min(cache.num_sink_pages, first_hot) + pages - first_hot)


def _kept_pages(cache: CacheConfig) -> int:
    """Pages that a dropping policy keeps at most per kv head."""
    warm = cache.warm_size or 0
    return cache.num_sink_pages + cache.num_hot_pages + -(-warm // cache.page_size)
