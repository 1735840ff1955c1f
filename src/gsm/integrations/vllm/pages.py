"""vLLM's KV cache seen as pages of single kv heads.

A layer's cache is `[blocks, kv_heads, block_size, 2 * head_dim]`, in whatever memory order the back end prefers. A page
of one head is addressed by an offset in units that divide the strides of both blocks and heads, so every kernel that
takes a block table of one head reads single heads in place, head-major and token-major caches alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KeyReader = Callable[[Tensor, Tensor], Tensor]
"""(cache, block ids `[N]`) -> keys `[N, kv_heads, block_size, head_dim]`, in any dtype but fp8."""


@dataclass(frozen=True, slots=True)
class HeadPages:
    """`cache` as `[pages, 1, block_size, 2 * head_dim]`; page `block * per_block + head * per_head` is one head's."""

    cache: Tensor
    per_block: int
    per_head: int

    def ids(self, blocks: Tensor) -> Tensor:
        """Page ids of `blocks [..., H, S]`, one row for each kv head; int32 as kernels want them."""
        head = torch.arange(blocks.shape[-2], device=blocks.device, dtype=blocks.dtype).unsqueeze(-1)
        return (blocks * self.per_block + head * self.per_head).to(torch.int32)


def head_pages(cache: Tensor) -> HeadPages:
    """The view of `cache [blocks, kv_heads, block_size, 2 * head_dim]`; no copy. Pages of the view may overlap."""
    num_blocks, num_heads, block_size, width = cache.shape
    block_stride, head_stride, token_stride, _ = cache.stride()
    unit = math.gcd(block_stride, head_stride) if num_heads > 1 else block_stride
    per_block, per_head = block_stride // unit, (head_stride // unit if num_heads > 1 else 0)
    pages = (num_blocks - 1) * per_block + (num_heads - 1) * per_head + 1
    view = cache.as_strided((pages, 1, block_size, width), (unit, width, token_stride, 1))
    return HeadPages(view, per_block, per_head)


def read_plain_keys(cache: Tensor, blocks: Tensor) -> Tensor:
    """Keys of a cache whose rows are (K | V) of one token: FlashAttention's and Triton's."""
    return cache[blocks][..., : cache.shape[-1] // 2]


class ScrambledKeys:
    """Reads keys from a cache whose kernel keeps them in an order of its own.

    The order is found by writing numbers through the kernel's own store operation into one empty block, digit by digit
    so that they survive any dtype. It is the same for every block and head.
    """

    DIGITS = 8  # exact in bfloat16 and both fp8 formats

    def __init__(self, write: Callable[[Tensor], Tensor], block_size: int, head_dim: int) -> None:
        """`write(keys [block_size, 1, head_dim])` -> what the cache holds of them, flat `[block_size * head_dim]`."""
        size = block_size * head_dim
        number = torch.arange(size)
        found = torch.zeros(size, dtype=torch.long)
        scale = 1
        while scale < size:
            digit = (number // scale % self.DIGITS).float().view(block_size, 1, head_dim)
            found += write(digit).round().long() * scale
            scale *= self.DIGITS
        if not torch.equal(found.sort().values, number):
            raise ValueError("a block of the cache does not hold every key exactly once")
        self.order = found.argsort()  # element of the flat block in which number i lies
        self.shape = (block_size, head_dim)

    def __call__(self, cache: Tensor, blocks: Tensor) -> Tensor:
        num_heads = cache.shape[1]
        flat = cache[blocks].reshape(len(blocks), num_heads, -1)[..., : self.order.numel()]
        return flat[..., self.order].view(len(blocks), num_heads, *self.shape)
