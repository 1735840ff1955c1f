"""Page selection in front of vLLM's CPU attention."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from gsm.integrations.vllm.attention import BuilderMixin, ImplMixin
from gsm.integrations.vllm.kv import customize_spec
from gsm.integrations.vllm.pages import KeyReader, ScrambledKeys


class GsmCPUAttentionMetadataBuilder(BuilderMixin, CPUAttentionMetadataBuilder):
    """`CPUAttentionMetadataBuilder` whose metadata carries a `Step`."""

    def make_per_head(self) -> Any:
        builder = copy.copy(self)
        builder.num_heads, builder.num_kv_heads = self.num_heads // self.num_kv_heads, 1
        return builder


class GsmCPUAttentionImpl(ImplMixin, CPUAttentionBackendImpl):
    """`CPUAttentionBackendImpl` that selects pages for decode rows."""

    stock = CPUAttentionBackendImpl

    def key_reader(self, layer: Any, cache: Tensor) -> KeyReader:
        block_size, width = cache.shape[2:]
        order = _order(layer.isa, self.kv_cache_dtype, cache.dtype, block_size, width // 2)
        if not self.is_fp8_kv_cache:
            return order
        kind = torch.float8_e5m2 if "e5m2" in self.kv_cache_dtype else torch.float8_e4m3fn
        return lambda kv, blocks: order(kv, blocks).view(kind).float() * layer._k_scale_float


class GsmCPUAttentionBackend(CPUAttentionBackend):
    """Takes the place of `CPU_ATTN`; without a GSM config it does what that does."""

    customize_spec = classmethod(customize_spec)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of 16 too: the kernel has code for them, and smaller pages are chosen better."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type:
        return GsmCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        return GsmCPUAttentionMetadataBuilder


@lru_cache(maxsize=8)
def _order(isa: str, kv_cache_dtype: str, dtype: torch.dtype, block_size: int, head_dim: int) -> ScrambledKeys:
    """The order in which the kernel for `isa` keeps keys."""
    is_fp8 = dtype == torch.uint8 or "fp8" in kv_cache_dtype

    def write(keys: Tensor) -> Tensor:
        compute = torch.bfloat16 if is_fp8 else dtype
        cache = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=dtype)
        halves = cache.chunk(2, dim=2)
        tokens = keys.to(compute)
        slots = torch.arange(block_size)
        ops.cpu_attn_reshape_and_cache(
            tokens, torch.zeros_like(tokens), *halves, slots, isa, 1.0, 1.0, kv_cache_dtype=kv_cache_dtype
        )
        flat = halves[0].flatten()
        if not is_fp8:
            return flat.float()
        return flat.view(torch.float8_e5m2 if "e5m2" in kv_cache_dtype else torch.float8_e4m3fn).float()

    return ScrambledKeys(write, block_size, head_dim)
