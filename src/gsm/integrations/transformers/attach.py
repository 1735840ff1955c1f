"""Wrap a model, never edit it: a registered attention, two hooks, faster linear layers, and all put back at the end."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gsm.arch import ModelArch
from gsm.config import ConfigLike, GsmConfig, load_config
from gsm.core.view import AttentionSpec
from gsm.errors import AttachError
from gsm.integrations.transformers.cache import Cache, check_grading
from gsm.integrations.transformers.forward import CHUNKS_GO_ON, cache_kwarg
from gsm.integrations.transformers.latent import absorb_query, expand_output
from gsm.integrations.transformers.refusals import check_cache, check_call, check_kv_quantisation, check_model
from gsm.integrations.transformers.step import CURRENT_FORWARD, Forward
from gsm.linear import fast_linears

NAME = "gsm"  # our key in transformers' attention registry
# id of an attached config -> the attention it had: serves calls that carry no gsm cache
_BEFORE: dict[int, str] = {}
_GENERATE_FILE = inspect.getfile(inspect.unwrap(GenerationMixin.generate))
_GENERATION_SETTINGS = ("prefill_chunk_size", "cache_implementation")
_LOCK = threading.Lock()
_log = logging.getLogger("gsm")


@dataclass
class Attached:
    """Handle of an attached model. `cache` is the one the latest `generate` used, for its statistics."""

    model: PreTrainedModel
    config: GsmConfig
    cache: Cache | None = field(default=None)
    tokenizer: Any = None

    def new_cache(self) -> Cache:
        """An empty cache with the handle's config."""
        return Cache(self.model, self.config, self.tokenizer)


@contextmanager
def attach(model: PreTrainedModel, config: ConfigLike = None, *, tokenizer: Any = None) -> Iterator[Attached]:
    """Run `model` with the tiered cache inside the `with` block; the model is restored whatever happens.

    `model.generate(...)` works unchanged: the caches it makes itself are replaced by `gsm.Cache`. `tokenizer` is needed
    where the config grades thoughts (`reasoning.enabled`). Raises ConfigError,
    UnsupportedModel or AttachError before anything is touched.
    """
    settings = load_config(config)
    model = _uncompiled(model)
    arch = check_model(model)
    check_kv_quantisation(model, settings)
    check_grading(settings, tokenizer)
    _register()
    handle = Attached(model, settings, tokenizer=tokenizer)
    with _LOCK:  # two threads may attach the same model
        _refuse_twice(model)
        changes = _Changes(model)
        changes.make(handle, arch)
    try:
        with fast_linears(model, settings.linear.backend):
            yield handle
    finally:
        _cancel_interrupted()
        changes.undo()


class _Changes:
    """What `attach` changes in a model, and how it was before."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.implementations = [(c, c._attn_implementation) for c in _configs(model)]
        self.generation = model.generation_config
        self.generation_was = {name: getattr(self.generation, name, None) for name in _GENERATION_SETTINGS}
        self.compiled = getattr(model, "_compiled_call_impl", None)
        self.hooks: list[Any] = []

    def make(self, handle: Attached, arch: ModelArch) -> None:
        try:
            self.hooks = [
                self.model.register_forward_pre_hook(_Begin(handle), with_kwargs=True, prepend=True),
                self.model.register_forward_hook(_end, with_kwargs=True, always_call=True),
            ]
            for model_config, _ in self.implementations:
                _BEFORE[id(model_config)] = model_config._attn_implementation
                model_config._attn_implementation = NAME
            if self.compiled is not None:
                _log.warning("the model is compiled; inside gsm.attach it runs uncompiled, because pages change shape")
                self.model._compiled_call_impl = None
            if self.generation is not None:
                self._set_generation(handle.config, arch)
        except BaseException:
            self.undo()
            raise

    def _set_generation(self, config: GsmConfig, arch: ModelArch) -> None:
        """The prompt in chunks, and no cache of another kind because the checkpoint asks for one by default."""
        has_states = any(layer.kind == "linear" or layer.state_elements for layer in arch.layers)
        can_chunk = CHUNKS_GO_ON and not has_states  # not every state goes on from a chunk
        if self.generation.prefill_chunk_size is None and can_chunk:
            self.generation.prefill_chunk_size = config.cache.prefill_chunk_tokens
        if self.generation.cache_implementation not in (None, "quantized"):
            self.generation.cache_implementation = None

    def undo(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for model_config, implementation in self.implementations:
            model_config._attn_implementation = implementation
            _BEFORE.pop(id(model_config), None)
        for name, value in self.generation_was.items() if self.generation is not None else ():
            setattr(self.generation, name, value)
        if self.compiled is not None:
            self.model._compiled_call_impl = self.compiled


def _uncompiled(model: Any) -> Any:
    """The model inside `torch.compile(model)`: its `generate` calls the original anyway."""
    return getattr(model, "_orig_mod", model)


def _refuse_twice(model: PreTrainedModel) -> None:
    if any(c._attn_implementation == NAME for c in _configs(model)):
        raise AttachError(
            "the model is already attached; leave the other `with gsm.attach(...)` first, or pass "
            "gsm.Cache(model, other_config) to use another config inside it"
        )


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
        check_call(kwargs)
        rows, columns = _input_shape(args, kwargs)
        step = cache.begin(rows, columns, _padding(kwargs.get("attention_mask"), columns))
        CURRENT_FORWARD.set(Forward(cache, step, columns))
        cache.note_input(args[0] if args else kwargs.get("input_ids"))
        positions = (
            {"position_ids": cache.position_ids(rows, columns, self.handle.model.device)} if cache.is_endless else {}
        )
        return args, {**kwargs, keyword: cache, **positions}

    def _ours(self, cache: Any, use_cache: bool | None) -> Cache | None:
        if isinstance(cache, Cache):
            return cache
        if cache is None:
            wanted = use_cache if use_cache is not None else self.handle.model.config.use_cache
            return self.handle.new_cache() if wanted and not torch.is_grad_enabled() else None
        check_cache(cache)
        if not _is_made_by_generate(cache) or _has_tokens(cache):
            _say_unmanaged(type(cache).__name__)
            return None
        ours = self.handle.new_cache()
        if any(getattr(layer, "record_past", False) for layer in cache.layers):
            ours.activate_past_recording()
        return ours


@lru_cache(maxsize=8)
def _say_unmanaged(name: str) -> None:
    """Once for each kind of cache."""
    _log.warning("a %s was passed in, so this call runs without GSM; pass gsm.Cache(model) instead", name)


def _is_made_by_generate(cache: Any) -> bool:
    """Whether nobody but `generate` holds this cache, so that another may stand in for it.

    It marks the caches that users hand to it, but not its own, and a direct call of the model looks the same from here:
    only who called tells. Asked once per generation.
    """
    if type(cache) is not DynamicCache or getattr(cache, "_is_user_defined", False):
        return False
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_filename == _GENERATE_FILE:
            return True
    return False


def _has_tokens(cache: DynamicCache) -> bool:
    return any(getattr(layer, "is_initialized", False) for layer in cache.layers) and cache.get_seq_length() > 0


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
        output: tuple[Tensor, None] = _attention_before(module)(module, query, key, value, attention_mask, **kwargs)
        return output
    scale = kwargs.get("scaling")
    layer: int = module.layer_idx  # type: ignore[assignment]
    geometry = forward.cache.arch.layers[layer]
    spec = AttentionSpec(
        scale=scale if scale is not None else query.shape[-1] ** -0.5,
        softcap=kwargs.get("softcap"),
        # some families tell their window to the mask only
        window=None if geometry.chunked else geometry.window or kwargs.get("sliding_window"),
        sink_logits=kwargs.get("s_aux"),
        chunk=geometry.window if geometry.chunked else None,
    )
    latents = forward.step.latents.get(layer)
    if latents is not None:
        spec = replace(spec, value_dims=geometry.k_dim)
        out = forward.step.attend(layer, absorb_query(module, query, geometry), latents, latents[..., :0], spec)
        return expand_output(module, out, geometry, value.shape[-1]), None
    if geometry.kv_source is not None:  # this layer keeps nothing of its own
        layer = geometry.kv_source
    return forward.step.attend(layer, query, key, value, spec), None


def _mask(*args: Any, **kwargs: Any) -> Any:
    """No mask under a gsm step: padding is not stored, and causality follows from positions."""
    if CURRENT_FORWARD.get() is not None:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[_BEFORE.get(id(kwargs.get("config")), "sdpa")](*args, **kwargs)


def _attention_before(module: nn.Module) -> Callable[..., Any]:
    """What the layer called before `attach`. Eager attention is a function of the model's own file."""
    name = _BEFORE.get(id(module.config), "sdpa")
    if name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return ALL_ATTENTION_FUNCTIONS[name]
    eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return eager
