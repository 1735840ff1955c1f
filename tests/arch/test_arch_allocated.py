"""The geometry against what transformers really allocates: within 2 % for every cache layout we claim to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from gsm.arch import describe

NUM_TOKENS = 300

# family -> config overrides (window large enough that one token of slack stays below 2 %)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "mistral (all sliding)": {"sliding_window": 128},
    "phi3": {},
    "gpt_neox": {},
    "gemma2": {"sliding_window": 128},
    "gemma3_text": {"sliding_window": 128},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": 128,
        "vocab_size_per_layer_input": 128,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 128,
        "sliding_window": 128,
    },
    "gpt_oss": {"sliding_window": 128},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "mixtral": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "qwen3_next": {},
    "jamba": {},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
}


@pytest.mark.parametrize("name", MODELS)
def test_planned_bytes_are_the_allocated_bytes(name: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(name.split()[0], **MODELS[name])
    cache = fill_cache(model, NUM_TOKENS)
    assert describe(model.config).kv_bytes(NUM_TOKENS, 4) == pytest.approx(allocated_bytes(cache), rel=0.02)


def test_compressed_growth_is_the_allocated_growth(tiny_model: Callable[..., Any]) -> None:
    """DeepSeek V4 keeps partly filled buffers besides, so lengths are compared that leave the same remainder."""
    model = tiny_model("deepseek_v4", num_hidden_layers=4, max_position_embeddings=2048)
    arch = describe(model.config)
    short, long = (allocated_bytes(fill_cache(model, n)) for n in (256, 1024))
    assert arch.kv_bytes(1024, 4) - arch.kv_bytes(256, 4) == pytest.approx(long - short, rel=0.02)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma2"])
def test_parameter_estimate(model_type: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(model_type)
    actual = sum(parameter.numel() for parameter in model.parameters())
    assert describe(model.config).num_parameters_estimate == pytest.approx(actual, rel=0.03)


def fill_cache(model: Any, num_tokens: int) -> DynamicCache:
    """Prefill all but the last three tokens, then decode them one by one."""
    ids = torch.randint(3, 120, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        for start, stop in [(0, num_tokens - 3), *((i, i + 1) for i in range(num_tokens - 3, num_tokens))]:
            model(input_ids=ids[:, start:stop], **{keyword: cache}, use_cache=True)
    return cache


def allocated_bytes(cache: DynamicCache) -> int:
    """Bytes of all distinct storages that the cache's layers hold on to."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if torch.is_tensor(value):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    for layer in cache.layers:
        for value in vars(layer).values():
            visit(value)
    return sum(storages.values())
