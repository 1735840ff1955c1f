"""From a config to one `LayerGeometry` per layer; one small reader per cache layout.

A reader gets the text config and the per-layer configs (which differ where, as in Gemma 4, global layers have other
head sizes) and never touches weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gsm.arch.families import LAYER_KINDS
from gsm.arch.geometry import LayerGeometry
from gsm.arch.states import state_elements
from gsm.errors import UnsupportedModel

Reader = Callable[[Any, Sequence[Any]], tuple[LayerGeometry, ...]]


def read_standard(config: Any, layers: Sequence[Any]) -> tuple[LayerGeometry, ...]:
    """Full, sliding, linear and mixed decoders; multi-head latent attention where the config has ``kv_lora_rank``."""
    types = layer_types(config, layers)
    sources = _kv_sources(config, types)
    return tuple(_standard_layer(layers[i], types[i], sources[i]) for i in range(len(layers)))


def read_state_only(config: Any, layers: Sequence[Any]) -> tuple[LayerGeometry, ...]:
    """Mamba, RWKV, xLSTM: no attention anywhere."""
    return tuple(LayerGeometry("linear", state_elements=state_elements(layer)) for layer in layers)


def read_deepseek_v4(config: Any, layers: Sequence[Any]) -> tuple[LayerGeometry, ...]:
    """DeepSeek V4: a 128-token raw window per layer plus one entry per 4 (with indexer) or 128 tokens.

    Keys serve as values. Source: transformers' DeepseekV4HCACache and DeepseekV4CSACache.
    """
    rates = config.compress_rates
    geometry = []
    for layer_type in config.layer_types:
        if LAYER_KINDS.get(layer_type) == "compressed":
            index_dim = config.index_head_dim if layer_type == "compressed_sparse_attention" else 0
            extra = {"compress_rate": int(rates[layer_type]), "index_dim": index_dim}
            geometry.append(_shared_kv_layer(config, "compressed", **extra))
        else:
            geometry.append(_shared_kv_layer(config, "sliding"))
    return tuple(geometry)


def read_deepseek_v41(config: Any, layers: Sequence[Any]) -> tuple[LayerGeometry, ...]:
    """DeepSeek V4.1: four layers own a compressed cache that the others read; every layer keeps a raw window.

    One entry is head_dim FP4 numbers with an 8-bit scale per 16 of them, plus an indexer key of FP4 numbers with a
    scale per 32: 288 + 68 bytes. Rates 2, 2, 2, 1 of the owners give 2.5 entries, 890 bytes, per token.
    Source: the V4.1-Flash report ("890 bytes per token") and its config defaults.
    """
    n = len(layers)
    default_rates, default_owners = _v41_defaults(n)
    rates = getattr(config, "compress_ratios", None) or default_rates
    owners = getattr(config, "kv_source_layer_ids", None) or default_owners
    head_dim, index_dim = config.head_dim, config.index_head_dim
    entry_bytes = head_dim / 2 + head_dim / 16 + index_dim / 2 + index_dim / 32
    geometry = []
    for i in range(n):
        if not rates[i]:
            geometry.append(_shared_kv_layer(config, "sliding"))
            continue
        owner = max((o for o in owners if o <= i), default=None)
        if owner == i:
            extra: dict[str, Any] = {"index_dim": index_dim, "native_entry_bytes": entry_bytes}
            geometry.append(_shared_kv_layer(config, "compressed", compress_rate=int(rates[i]), **extra))
        else:  # its own raw window, and the owner's compressed entries
            geometry.append(_shared_kv_layer(config, "sliding"))
    return tuple(geometry)


READERS: dict[str, Reader] = {
    "standard": read_standard,
    "state_only": read_state_only,
    "deepseek_v4": read_deepseek_v4,
    "deepseek_v41": read_deepseek_v41,
}


def layer_types(config: Any, layers: Sequence[Any]) -> list[str]:
    """transformers' layer type of every layer, inferred as its cache does it where the config does not say."""
    declared = getattr(config, "layer_types", None)
    if declared is None:
        return [_infer_type(config, layer) for layer in layers]
    types = list(declared)[: len(layers)]
    unknown = sorted({t for t in types if t not in LAYER_KINDS})
    if unknown:
        raise UnsupportedModel(
            f"{config.model_type} has layers of type {unknown[0]!r}, whose cache GSM does not know; "
            "run this model without GSM"
        )
    if len(types) != len(layers):
        raise UnsupportedModel(
            f"the config lists {len(types)} layer_types for {len(layers)} layers; correct the config"
        )
    return types


def _infer_type(config: Any, layer: Any) -> str:
    if getattr(layer, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return "sliding_attention"
    if getattr(layer, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    return "full_attention"


def _kv_sources(config: Any, types: Sequence[str]) -> list[int | None]:
    """Gemma 3n and 4: the last layers read the cache of the last earlier layer of their own type."""
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    first = len(types) - shared
    sources: list[int | None] = [None] * len(types)
    for i in range(first, len(types)):
        sources[i] = max((j for j in range(first) if types[j] == types[i]), default=None)
    return sources


def _standard_layer(layer: Any, layer_type: str, source: int | None) -> LayerGeometry:
    kind = LAYER_KINDS[layer_type]
    if kind == "none":
        return LayerGeometry("none")
    state = state_elements(layer) if kind == "linear" or layer_type.startswith("hybrid") else 0
    if kind == "linear":
        return LayerGeometry("linear", state_elements=state)
    heads, kv_heads, k_dim, v_dim = _heads(layer)
    return LayerGeometry(
        kind,
        kv_heads,
        heads,
        k_dim,
        v_dim,
        window=_window(layer, layer_type) if kind == "sliding" else None,
        kv_source=source,
        index_dim=layer.index_head_dim if kind == "compressed" else 0,
        state_elements=state,
        chunked=layer_type == "chunked_attention",
        latent=bool(getattr(layer, "kv_lora_rank", None)),
    )


def _heads(layer: Any) -> tuple[int, int, int, int]:
    """(query heads, kv heads, k_dim, v_dim) as cached."""
    heads = layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None):  # latent attention caches one latent and its rotary part
        return heads, 1, layer.kv_lora_rank, layer.qk_rope_head_dim
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return heads, _num_kv_heads(layer), head_dim, getattr(layer, "v_head_dim", None) or head_dim


def _num_kv_heads(layer: Any) -> int:
    if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        value = getattr(layer, name, None)
        if value:
            return int(value)
    return int(layer.num_attention_heads)


def _window(layer: Any, layer_type: str) -> int:
    name = "attention_chunk_size" if layer_type == "chunked_attention" else "sliding_window"
    window = getattr(layer, name, None)
    if not window:
        raise UnsupportedModel(f"the config has {layer_type} layers but no {name}; correct the config")
    return int(window)


def _shared_kv_layer(config: Any, kind: Any, **extra: Any) -> LayerGeometry:
    heads = config.num_attention_heads
    return LayerGeometry(kind, 1, heads, config.head_dim, 0, window=config.sliding_window, **extra)


def _v41_defaults(num_layers: int) -> tuple[list[int], list[int]]:
    """(rate per layer, owners of a compressed cache) as the family's config derives them."""
    if num_layers == 40:  # as released
        return [0, 0] + [2] * 18 + [1] * 20, [2, 8, 14, 20]
    windows = min(2, num_layers)
    encoder = (num_layers - windows + 1) // 2
    rates = [0] * windows + [2] * encoder + [1] * (num_layers - windows - encoder)
    return rates, [i for i, rate in enumerate(rates) if rate and (i == 0 or rates[i - 1] != rate)]
