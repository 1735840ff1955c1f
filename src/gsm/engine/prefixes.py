"""What a page's content depends on: the fingerprint that prefix pages are kept under, and when they are not kept."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from gsm.config import GsmConfig
from gsm.errors import ConfigError
from gsm.kv.prefix import PrefixIndex
from gsm.kv.prefix_disk import PrefixDisk

if TYPE_CHECKING:
    from gsm.engine.engine import Engine

_log = logging.getLogger("gsm")
_SAMPLES = 256  # values of each weight that are hashed beside its sum


def make_prefix_index(engine: Engine, is_windowed: bool, prefix_dir: str | Path | None) -> PrefixIndex | None:
    """The index of an engine, or None where its first config rules it out (`Epochs` makes one when a later config does
    not). Raises ConfigError for an impossible directory."""
    limits, reason = engine.config.engine, why_not(engine, engine.config, is_windowed)
    if not limits.prefix_cache or reason is not None:
        if prefix_dir is not None:
            raise ConfigError(f"a prefix directory needs prefix reuse: {reason or 'engine.prefix_cache is off'}")
        if reason is not None:
            _log.info("no prefix reuse: %s", reason)
        return None
    fingerprint = content_fingerprint(engine.weights, engine.config)
    disk = None
    if prefix_dir is not None:
        disk = PrefixDisk(engine.manager, Path(prefix_dir), fingerprint, int(limits.prefix_disk_mib * 2**20))
    return PrefixIndex(engine.manager, fingerprint, disk)


def why_not(engine: Engine, config: GsmConfig, is_windowed: bool) -> str | None:
    """The reason why requests of a config cannot share pages, or None."""
    cache = config.cache
    if cache.positions == "compact":
        return "compacted positions turn keys, which another request may still need as they were"
    if is_windowed:
        return "window smoothing keeps state per request that pages do not hold"
    if cache.cold != "keep":
        return f"cache.cold is {cache.cold}: what one request does to a page would change another's answer"
    if not engine.runner.packable and not engine.loaded.arch.packable:
        return f"{engine.loaded.arch.packable_reason}"
    if any(layer.window for layer in engine.loaded.arch.layers):
        return "layers with a sliding window give back the pages a later request would need"
    return None


def content_fingerprint(weights: bytes, config: GsmConfig) -> str:
    """A digest of everything that changes the keys and values of a page: weights (`weights_digest`) and the settings
    that compute and store them. Settings that act on decoding alone (budgets, limits) are not part of it."""
    cache, smoothing = config.cache, config.smoothing
    settings = {
        "page_size": cache.page_size,
        "codec": cache.warm.codec,
        "hot_size": cache.hot_size,
        "sink_tokens": cache.sink_tokens,
        "chunk_tokens": config.engine.chunk_tokens,
        "scorer": cache.sparse.scorer,  # of the summaries that are kept with a page
        "smoothing": smoothing.model_dump(mode="json") if smoothing.active else None,
    }
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    digest.update(weights)
    return digest.hexdigest()


@torch.inference_mode()
def weights_digest(model: PreTrainedModel) -> bytes:
    """Names, shapes, exact sums of the bits and samples of every weight and buffer: a second for gigabytes.

    Integer sums do not depend on the order or number of threads, so the digest survives a restart.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if flat.numel() == 0:
            continue
        step = max(1, flat.numel() // _SAMPLES)
        samples = flat[::step].contiguous().cpu()
        digest.update(samples.view(torch.uint8).numpy().tobytes())
        digest.update(str(_bit_sum(flat)).encode())
    return digest.digest()


def _bit_sum(flat: torch.Tensor) -> int:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers.get(flat.element_size())
    if kind is None or flat.is_complex():
        return 0
    return int(flat.contiguous().view(kind).sum(dtype=torch.int64))
