"""Wrap a model, never edit it: a registered attention, two hooks, and everything put back at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gsm.arch import describe
from gsm.config import ConfigLike, GsmConfig, load_config
from gsm.core.view import AttentionSpec
from gsm.errors import AttachError, UnsupportedModel
from gsm.integrations.transformers.cache import Cache
from gsm.integrations.transformers.forward import cache_kwarg
from gsm.integrations.transformers.step import CURRENT_FORWARD, Forward

NAME = "gsm"  # our key in transformers' attention registry
_FALLBACK = "sdpa"  # serves calls that carry no gsm cache


@dataclass
class Attached:
    """Handle of an attached model. `cache` is the one the latest `generate` used, for its statistics."""

    model: PreTrainedModel
    config: GsmConfig
    cache: Cache | None = field(default=None)

    def new_cache(self) -> Cache:
        """An empty cache with the handle's config."""
        return Cache(self.model, self.config)


@contextmanager
def attach(model: PreTrainedModel, config: ConfigLike = None) -> Iterator[Attached]:
    """Run `model` with the tiered cache inside the `with` block; the model is restored whatever happens.

    `model.generate(...)` works unchanged: the caches it makes itself are replaced by `gsm.Cache`. Raises ConfigError,
    UnsupportedModel or AttachError before anything is touched.
    """
    settings = load_config(config)
    _refuse(model)
    _register()
    handle = Attached(model, settings)
    implementations = [(c, c._attn_implementation) for c in _configs(model)]
    generation = model.generation_config
    chunk = generation.prefill_chunk_size if generation is not None else None
    hooks = [
        model.register_forward_pre_hook(_Begin(handle), with_kwargs=True, prepend=True),
        model.register_forward_hook(_end, with_kwargs=True, always_call=True),
    ]
    try:
        for model_config, _ in implementations:
            model_config._attn_implementation = NAME
        if generation is not None and chunk is None:
            generation.prefill_chunk_size = settings.cache.prefill_chunk_tokens
        yield handle
    finally:
        for hook in hooks:
            hook.remove()
        _cancel_interrupted()
        for model_config, implementation in implementations:
            model_config._attn_implementation = implementation
        if generation is not None:
            generation.prefill_chunk_size = chunk


def _refuse(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise AttachError(
            f"attach needs a transformers model, not {type(model).__name__}; load one with gsm.load_model"
        )
    if any(c._attn_implementation == NAME for c in _configs(model)):
        raise AttachError(
            "the model is already attached; leave the other `with gsm.attach(...)` first, or pass "
            "gsm.Cache(model, other_config) to use another config inside it"
        )
    arch = describe(model.config)
    if arch.support not in ("managed", "partly"):
        raise UnsupportedModel(f"{arch.model_type}: {arch.support_reason}")


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every distinct config object in the model, the outermost last, so that it is set after its parts."""
    found = {}
    for module in model.modules():
        model_config = getattr(module, "config", None)
        if hasattr(model_config, "_attn_implementation"):
            found[id(model_config)] = model_config
    return list(reversed(found.values()))


class _Begin:
    """Forward pre-hook: opens a step on the call's gsm cache, making one where `generate` made its own."""

    def __init__(self, handle: Attached) -> None:
        self.handle = handle
        self.keyword = cache_kwarg(handle.model)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _cancel_interrupted()
        keyword = next((name for name in ("past_key_values", "cache") if kwargs.get(name) is not None), self.keyword)
        cache = self._ours(kwargs.get(keyword), kwargs.get("use_cache"))
        if cache is None:
            return None
        self.handle.cache = cache
        _check_call(kwargs)
        rows, columns = _input_shape(args, kwargs)
        step = cache.begin(rows, columns, _padding(kwargs.get("attention_mask"), columns))
        CURRENT_FORWARD.set(Forward(cache, step, columns))
        positions = {"position_ids": cache.position_ids(rows, columns, module.device)} if cache.is_endless else {}
        return args, {**kwargs, keyword: cache, **positions}

    def _ours(self, cache: Any, use_cache: bool | None) -> Cache | None:
        if isinstance(cache, Cache):
            return cache
        if cache is None:
            wanted = use_cache if use_cache is not None else self.handle.model.config.use_cache
            return self.handle.new_cache() if wanted and not torch.is_grad_enabled() else None
        made_by_generate = type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False)
        return self.handle.new_cache() if made_by_generate and cache.get_seq_length() == 0 else None


def _end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Forward hook, called on success and on exceptions (then `output` is None)."""
    forward = CURRENT_FORWARD.get()
    if forward is None:
        return
    CURRENT_FORWARD.set(None)
    if output is None:
        forward.cache.cancel()
    else:
        forward.cache.end(forward.columns)


def _cancel_interrupted() -> None:
    """torch does not run hooks on KeyboardInterrupt; the next call (or the end of `attach`) cleans up instead."""
    forward = CURRENT_FORWARD.get()
    if forward is not None:
        CURRENT_FORWARD.set(None)
        forward.cache.cancel()


def _check_call(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise AttachError("output_attentions=True needs dense attention matrices; leave gsm.attach for that call")
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() != 2:
        raise AttachError(f"an attention mask with {mask.dim()} dimensions cannot be used with pages; pass a 2-D mask")


def _input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    ids = args[0] if args else kwargs.get("input_ids")
    tokens = ids if ids is not None else kwargs.get("inputs_embeds")
    if tokens is None:
        raise AttachError("the model was called without input_ids and inputs_embeds; pass one of them")
    return tokens.shape[0], tokens.shape[1]


def _padding(mask: Any, columns: int) -> Tensor | None:
    """The padding mask of the new columns, or None when all are real tokens."""
    if not isinstance(mask, Tensor) or bool(mask[:, -columns:].all()):
        return None
    return mask


def _register() -> None:
    """Make our attention known to transformers under its own name; other models are not affected."""
    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What every attention layer of an attached model calls: `query [rows, heads, length, dim]`."""
    forward = CURRENT_FORWARD.get()
    if forward is None:
        output: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[_FALLBACK](
            module, query, key, value, attention_mask, **kwargs
        )
        return output
    scale = kwargs.get("scaling")
    spec = AttentionSpec(
        scale=scale if scale is not None else query.shape[-1] ** -0.5,
        softcap=kwargs.get("softcap"),
        window=kwargs.get("sliding_window"),
        sink_logits=kwargs.get("s_aux"),
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    return forward.step.attend(layer, query, key, value, spec), None


def _mask(*args: Any, **kwargs: Any) -> Any:
    """No mask under a gsm step: padding is not stored, and causality follows from positions."""
    if CURRENT_FORWARD.get() is not None:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[_FALLBACK](*args, **kwargs)
