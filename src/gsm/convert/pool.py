"""Mean-pooling key and value heads: what becomes of every tensor, and of the config.

Query head j reads kv head j // (query heads / kv heads). Neighbouring kv heads are averaged, so the query heads of a
new group are the neighbours they were: nothing else has to be reordered.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from gsm.errors import ConfigError, UnsupportedModel

_POOLED = (".k_proj.weight", ".v_proj.weight", ".k_proj.bias", ".v_proj.bias")
_FUSED = (".qkv_proj.weight", ".qkv_proj.bias")
_NORMS = (".k_norm.weight", ".k_norm.bias")


def pooled_config(config: Any, num_kv_heads: int) -> Any:
    """A copy of `config` with `num_kv_heads`. Raises ConfigError or UnsupportedModel with the reason."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModel(f"{text.model_type} caches one latent for all heads; there are no kv heads to pool")
    before = getattr(text, "num_key_value_heads", None)
    if not isinstance(before, int):
        raise UnsupportedModel(
            f"{text.model_type} has no num_key_value_heads in its config, so a checkpoint with fewer kv heads could "
            "not be loaded"
        )
    if num_kv_heads >= before or before % num_kv_heads:
        fitting = [n for n in range(1, before) if before % n == 0]
        raise ConfigError(
            f"--kv-heads is {num_kv_heads} but {text.model_type} has {before}, which must be pooled in equal groups; "
            + (f"use {' or '.join(map(str, fitting))}" if fitting else "it has a single one already")
        )
    new = copy.deepcopy(config)
    new.get_text_config(decoder=True).num_key_value_heads = num_kv_heads
    return new


def pooled_state(state: dict[str, Tensor], text_config: Any, num_kv_heads: int) -> dict[str, Tensor]:
    """The tensors of the new checkpoint; those of attention heads that stay are the same objects.

    Raises UnsupportedModel when the model has no tensor that is known to hold keys and values.
    """
    before, heads = text_config.num_key_value_heads, text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    new, num_pooled = {}, 0
    for name, tensor in state.items():
        if name.endswith(_POOLED):
            _check(name, tensor, before * head_dim)
            new[name], num_pooled = pool_heads(tensor, before, num_kv_heads), num_pooled + 1
        elif name.endswith(_FUSED):
            _check(name, tensor, (heads + 2 * before) * head_dim)
            q, k, v = tensor.split([heads * head_dim, before * head_dim, before * head_dim])
            parts = (q, pool_heads(k, before, num_kv_heads), pool_heads(v, before, num_kv_heads))
            new[name], num_pooled = torch.cat(parts), num_pooled + 1
        elif name.endswith(_NORMS) and tensor.shape[0] == before * head_dim:  # one weight per channel of every head
            new[name] = pool_heads(tensor, before, num_kv_heads)
        else:
            new[name] = tensor
    if not num_pooled:
        raise UnsupportedModel(f"{text_config.model_type} keeps no k_proj, v_proj or qkv_proj weights; cannot pool it")
    return new


def pool_heads(tensor: Tensor, before: int, after: int) -> Tensor:
    """Rows `[before * d, ...]` of kv heads -> the means of neighbouring heads `[after * d, ...]`, in the same dtype."""
    grouped = tensor.unflatten(0, (after, before // after, -1))
    return grouped.float().mean(dim=1).flatten(0, 1).to(tensor.dtype)


def _check(name: str, tensor: Tensor, rows: int) -> None:
    if tensor.shape[0] != rows:
        raise UnsupportedModel(
            f"{name} has {tensor.shape[0]} rows where the config says {rows}; quantised or unusual layouts cannot be "
            "pooled, use the full-precision checkpoint"
        )
