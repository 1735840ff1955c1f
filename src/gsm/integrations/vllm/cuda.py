"""Page selection in front of FlashAttention and Triton attention. The same mixins as on a CPU.

FlashAttention's ahead-of-time schedule is left out for the selected rows: it is planned for one table, and every layer
has its own. CUDA graphs cover everything but attention while GSM is configured.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from gsm.integrations.vllm.attention import BuilderMixin, ImplMixin
from gsm.integrations.vllm.kv import customize_spec
from gsm.integrations.vllm.pages import KeyReader, read_plain_keys


def _key_reader(impl: Any, layer: Any) -> KeyReader:
    if not is_quantized_kv_cache(impl.kv_cache_dtype):
        return read_plain_keys
    kind: torch.dtype = current_platform.fp8_dtype()
    return lambda cache, blocks: read_plain_keys(cache, blocks).view(kind).float() * layer._k_scale


class GsmFlashAttentionMetadataBuilder(BuilderMixin, FlashAttentionMetadataBuilder):
    """`FlashAttentionMetadataBuilder` whose metadata carries a `Step`."""

    supports_update_block_table = False

    def make_per_head(self) -> Any:
        builder = copy.copy(self)
        builder.num_heads_q, builder.num_heads_kv = self.num_heads_q // self.num_heads_kv, 1
        return builder


class GsmFlashAttentionImpl(ImplMixin, FlashAttentionImpl):
    """`FlashAttentionImpl` that selects pages for decode rows."""

    stock = FlashAttentionImpl

    def key_reader(self, layer: Any, cache: Tensor) -> KeyReader:
        return _key_reader(self, layer)


class GsmFlashAttentionBackend(FlashAttentionBackend):
    """Takes the place of `FLASH_ATTN`; without a GSM config it does what that does."""

    customize_spec = classmethod(customize_spec)

    @staticmethod
    def get_impl_cls() -> type:
        return GsmFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        return GsmFlashAttentionMetadataBuilder


class GsmTritonAttentionMetadataBuilder(BuilderMixin, TritonAttentionMetadataBuilder):
    """`TritonAttentionMetadataBuilder` whose metadata carries a `Step`."""

    supports_draft_decode_metadata_update = False

    def make_per_head(self) -> Any:
        """One kv head: as many requests as before share the scratch of split softmax, each with fewer query heads."""
        builder = copy.copy(self)
        heads = self.num_heads_q // self.num_heads_kv
        builder.num_heads_q, builder.num_heads_kv = heads, 1
        for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"):
            scratch = getattr(self, name)
            setattr(builder, name, scratch[:, :heads].contiguous())
        return builder


class GsmTritonAttentionImpl(ImplMixin, TritonAttentionImpl):
    """`TritonAttentionImpl` that selects pages for decode rows."""

    stock = TritonAttentionImpl

    def key_reader(self, layer: Any, cache: Tensor) -> KeyReader:
        return _key_reader(self, layer)


class GsmTritonAttentionBackend(TritonAttentionBackend):
    """Takes the place of `TRITON_ATTN`; without a GSM config it does what that does."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return customize_spec(cls, super().customize_spec(spec))

    @staticmethod
    def get_impl_cls() -> type:
        return GsmTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        return GsmTritonAttentionMetadataBuilder
