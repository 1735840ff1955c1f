"""From the configuration's word (`cache.backend`) to a decode back end; kernels are imported when asked for."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache

import torch

from gsm.attention.base import DecodeAttention
from gsm.errors import ConfigError

_log = logging.getLogger("gsm")


@lru_cache(maxsize=16)
def make_attention(name: str, device: torch.device) -> DecodeAttention:
    """The back end of that name; `auto` is the fastest that serves `device`. Raises ConfigError for one that cannot."""
    if name == "auto":
        name = "numba" if device.type == "cpu" and _numba_works() else "torch"
    if name == "reference":
        from gsm.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "numba":
        return _numba(device)
    from gsm.attention.torch_ops import TorchAttention

    return TorchAttention()


def _numba(device: torch.device) -> DecodeAttention:
    if device.type != "cpu":
        raise ConfigError(f"cache.backend 'numba' runs on a CPU, not on {device}; use auto or torch")
    if not _numba_works():
        raise ConfigError("cache.backend 'numba' needs the package numba; pip install 'gsm-infer[cpu]' or use auto")
    from gsm.attention.numba_cpu import NumbaAttention

    return NumbaAttention()


@lru_cache(maxsize=1)
def _numba_works() -> bool:
    """Whether numba is installed; says so once where it is not, because decoding is several times slower then."""
    if importlib.util.find_spec("numba") is not None:
        return True
    _log.warning("numba is not installed: decode attention uses torch operations; pip install 'gsm-infer[cpu]'")
    return False
