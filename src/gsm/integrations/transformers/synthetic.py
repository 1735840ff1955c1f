"""Fill a cache with random numbers: what a step costs depends on the cache's length, not on what it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from gsm.integrations.transformers.cache import Cache
from gsm.integrations.transformers.forward import cache_kwarg

_CHUNK_TOKENS = 1024
KVOfToken = dict[int, tuple[Tensor, Tensor]]  # layer -> K and V [rows, heads, 1, dim] of one token


@torch.inference_mode()
def fill_with_noise(cache: Any, kv: KVOfToken, num_tokens: int) -> None:
    """Append ``num_tokens`` of normally distributed K and V to every layer of ``cache``, in no time to speak of.

    ``cache`` is an empty `gsm.Cache` (its model attached) or DynamicCache; ``kv`` comes from `observe_kv` and decides
    shapes, dtypes and the number of rows. For measuring speed only.
    """
    first = next(iter(kv.values()))[0]
    generator = torch.Generator(device=first.device).manual_seed(0)
    for start in range(0, num_tokens, _CHUNK_TOKENS):
        length = min(_CHUNK_TOKENS, num_tokens - start)
        if isinstance(cache, Cache):
            cache.begin(first.shape[0], length, None)
        for layer, (k, v) in kv.items():
            cache.update(_noise(k, length, generator), _noise(v, length, generator), layer)
        if isinstance(cache, Cache):
            cache.end(length)


@torch.inference_mode()
def observe_kv(model: PreTrainedModel, num_rows: int = 1) -> KVOfToken:
    """What every layer of ``model``, not attached, hands to its cache for one token."""
    seen: KVOfToken = {}
    cache = DynamicCache(config=model.config)
    update = cache.update

    def watch(k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        seen[layer_idx] = (k, v)
        return update(k, v, layer_idx, *args, **kwargs)

    cache.update = watch  # type: ignore[method-assign, assignment]
    ids = torch.ones(num_rows, 1, dtype=torch.long, device=model.device)
    arguments: dict[str, Any] = {cache_kwarg(model): cache}
    model(input_ids=ids, use_cache=True, **arguments)
    return seen


def _noise(like: Tensor, length: int, generator: torch.Generator) -> Tensor:
    shape = (*like.shape[:-2], length, like.shape[-1])
    return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype)
