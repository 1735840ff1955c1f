"""Decoder attention for people who build their own models: a plain `torch.nn.Module`, a valid-token index, a GSM cache.

    attention = gsm.nn.DecoderAttention(512, num_heads=8, num_kv_heads=2, rope_theta=10000.0)
    y = attention(x)                                   # training: causal self attention
    y = cross(x, memory=cross.project(encoder_out))    # cross attention, K and V projected once

Names are imported on first use: `KVCache` needs the paged store, the rest only torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "DecoderAttention": "gsm.nn.decoder_attention",
    "KVCache": "gsm.nn.cache",
    "Memory": "gsm.nn.decoder_attention",
    "apply_rope": "gsm.nn.rope",
    "attend_index": "gsm.nn.index",
    "best_tokens": "gsm.nn.index",
    "check_index": "gsm.nn.index",
    "rope_frequencies": "gsm.nn.rope",
}

__all__ = [
    "DecoderAttention",
    "KVCache",
    "Memory",
    "apply_rope",
    "attend_index",
    "best_tokens",
    "check_index",
    "rope_frequencies",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'gsm.nn' has no attribute {name!r}")
