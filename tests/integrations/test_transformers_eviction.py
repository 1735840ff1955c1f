"""Positions, masks and pages when tokens are forgotten (CASES A)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generation import given, prompt, run, run_gsm, small, used

import gsm

RECENT = {"policy": "recent", "cold": "drop"}


def test_positions_go_on_after_eviction(tiny_model: Any) -> None:  # CASES A1
    model, seen = tiny_model("llama"), []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].flatten().tolist()), with_kwargs=True
    )
    config = small(hot_size=16, prefill_chunk_tokens=64, **RECENT)
    with gsm.attach(model, config) as handle:
        model.generate(prompt(64), max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert handle.cache.stats().num_dropped >= (64 - 16 - 8) // 4 * 3 * 2
        assert handle.cache.get_seq_length() == 64 + 7
    hook.remove()
    assert [row[-1] for row in seen] == list(range(63, 63 + 8))
    assert seen[0] == list(range(64))


def test_keys_after_eviction_are_rotated_to_their_own_position(tiny_model: Any) -> None:
    """Layer 0 keys depend on token and position alone: those behind a gap must equal those of a full cache."""
    model, keys = tiny_model("llama"), []
    for config in (small(warm={"codec": "none"}), small(hot_size=16, **RECENT)):
        with gsm.attach(model, config), torch.inference_mode():
            cache = gsm.Cache(model, config)
            for chunk in prompt(70).split([40, 29, 1], dim=1):
                model(chunk, **given(model, cache))
        group = cache.manager.groups[0]
        view = group.layer_view(0, torch.tensor([0]), torch.tensor([70]), 18)
        keys.append(view.read(view.page_ids())[0][0, :, 60:70])
    assert torch.equal(*keys)


POLICIES: dict[str, dict[str, Any]] = {
    "keep_all": {},
    "recent": RECENT,
    "sparse": {"sparse": {"enabled": True, "budget_tokens": 16}},
    "recent sparse": {**RECENT, "sparse": {"enabled": True, "budget_tokens": 16}},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, 2])
def test_contexts_of_one_and_two_tokens(policy: str, length: int, tiny_model: Any) -> None:  # CASES A3
    for sinks in (0, 1):
        config = small(hot_size=1, recent_tokens=1, sink_tokens=sinks, **POLICIES[policy])
        _, logits = run_gsm(tiny_model("llama"), config, prompt(length), 30)
        assert torch.isfinite(logits).all()


def test_a_chunk_attends_before_it_is_compressed(tiny_model: Any) -> None:  # CASES A5
    model = tiny_model("llama", max_position_embeddings=1024)
    ids = prompt(512)
    with torch.inference_mode():
        plain = model(ids).logits
    config = small(hot_size=32, prefill_chunk_tokens=None, **RECENT)
    with gsm.attach(model, config), torch.inference_mode():
        cache = gsm.Cache(model, config)
        ours = model(ids, **given(model, cache)).logits
        assert cache.stats().num_dropped > 0
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [65, 70, 79, 95, 111])
def test_a_freed_page_is_never_read(length: int, tiny_model: Any) -> None:  # CASES A6
    model = tiny_model("llama")
    config = small(page_size=16, hot_size=64, recent_tokens=16, **RECENT)
    results = []
    for poison in (False, True):
        with gsm.attach(model, config), torch.inference_mode():
            cache = gsm.Cache(model, config)
            model(prompt(length), **given(model, cache))
            logits = []
            for token in prompt(40, seed=5)[0]:
                if poison:
                    _poison(cache)
                logits.append(model(token.view(1, 1), **given(model, cache)).logits)
            results.append(torch.cat(logits, dim=1))
    assert torch.isfinite(results[1]).all()
    assert torch.equal(*results)


def _poison(cache: gsm.Cache) -> None:
    for group in cache.manager.groups:
        for pool in (group.hot, group.warm):
            for field in pool.fields.values():
                field[pool.refs == 0] = torch.nan if field.dtype.is_floating_point else 127


def test_memory_is_really_given_back(tiny_model: Any) -> None:
    model = tiny_model("llama")
    config = small(hot_size=16, **RECENT)
    with gsm.attach(model, config), torch.inference_mode():
        cache = gsm.Cache(model, config)
        sizes = []
        for seed in range(6):
            model(prompt(48, seed=seed), **given(model, cache))
            sizes.append((used(cache), cache.stats().kv_bytes))
        reserved = cache.stats().kv_pool_bytes
        for seed in range(6):
            model(prompt(16, seed=seed), **given(model, cache))
        assert cache.stats().kv_pool_bytes <= reserved * 1.05  # the page table alone grows
    assert len({pages for pages, _ in sizes}) == 1


def test_sparse_decoding_reads_its_budget_only(tiny_model: Any) -> None:
    model = tiny_model("llama")
    config = small(sparse={"enabled": True, "budget_tokens": 24})
    with gsm.attach(model, config) as handle:
        run(model, prompt(120), 10)
        stats = handle.cache.stats()
    assert stats.attended_tokens_mean == 24
    assert stats.num_dropped == 0
