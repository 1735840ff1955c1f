"""Models and calls that cannot be served: each with one sentence that says what, and what to do instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache

from gsm.arch import ModelArch, describe
from gsm.config import GsmConfig
from gsm.errors import AttachError, UnsupportedModel

# what `generate(cache_implementation=...)` builds, and why it cannot be combined with pages
_QUANTISED = (
    "{what} quantises the KV cache already, and quantising it twice loses accuracy for nothing; drop it and let GSM's "
    "warm pages do it (cache.warm.codec: int8 or int4), or leave gsm.attach for that call"
)
_STATIC = (
    "{what} reserves the whole cache beforehand, but GSM keeps its own pages; drop it (GSM's memory is bounded by "
    "cache.warm_size with cold: drop), or leave gsm.attach for that call"
)
_OFFLOADED = (
    "{what} moves the whole cache to the host in every step; drop it (warm pages are smaller), or leave gsm.attach"
)


def check_model(model: Any) -> ModelArch:
    """The architecture of a model that can be attached. Raises AttachError or UnsupportedModel."""
    if not isinstance(model, PreTrainedModel):
        raise AttachError(
            f"attach needs a transformers model, not {type(model).__name__}; load one with gsm.load_model"
        )
    arch = describe(model.config)
    if arch.support == "not_worth_it":
        helps = f"; this helps: {'; '.join(arch.helps_instead)}" if arch.helps_instead else ""
        raise UnsupportedModel(
            f"{arch.model_type}: KV tiering is not worth it here, because {arch.support_reason}{helps}"
        )
    if arch.support == "refused":
        raise UnsupportedModel(f"{arch.model_type}: {arch.support_reason}; run this model without GSM")
    return arch


def check_kv_quantisation(model: PreTrainedModel, config: GsmConfig) -> None:
    """Refuse to code pages of a checkpoint whose KV is quantised by design. Raises AttachError."""
    quantisation = getattr(model.config, "quantization_config", None)
    scheme = quantisation.get("kv_cache_scheme") if isinstance(quantisation, dict) else None
    scheme = scheme or getattr(quantisation, "kv_cache_scheme", None)
    if scheme and config.cache.warm.codec != "none":
        raise AttachError(
            f"the checkpoint quantises its KV itself (kv_cache_scheme: {_short(scheme)}), and a second codec "
            f"({config.cache.warm.codec}) loses accuracy for nothing; set cache.warm.codec: none (eviction and sparse "
            "reading still work)"
        )


def check_call(kwargs: dict[str, Any]) -> None:
    """Refuse what pages cannot give. Raises AttachError."""
    if kwargs.get("output_attentions"):
        raise AttachError("output_attentions=True needs dense attention matrices; leave gsm.attach for that call")
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() != 2:
        raise AttachError(f"an attention mask with {mask.dim()} dimensions cannot be used with pages; pass a 2-D mask")


def check_cache(cache: TransformersCache) -> None:
    """Refuse caches that promise something GSM would silently not keep. Raises AttachError."""
    what = f"the {type(cache).__name__} of this call"
    if isinstance(cache, QuantizedCache):
        raise AttachError(_QUANTISED.format(what=what))
    if isinstance(cache, StaticCache):
        raise AttachError(_STATIC.format(what=what))
    if isinstance(cache, EncoderDecoderCache):
        raise AttachError(f"{what} belongs to an encoder-decoder; GSM manages decoder-only models")
    if isinstance(cache, DynamicCache) and getattr(cache, "offloading", False):
        raise AttachError(_OFFLOADED.format(what=what))


def _short(scheme: Any) -> str:
    if not isinstance(scheme, dict):
        return str(scheme)
    return " ".join(str(scheme[name]) for name in ("num_bits", "type") if name in scheme) or "set"
