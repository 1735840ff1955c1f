"""A decoder's attention as one module: self and cross attention, grouped heads, rotary positions, index, cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.errors import ConfigError, InputError
from gsm.nn.index import attend_index, masked_sdpa
from gsm.nn.rope import apply_rope, rope_frequencies

if TYPE_CHECKING:
    from gsm.nn.cache import CacheStep

Chooser = Callable[[Tensor, Tensor], Tensor]  # (query [B, Hq, T, d], keys [B, H, N, d]) -> index


class Memory(NamedTuple):
    """Keys `[B, H, N, head_dim]` and values of what cross attention reads: projected once, used at every step."""

    k: Tensor
    v: Tensor


class DecoderAttention(nn.Module):
    """Multi-head (`num_kv_heads = num_heads`), grouped-query or multi-query (`num_kv_heads = 1`) attention.

    Inputs are `[batch, tokens, embed_dim]`. A module serves one role: self attention (no `memory`), causal unless told
    otherwise, or cross attention (`memory`, of `memory_dim` channels). Rotary positions (`rope_theta`, on the first
    `rotary_dim` channels of each head) belong to self attention. `layer_idx` names the module in a `gsm.nn.KVCache`.

    Equal to `torch.nn.MultiheadAttention` with the same weights (`from_multihead`) and to
    `F.scaled_dot_product_attention`. Compiles as a whole (`fullgraph=True`) except for calls that pass `cache`, whose
    page tables live outside the graph. Raises ConfigError or InputError.
    """

    rope: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        memory_dim: int | None = None,
        rope_theta: float | None = None,
        rotary_dim: int | None = None,
        causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        layer_idx: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_sizes(embed_dim, num_heads, num_kv_heads, head_dim, dropout)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = head_dim or embed_dim // num_heads
        self.causal, self.dropout, self.layer_idx = causal, dropout, layer_idx
        self.is_cross = memory_dim is not None
        if self.is_cross and rope_theta is not None:
            raise ConfigError("rope_theta has no meaning between two sequences; leave it out for cross attention")
        source, width = memory_dim or embed_dim, num_kv_heads * self.head_dim
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, **made)
        self.k_proj = nn.Linear(source, width, **made)
        self.v_proj = nn.Linear(source, width, **made)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, **made)
        frequencies = None
        if rope_theta is not None:
            frequencies = rope_frequencies(_rotary_dim(rotary_dim, self.head_dim), rope_theta).to(device)
        self.register_buffer("rope", frequencies, persistent=False)

    @classmethod
    def from_multihead(cls, other: nn.MultiheadAttention, *, causal: bool = True) -> DecoderAttention:
        """The same function as a `torch.nn.MultiheadAttention`, its weights copied.

        Self attention when its key and value sizes equal its embedding, which is how torch tells, too; pass the memory
        through `memory=` all the same to use it as cross attention.
        """
        if other.bias_k is not None or other.add_zero_attn or other.kdim != other.vdim:
            raise ConfigError("add_bias_kv, add_zero_attn and kdim != vdim have no counterpart in DecoderAttention")
        memory_dim = None if other._qkv_same_embed_dim else other.kdim
        reference = other.out_proj.weight
        made = cls(
            other.embed_dim, other.num_heads, memory_dim=memory_dim, causal=causal, dropout=other.dropout,
            bias=other.in_proj_bias is not None, device=reference.device, dtype=reference.dtype,
        )  # fmt: skip
        if other._qkv_same_embed_dim:
            weights = other.in_proj_weight.chunk(3)
        else:
            weights = (other.q_proj_weight, other.k_proj_weight, other.v_proj_weight)
        inner = (made.q_proj, made.k_proj, made.v_proj)
        with torch.no_grad():
            for linear, weight in zip(inner, weights, strict=True):
                linear.weight.copy_(weight)
            made.o_proj.weight.copy_(other.out_proj.weight)
            if other.in_proj_bias is not None:
                for linear, bias in zip(inner, other.in_proj_bias.chunk(3), strict=True):
                    linear.bias.copy_(bias)
                made.o_proj.bias.copy_(other.out_proj.bias)
        return made

    def project(self, memory: Tensor) -> Memory:
        """Keys and values of a memory `[B, N, memory_dim]`, for all decode steps that will read it."""
        return Memory(*(self._heads(linear(memory), self.num_kv_heads) for linear in (self.k_proj, self.v_proj)))

    def forward(
        self,
        x: Tensor,
        memory: Tensor | Memory | None = None,
        *,
        positions: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        index: Tensor | Chooser | None = None,
        cache: CacheStep | None = None,
    ) -> Tensor:
        """`x [B, T, embed_dim]` -> the same shape.

        `memory`: what cross attention reads, raw or projected. `positions [T]` or `[B, T]`: for rotary embedding,
        default 0..T-1, or what follows the cache. `key_padding_mask [B, N]`: true = not seen (torch's meaning).
        `index`: attend these keys only (`gsm.nn.index`), or a function of query and keys that names them. `cache`:
        one step of a `gsm.nn.KVCache`; new tokens then attend the stored ones and themselves, under `torch.no_grad`.
        """
        query = self._heads(self.q_proj(x), self.num_heads)
        if memory is not None:
            if cache is not None:
                raise InputError("cache holds the decoder's own past; keep a memory with attention.project(memory)")
            memory = memory if isinstance(memory, Memory) else self.project(memory)
            out = self._attend(query, memory, key_padding_mask, index, causal=False)
        elif self.is_cross:
            raise InputError("this module was built with memory_dim; pass memory=")
        else:
            out = self._self_attend(x, query, positions, key_padding_mask, index, cache)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, causal={self.causal}"

    # -- parts -------------------------------------------------------------------------------------------------

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.unflatten(-1, (num_heads, self.head_dim)).transpose(1, 2)

    def _self_attend(
        self,
        x: Tensor,
        query: Tensor,
        positions: Tensor | None,
        key_padding_mask: Tensor | None,
        index: Tensor | Chooser | None,
        cache: CacheStep | None,
    ) -> Tensor:
        own = self.project(x)
        if self.rope is not None:
            if positions is None:
                positions = cache.positions if cache is not None else torch.arange(x.shape[1], device=x.device)
            query = apply_rope(query, positions, self.rope)
            own = Memory(apply_rope(own.k, positions, self.rope), own.v)
        if cache is None:
            return self._attend(query, own, key_padding_mask, index, self.causal)
        if index is not None or key_padding_mask is not None:
            raise InputError(
                "with a cache, what is read is the cache's choice (sparse: {enabled: true}) and padding is not "
                "stored; leave index and key_padding_mask out"
            )
        if not self.causal:
            raise InputError("a cache serves causal attention only; this module was built with causal=False")
        return cache.attend(self.layer_idx, query, own.k, own.v)

    def _attend(
        self,
        query: Tensor,
        memory: Memory,
        key_padding_mask: Tensor | None,
        index: Tensor | Chooser | None,
        causal: bool,
    ) -> Tensor:
        num_queries, num_keys = query.shape[2], memory.k.shape[2]
        dropout = self.dropout if self.training else 0.0
        if index is not None:
            if dropout:
                raise InputError("dropout with an index is not built; call eval() first, or build with dropout=0")
            chosen = index if isinstance(index, Tensor) else index(query, memory.k)
            places = torch.arange(num_queries, device=query.device) if causal else None
            return attend_index(query, *memory, chosen, places, key_padding_mask=key_padding_mask)
        grouped = self.num_kv_heads != self.num_heads
        if key_padding_mask is None:
            return F.scaled_dot_product_attention(
                query, *memory, dropout_p=dropout, is_causal=causal and num_queries > 1, enable_gqa=grouped
            )
        mask = ~key_padding_mask.view(-1, 1, 1, num_keys)
        if causal:
            mask = mask & torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
        return masked_sdpa(query, *memory, mask, dropout)


def _check_sizes(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None, dropout: float) -> None:
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads cannot share {num_kv_heads} kv heads evenly; use a divisor of them")
    if head_dim is None and embed_dim % num_heads:
        raise ConfigError(f"embed_dim {embed_dim} is no multiple of {num_heads} heads; give head_dim")
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"dropout is {dropout}; use 0 up to, not including, 1")


def _rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    if rotary_dim is not None and rotary_dim > head_dim:
        raise ConfigError(f"rotary_dim {rotary_dim} exceeds the head's {head_dim} channels; use at most {head_dim}")
    return rotary_dim or head_dim
