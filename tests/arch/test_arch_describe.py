"""`describe`: what each family's config says about its cache, from objects, dicts and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from gsm.arch import LayerGeometry, describe
from gsm.errors import ModelError, UnsupportedModel

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}

# The fields of DeepSeek-V4.1-Flash's text config that matter here (its published defaults).
V41_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_head_dim": 128,
    "sliding_window": 128,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
}


def test_check_value_of_the_documents() -> None:
    arch = describe(LLAMA)
    assert arch.kv_bytes_per_token(2) == 131072
    assert arch.kv_bytes(1000, 2) == 131072 * 1000
    assert (arch.support, arch.packable) == ("managed", True)
    assert arch.num_parameters_estimate == pytest.approx(8.03e9, rel=0.01)


def test_a_config_may_be_an_object_a_dict_a_file_or_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    described = [describe(LLAMA), describe(tmp_path), describe(str(tmp_path / "config.json"))]
    described.append(describe(CONFIG_MAPPING["llama"].from_dict(LLAMA)))
    assert len(set(described)) == 1


def test_multi_query_and_multi_head() -> None:
    multi_query = describe({**LLAMA, "num_key_value_heads": 1})
    multi_head = describe({**LLAMA, "num_key_value_heads": 32})
    assert multi_head.kv_bytes_per_token(2) == 32 * multi_query.kv_bytes_per_token(2)


def test_five_sliding_layers_to_one_full_one() -> None:
    config = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=12, sliding_window=512)
    arch = describe(config)
    per_layer = 2 * config.num_key_value_heads * config.head_dim
    assert arch.num_layers_by_kind == {"sliding": 10, "full": 2}
    assert arch.kv_bytes(8192, 2) == 2 * per_layer * (10 * 512 + 2 * 8192)
    assert arch.kv_bytes(100, 2) == 2 * per_layer * 12 * 100
    assert arch.kv_bytes_per_token(2) == 2 * per_layer * 2
    assert arch.support == "partly"
    assert "512" in arch.support_reason
    assert arch.rope is not None
    assert arch.sliding_rope is not None
    assert (arch.rope.theta, arch.sliding_rope.theta) == (1_000_000, 10_000)


def test_latent_attention_counts_the_latent() -> None:
    arch = describe(CONFIG_MAPPING["deepseek_v3"]())
    assert arch.layers[0] == LayerGeometry("full", 1, 128, 512, 64, latent=True)
    assert arch.kv_bytes_per_token(2) == 61 * (512 + 64) * 2
    assert arch.support == "managed"
    assert "latent" in arch.support_reason
    assert arch.num_parameters_estimate == pytest.approx(671e9, rel=0.01)
    assert arch.num_active_parameters_estimate == pytest.approx(37e9, rel=0.03)


def test_v41_flash_is_not_worth_it_at_890_bytes() -> None:
    for config in (V41_TEXT, {"model_type": "deepseek_v41", "text_config": V41_TEXT}):
        arch = describe(config)
        assert arch.kv_bytes_per_token(2) == 890
        assert arch.kv_bytes_per_token(4) == 890  # its storage format is part of the model
        assert arch.support == "not_worth_it"
        assert "890 bytes" in arch.support_reason
        assert arch.helps_instead
    assert arch.num_layers_by_kind == {"sliding": 36, "compressed": 4}
    assert arch.num_parameters_estimate == pytest.approx(552e9, rel=0.03)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa"])
def test_models_that_already_compress_are_not_worth_it(model_type: str) -> None:
    arch = describe(CONFIG_MAPPING[model_type]())
    assert arch.support == "not_worth_it"
    assert arch.helps_instead
    assert not arch.packable


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "falcon", "gpt_neo"])
def test_refused_families_say_why(model_type: str) -> None:
    arch = describe(CONFIG_MAPPING[model_type]())
    assert arch.support == "refused"
    assert len(arch.support_reason) > 20
    assert not arch.packable
    assert arch.packable_reason


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_state_space_models_have_nothing_to_manage(model_type: str) -> None:
    arch = describe(CONFIG_MAPPING[model_type]())
    assert arch.support == "not_worth_it"
    assert arch.kv_bytes_per_token(2) == 0
    assert not arch.packable


@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba", "falcon_h1"])
def test_hybrids_are_partly_managed_and_never_packed(model_type: str) -> None:
    arch = describe(CONFIG_MAPPING[model_type]())
    assert arch.support == "partly"
    assert "keep a state of fixed size" in arch.support_reason
    assert not arch.packable
    assert "state" in arch.packable_reason
    assert any(layer.state_elements for layer in arch.layers)


@pytest.mark.parametrize(("rope_type", "packable"), [("llama3", True), ("yarn", True), ("dynamic", False)])
def test_rope_that_depends_on_the_length_is_not_packed(rope_type: str, packable: bool) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 8192}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    arch = describe({**LLAMA, "max_position_embeddings": 32768, "rope_parameters": rope})
    assert arch.rope is not None
    assert (arch.rope.type, arch.rope.theta) == (rope_type, 5e5)
    assert ("factor", 4.0) in arch.rope.scaling
    assert arch.packable is packable
    assert bool(arch.packable_reason) is not packable


def test_chunked_attention_is_not_packed() -> None:
    arch = describe(CONFIG_MAPPING["llama4_text"]())
    assert not arch.packable
    assert arch.support == "partly"
    assert "their chunk of 8192 tokens" in arch.support_reason
    assert "chunk" in arch.packable_reason


def test_shared_layers_cost_nothing_and_name_their_source() -> None:
    types = ["sliding_attention", "full_attention"] * 3
    config = CONFIG_MAPPING["gemma3n_text"](num_hidden_layers=6, layer_types=types, num_kv_shared_layers=2)
    arch = describe(config)
    assert [layer.kv_source for layer in arch.layers] == [None] * 4 + [2, 3]
    assert arch.num_layers_by_kind == {"sliding": 2, "full": 2, "shared": 2}
    assert arch.layers[-1].kv_bytes(100, 2) == 0
    assert arch.support == "partly"
    assert "2 of 6 layers read the cache of another layer" in arch.support_reason


def test_an_unknown_family_of_llama_shape_is_managed() -> None:
    arch = describe({**LLAMA, "model_type": "brand_new", "rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}})
    assert (arch.model_type, arch.support) == ("brand_new", "managed")
    assert arch.kv_bytes_per_token(2) == 131072
    assert not arch.packable


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "bert"}, "not Llama-shaped"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "brand_new", "vocab_size": 10}, "hidden_size"),
        ({**LLAMA, "model_type": "brand_new", "layer_types": ["quantum"] * 32}, "quantum"),
        ({**LLAMA, "model_type": "brand_new", "layer_types": ["full_attention"]}, "layer_types"),
        ({**LLAMA, "model_type": "brand_new", "layer_types": ["sliding_attention"] * 32}, "sliding_window"),
    ],
)
def test_unknown_shapes_are_refused_with_the_reason(config: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        describe(config)


def test_unreadable_configs(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        describe(tmp_path / "nothing.json")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        describe(broken)
    with pytest.raises(ModelError, match="no valid llama config"):
        describe({**LLAMA, "hidden_size": "wide"})


def test_geometry_is_hashable_and_frozen() -> None:
    arch = describe(LLAMA)
    assert hash(arch) == hash(describe(LLAMA))
    with pytest.raises(AttributeError):
        arch.layers[0].k_dim = 1  # type: ignore[misc]
