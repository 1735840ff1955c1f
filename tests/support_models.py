"""Tiny random models of many families, built from configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

TinyModel = Callable[..., PreTrainedModel]

# Every family gets this, then its own line. Head sizes stay at 8 or more: int8 scales on fewer numbers mean nothing.
_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # large enough for attention that is not uniform
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": {**_MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64},
    "glm4_moe_lite": _MLA,
    "minicpm3": _MLA,
    "falcon": {"head_dim": None, "num_key_value_heads": None},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_hidden_layers": None},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "sliding_window": 32,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 2,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gemma2": {"num_hidden_layers": 4, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "gpt_neox": {"head_dim": None, "num_key_value_heads": None},
    "gpt_oss": {"num_hidden_layers": 4, "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "use_mamba_kernels": False,
    },
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "phi3": {"head_dim": None},
    "qwen2": {"head_dim": None},
    "qwen2_moe": {**_MOE, "head_dim": None, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _MOE,
    "qwen3_next": {**_MOE, **_DELTA, "num_hidden_layers": 4, "shared_expert_intermediate_size": 32},
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The config of `build_tiny_model`."""
    # None in a family's line means "the family's own default"; None from the caller is passed on (it means "off")
    settings = {k: v for k, v in {**_COMMON, **_FAMILIES.get(model_type, {})}.items() if v is not None}
    settings.update({"eos_token_id": None, **_off(model_type), **overrides})
    return CONFIG_MAPPING[model_type](**settings)


def build_tiny_model(model_type: str, *, seed: int = 0, attn: str = "sdpa", **overrides: Any) -> PreTrainedModel:
    config = tiny_config(model_type, **overrides)
    if getattr(config, "attn_logit_softcapping", None):
        attn = "eager"  # older transformers take sdpa here and silently leave the soft-cap out
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32)
    except ValueError:  # a family without sdpa, such as gpt_oss
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    finally:
        torch.random.set_rng_state(generator_state)
    return model.eval()


def _off(model_type: str) -> dict[str, None]:
    """Settings that must be passed as None to be off."""
    return {"sliding_window": None} if model_type in {"mistral", "mixtral"} else {}
