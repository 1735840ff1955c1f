"""Multi-head latent attention (DeepSeek V2, V3 and relatives) as attention of one kv head over latents.

transformers caches a latent and a rotary key per token and expands all of them to keys and values in every step. The
expansion is linear, so it can be folded into the query and the output instead ("absorbed", DeepSeek-V2,
arXiv:2405.04434, section 2.1): a key is then the latent followed by the rotary part, a value is the latent itself.
Pages hold these keys only; their V is empty, and nothing is expanded but the current token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gsm.arch import LayerGeometry


def is_latent(layer: LayerGeometry, k: Tensor, v: Tensor) -> bool:
    """Whether a layer hands its latent `k` and rotary part `v` to the cache (older transformers expand them first)."""
    return layer.latent and (k.shape[1], k.shape[-1], v.shape[-1]) == (1, layer.k_dim, layer.v_dim)


def absorb_query(module: nn.Module, query: Tensor, layer: LayerGeometry) -> Tensor:
    """`query [rows, heads, T, nope + rotary]` for expanded keys -> `[rows, heads, T, latent + rotary]`."""
    content, rotary = query.split([query.shape[-1] - layer.v_dim, layer.v_dim], dim=-1)
    up = _expansion(module, layer.k_dim, query)[:, : content.shape[-1]]
    return torch.cat((torch.einsum("bhtn,hnl->bhtl", content, up), rotary), dim=-1)


def expand_output(module: nn.Module, output: Tensor, layer: LayerGeometry, v_dim: int) -> Tensor:
    """`output [rows, T, heads, latent]` of attention over latents -> `[rows, T, heads, v_dim]`."""
    up = _expansion(module, layer.k_dim, output)[:, -v_dim:]
    return torch.einsum("bthl,hvl->bthv", output, up)


def _expansion(module: nn.Module, latent_dim: int, like: Tensor) -> Tensor:
    """The matrix that expands a latent: `[heads, nope + v_dim, latent]`."""
    projection: nn.Module = module.kv_b_proj  # type: ignore[assignment]
    if type(projection) is nn.Linear:
        weight = projection.weight
    else:  # quantised, or with an adapter: ask it what it does
        weight = projection(torch.eye(latent_dim, dtype=like.dtype, device=like.device)).T
    return weight.unflatten(0, (module.config.num_attention_heads, -1))  # type: ignore[union-attr]
