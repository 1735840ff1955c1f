"""From the configuration's word (`cache.backend`) to a decode back end; kernels are imported when asked for."""

from __future__ import annotations

import torch

from gsm.attention.base import DecodeAttention
from gsm.errors import ConfigError


def make_attention(name: str, device: torch.device) -> DecodeAttention:
    """`auto` takes the fastest back end that serves `device`. Raises ConfigError for one that cannot."""
    if name == "reference":
        from gsm.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name in ("auto", "torch"):
        from gsm.attention.torch_ops import TorchAttention

        return TorchAttention()
    raise ConfigError(f"cache.backend '{name}' is not available here; use auto, torch or reference")
