"""How many weights a config describes, by formula: within 2 % for the usual decoders, mixtures included.

Hybrids with state-space layers can be off by half: `gsm.models.count_parameters` counts them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gsm.arch.families import Family


def estimate_parameters(config: Any, layers: Sequence[Any], family: Family) -> tuple[int, int]:
    """(all parameters, parameters read per decoded token). Norms, biases and state-space weights are left out."""
    vocab, hidden = config.vocab_size, config.hidden_size
    embeddings = vocab * hidden * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    total = embeddings
    active = vocab * hidden  # the output projection; of the input embedding only one row is read
    for index, layer in enumerate(layers):
        attention = _attention(layer, hidden)
        all_experts, used_experts = _mlp(layer, index, hidden, family.gated_mlp)
        total += attention + all_experts
        active += attention + used_experts
    return int(total), int(active)


def _attention(layer: Any, hidden: int) -> int:
    heads = getattr(layer, "num_attention_heads", None)
    if not heads:
        return 0
    latent = getattr(layer, "kv_lora_rank", None)
    if latent:
        return _latent_attention(layer, hidden, heads, latent)
    head_dim = getattr(layer, "head_dim", None) or hidden // heads
    if getattr(layer, "o_lora_rank", None):
        return _shared_kv_attention(layer, hidden, heads * head_dim, head_dim)
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    return hidden * head_dim * (2 * heads + 2 * kv_heads)


def _shared_kv_attention(layer: Any, hidden: int, q_dim: int, head_dim: int) -> int:
    """DeepSeek V4: low-rank queries, one shared key/value head, grouped low-rank output projection."""
    queries = layer.q_lora_rank * (hidden + q_dim)
    output = layer.o_lora_rank * (q_dim + layer.o_groups * hidden)
    return int(queries + hidden * head_dim + output)


def _latent_attention(layer: Any, hidden: int, heads: int, latent: int) -> int:
    rope, nope, v_dim = layer.qk_rope_head_dim, layer.qk_nope_head_dim, layer.v_head_dim
    q_rank = getattr(layer, "q_lora_rank", None)
    q_dim = heads * (nope + rope)
    queries = q_rank * (hidden + q_dim) if q_rank else hidden * q_dim
    return int(queries + hidden * (latent + rope) + latent * heads * (nope + v_dim) + heads * v_dim * hidden)


def _mlp(layer: Any, index: int, hidden: int, gated: bool) -> tuple[int, int]:
    """(all, used per token) parameters of the feed-forward part of layer ``index``."""
    matrices = 3 if gated else 2
    width = getattr(layer, "intermediate_size", None) or 4 * hidden
    dense = matrices * hidden * (width[index] if isinstance(width, (list, tuple)) else width)
    experts = _first(layer, "n_routed_experts", "num_local_experts", "num_experts")
    if not experts or index < (getattr(layer, "first_k_dense_replace", None) or 0):
        return dense, dense
    width = getattr(layer, "moe_intermediate_size", None) or layer.intermediate_size
    expert = matrices * hidden * width
    shared_width = getattr(layer, "shared_expert_intermediate_size", None)
    shared = matrices * hidden * shared_width if shared_width else (getattr(layer, "n_shared_experts", 0) or 0) * expert
    used = _first(layer, "num_experts_per_tok", "num_experts_per_token", "top_k") or 1
    router = hidden * experts
    return experts * expert + shared + router, used * expert + shared + router


def _first(layer: Any, *names: str) -> int:
    for name in names:
        value = getattr(layer, name, None)
        if isinstance(value, int) and value:
            return value
    return 0
