"""The check values of the documents, and the plan's figures against what is really allocated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import gsm
from gsm.arch import describe
from gsm.config import load_config
from gsm.errors import InputError
from gsm.measure.plan import PlannedModel, arch_from_numbers, format_bytes, make_plan, parse_bytes, plan_model
from gsm.measure.plan.footprint import tier_parts

NUMBERS = {"layers": 32, "kv_heads": 8, "head_dim": 128}


def planned(arch: Any, weight_bytes: int | None = None, dtype: str = "float16") -> PlannedModel:
    return PlannedModel("test", arch, dtype, None, weight_bytes, "as given")


@pytest.mark.parametrize(("memory", "tokens"), [("24GB", 91_552), ("24.884901888GB", 98_304)])
def test_tokens_that_fit(memory: str, tokens: int) -> None:
    """12 GB for the cache hold 91 552 tokens of 131 072 bytes, 12 GiB (12.884901888 GB) hold 98 304."""
    plan = make_plan(
        planned(arch_from_numbers(**NUMBERS), parse_bytes("8GB")),
        memory_bytes=parse_bytes(memory),
        reserve_bytes=parse_bytes("4GB"),
    )
    assert plan.kv_bytes_per_token == 131_072
    assert plan.capacities[0].max_tokens == tokens
    assert plan.capacities[0].bytes_per_token == 131_072


def test_sizes_say_their_unit() -> None:
    assert (parse_bytes("12GB"), parse_bytes("12 GiB"), parse_bytes("1.5mb"), parse_bytes("7")) == (
        12 * 10**9,
        12 * 2**30,
        1_500_000,
        7,
    )
    assert (format_bytes(12e9), format_bytes(890), format_bytes(1.5e6)) == ("12 GB", "890 B", "1.5 MB")


@pytest.mark.parametrize(
    ("text", "hint"), [("12G", "12GB or 12GiB"), ("lots", "24GB"), ("-3GB", "24GB"), ("12 QB", "24GB")]
)
def test_ambiguous_sizes_are_refused(text: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        parse_bytes(text)


def test_sliding_layers_count_their_window() -> None:
    arch = arch_from_numbers(**NUMBERS, sliding_layers=24, window=1024)
    plan = make_plan(planned(arch), memory_bytes=10**10, context_tokens=32768)
    per_layer = 2 * 8 * 128 * 2
    assert plan.capacities[0].bytes_at_context == per_layer * (24 * 1024 + 8 * 32768)
    assert plan.capacities[0].bytes_per_token == per_layer * 8
    tokens = plan.capacities[0].max_tokens
    assert tokens is not None
    assert arch.kv_bytes(tokens, 2) <= plan.kv_budget_bytes < arch.kv_bytes(tokens + 1, 2)
    assert any("window" in note for note in plan.notes)
    assert "times less memory" in plan.verdict


def test_concurrency_is_what_fits_side_by_side() -> None:
    plan = make_plan(
        planned(arch_from_numbers(**NUMBERS), 8 * 10**9),
        memory_bytes=24 * 10**9,
        reserve_bytes=4 * 10**9,
        context_tokens=8192,
    )
    plain, int8, int4 = plan.capacities
    assert plain.max_sequences == 12 * 10**9 // (131_072 * 8192)
    assert int8.max_sequences is not None
    assert int4.max_sequences is not None
    assert plain.max_sequences < int8.max_sequences < int4.max_sequences
    for row in plan.capacities:
        assert row.max_sequences * row.bytes_at_context <= plan.kv_budget_bytes
        assert row.parts.total == pytest.approx(row.bytes_at_context)


def test_the_bound_compares_bytes() -> None:
    plan = make_plan(
        planned(arch_from_numbers(**NUMBERS), 8 * 10**9), memory_bytes=24 * 10**9, reserve_bytes=0, context_tokens=32768
    )
    step = plan.steps[-1]
    assert step.context_tokens == 32768
    assert step.kv_bytes == 131_072 * 32768
    assert step.kv_share == pytest.approx(step.kv_bytes / (step.kv_bytes + 8e9))
    assert step.attended_tokens == 4096
    assert step.sparse_kv_bytes < step.kv_bytes / 8
    assert step.max_gain == pytest.approx((8e9 + step.kv_bytes) / (8e9 + step.sparse_kv_bytes))
    assert step.max_gain_batched is not None
    assert step.max_gain_batched > step.max_gain


def test_a_mixture_reads_only_its_active_experts() -> None:
    model = plan_model_from(CONFIG_MAPPING["qwen3_moe"]())
    step = make_plan(model, memory_bytes=10**11, context_tokens=8192).steps[-1]
    assert model.weight_bytes is not None
    assert step.weight_bytes < 0.15 * model.weight_bytes


def plan_model_from(config: Any) -> PlannedModel:
    arch = describe(config)
    count = arch.num_parameters_estimate
    share = arch.num_active_parameters_estimate / count
    return PlannedModel("test", arch, "bfloat16", count, 2 * count, "estimated", share)


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gemma3_text", "gpt_neox", "llama4_text", "deepseek_v3", "lfm2"]
)
@pytest.mark.parametrize("codec", ["int8", "int4", "none"])
def test_tier_bytes_are_the_stored_bytes(model_type: str, codec: str, tiny_model: Callable[..., Any]) -> None:
    """What the page store holds after a prefill and some decoding."""
    config = load_config({"cache": {"warm": {"codec": codec}, "hot_size": 64, "recent_tokens": 32}})
    model = tiny_model(model_type)
    ids = torch.randint(3, 120, (1, 300), generator=torch.Generator().manual_seed(0))
    with gsm.attach(model, config), torch.no_grad():
        cache = gsm.Cache(model, config)
        keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        for part in ids.split([292, *[1] * 8], dim=1):
            model(part, **{keyword: cache}, use_cache=True)
        stats = cache.stats()
    parts = tier_parts(describe(model.config), cache.get_seq_length(), config.cache, 4)
    assert parts.total == pytest.approx(stats.kv_bytes, rel=0.005)


def test_a_policy_that_drops_keeps_its_share(tiny_model: Callable[..., Any]) -> None:
    config = load_config({"cache": {"policy": "recent", "cold": "drop", "hot_size": 64, "recent_tokens": 32}})
    model = tiny_model("llama")
    parts = [tier_parts(describe(model.config), n, config.cache, 4).total for n in (300, 3000)]
    assert parts[0] == parts[1]


def test_a_given_config_replaces_the_default_rows() -> None:
    config = load_config({"cache": {"warm": {"codec": "int4"}, "sparse": {"enabled": True, "budget_tokens": 2048}}})
    plan = make_plan(planned(arch_from_numbers(**NUMBERS), 10**9), memory_bytes=10**10, config=config)
    assert [row.name for row in plan.capacities] == ["transformers", "the given config"]
    assert plan.steps[-1].attended_tokens == 2048


def test_the_recommended_config_is_valid_and_scaled() -> None:
    for context, hot_size in ((4096, 512), (32768, 2048), (131072, 4096)):
        plan = make_plan(planned(arch_from_numbers(**NUMBERS), 10**9), memory_bytes=10**11, context_tokens=context)
        assert load_config(plan.recommended).cache.hot_size == hot_size
        assert load_config(plan.recommended).cache.sparse.enabled


def test_int4_is_recommended_only_when_int8_does_not_fit() -> None:
    arch = arch_from_numbers(**NUMBERS)
    plans = [
        make_plan(planned(arch, 10**9), memory_bytes=m, reserve_bytes=0, context_tokens=32768).recommended
        for m in (10 * 10**9, 3 * 10**9)
    ]
    assert [load_config(plan).cache.warm.codec for plan in plans] == ["int8", "int4"]


def test_v41_flash_is_told_what_helps_instead() -> None:
    config = {
        "model_type": "deepseek_v41_text", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
        "head_dim": 512, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "index_head_dim": 128,
        "sliding_window": 128, "moe_intermediate_size": 2304, "n_routed_experts": 384, "n_shared_experts": 1,
        "num_experts_per_tok": 6, "vocab_size": 129280, "max_position_embeddings": 1048576,
    }  # fmt: skip
    plan = make_plan(plan_model_from(config), memory_bytes=10**12, context_tokens=1_000_000)
    assert plan.kv_bytes_per_token == 890
    assert plan.verdict.startswith("KV tiering is not worth it here, because")
    assert "What does help" in plan.verdict
    assert plan.recommended is None
    assert plan.capacities[0].bytes_at_context == pytest.approx(0.89e9, rel=0.01)


def test_refused_models_get_the_reason() -> None:
    plan = make_plan(plan_model_from(CONFIG_MAPPING["bloom"]()), memory_bytes=10**11)
    assert "ALiBi" in plan.verdict
    assert (plan.recommended, plan.steps) == (None, ())


def test_weights_that_do_not_fit_are_told() -> None:
    plan = make_plan(planned(arch_from_numbers(**NUMBERS), 10**10), memory_bytes=10**9)
    assert plan.capacities[0].max_tokens == 0
    assert plan.verdict.startswith("Nothing is left")


def test_a_short_context_has_little_to_win() -> None:
    plan = make_plan(planned(arch_from_numbers(**NUMBERS), 16 * 10**9), memory_bytes=10**11, context_tokens=400)
    assert plan.verdict.startswith("Little to win")


def test_the_demo_is_counted_from_its_files(demo: Any) -> None:
    model = plan_model("demo")
    assert model.num_parameters == sum(p.numel() for p in demo.model.parameters())
    assert (model.dtype, model.weight_bytes) == ("float32", 4 * (model.num_parameters or 0))
    assert plan_model("demo", "float16").arch.kv_bytes_per_token(2) == 23_040


@pytest.mark.parametrize(
    ("numbers", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"sliding_layers": 3}, "--window"),
        ({"sliding_layers": 40, "window": 5}, "sliding-layers"),
        ({"query_heads": 12}, "multiple"),
    ],
)
def test_impossible_numbers(numbers: dict[str, int], word: str) -> None:
    with pytest.raises(InputError, match=word):
        arch_from_numbers(**{**NUMBERS, **numbers})
