"""Every policy on a real forward pass: one matrix (CASES A3, A4, A11, A12, D7)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generation import given, prompt, run, run_gsm, small, used

import gsm
from gsm.kv.positions import COLD, REMOVED

DROP = {"cold": "drop"}
POLICIES: dict[str, dict[str, Any]] = {
    "keep_all": {},
    "recent": {"policy": "recent", **DROP},
    "recent with content sinks": {"policy": "recent", "sink_mass": 0.2, **DROP},
    "absolute": {"policy": "threshold", "threshold": 0.02, **DROP},
    "relative": {"policy": "threshold", "threshold_relative": 0.5, **DROP},
    "relative capped": {"policy": "threshold", "threshold_relative": 0.5, "warm_size": 16, **DROP},
    "budget": {"policy": "budget", "warm_size": 16, **DROP},
    "budget of nothing": {"policy": "budget", "warm_size": 0, **DROP},
    "decayed": {"policy": "threshold", "threshold_relative": 0.5, "mass_decay": 0.9, **DROP},
    "cold int4": {"policy": "threshold", "threshold_relative": 0.5, "cold": "int4", "page_size": 8, "hot_size": 16},
    "advice only": {"policy": "threshold", "threshold": 0.02},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "int8": {},
    "none": {"warm": {"codec": "none"}},
    "int4": {"warm": {"codec": "int4"}, "page_size": 8, "hot_size": 16},
    "page 1": {"page_size": 1},
    "sparse": {"sparse": {"enabled": True, "budget_tokens": 16}},
}


MATRIX = [(p, name) for p in POLICIES for name in LAYOUTS if p != "cold int4" or name == "int8"]


@pytest.mark.parametrize(("policy", "layout"), MATRIX)
def test_long_generation(policy: str, layout: str, tiny_model: Any) -> None:
    """Prompt at capacity, then 50 more: finite, recent tokens and sinks kept, memory bounded where it should be."""
    config = gsm.load_config(small(**{**POLICIES[policy], **LAYOUTS[layout]}))
    model = tiny_model("llama")
    with gsm.attach(model, config) as handle:
        _, logits = run(model, prompt(60), 50)
        cache = handle.cache
        cache.manager.check_integrity()
        assert torch.isfinite(logits).all()
        tiers = cache.explain().tokens_by_tier()
        n = tiers.shape[-1]
        assert n == 60 + 49
        kept = tiers != REMOVED
        assert kept[..., : config.cache.sink_tokens].all()
        assert kept[..., n - config.cache.hot_size :].all()
        if config.cache.cold != "drop":
            assert kept.all()
        if config.cache.cold == "int4":
            assert (tiers == COLD).any()
        if policy in ("recent", "relative capped", "budget", "budget of nothing"):
            c = config.cache
            late = 16 + c.page_size  # judged every 16 tokens
            limit = (c.warm_size or 0) + c.hot_size + c.num_sink_pages * c.page_size + c.page_size + late
            assert int(kept.sum(-1).max()) <= limit
        if "capped" in policy or "budget" in policy:
            assert not kept.all()
        cache.free()
        assert used(cache) == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, 2])
def test_contexts_of_one_and_two_tokens(policy: str, length: int, tiny_model: Any) -> None:  # CASES A3
    for sinks in (0, 1):
        config = small(**{**POLICIES[policy], "hot_size": 1, "recent_tokens": 1, "sink_tokens": sinks})
        _, logits = run_gsm(tiny_model("llama"), config, prompt(length), 40)
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("policy", ["relative", "budget", "absolute"])
def test_a_huge_hot_zone_drops_nothing(policy: str, tiny_model: Any) -> None:
    model = tiny_model("llama")
    config = small(**{**POLICIES[policy], "hot_size": 500, "warm": {"codec": "none"}})
    ours, plain = run_gsm(model, config, prompt(60), 20), run(model, prompt(60), 20)
    assert torch.equal(ours[0], plain[0])


def test_heads_lose_different_pages(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model, small(**POLICIES["relative"])) as handle:
        run(model, prompt(80), 30)
        tiers = handle.cache.explain().tokens_by_tier()
        stats = handle.cache.stats()
    per_head = (tiers == REMOVED).sum(-1)
    assert len(per_head.unique()) > 1
    assert stats.num_dropped * 4 == int(per_head.sum())


def test_a_rejected_draft_changes_nothing(tiny_model: Any) -> None:  # CASES D7
    """Half-wrong drafts across page borders leave the tiers and removals of steps without drafts."""
    model = tiny_model("llama")
    ids, right = prompt(80), prompt(40, seed=8)[0]
    config = small(**POLICIES["recent"])
    maps = []
    with gsm.attach(model, config), torch.inference_mode():
        for drafted in (False, True):
            cache = gsm.Cache(model, config)
            model(ids, **given(model, cache))
            position = 0
            while position < 36:
                if not drafted:
                    model(right[position].view(1, 1), **given(model, cache))
                    position += 1
                    continue
                draft = right[position : position + 4].clone()
                draft[2:] = (draft[2:] + 1) % 128  # the second half is wrong
                model(draft.view(1, 4), **given(model, cache))
                cache.crop(-2)
                position += 2
            model(right[36].view(1, 1), **given(model, cache))
            maps.append(cache.explain().tokens_by_tier())
            cache.manager.check_integrity()
    assert int((maps[0] == REMOVED).sum()) > 0
    assert torch.equal(*maps)


def test_statistics_are_reported_and_small(tiny_model: Any) -> None:
    model = tiny_model("llama", head_dim=64)
    config = {"cache": {"hot_size": 64, "recent_tokens": 32, "policy": "threshold", "threshold": 0.001}}
    with gsm.attach(model, config) as handle:
        run(model, prompt(300), 4)
        stats = handle.cache.stats()
    assert 0 < stats.statistics_bytes <= 0.01 * stats.kv_bytes
    assert stats.recalled_tokens_mean is not None
    assert stats.recalled_tokens_mean > 200
    assert stats.nonfinite_pages == {}


def test_numbers_that_are_not_finite_are_found_in_their_layer(tiny_model: Any) -> None:
    model = tiny_model("llama")
    hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda m, i, o: o * torch.inf)
    try:
        with gsm.attach(model, small()) as handle, torch.inference_mode():
            model(prompt(33))
            found = handle.cache.stats().nonfinite_pages
    finally:
        hook.remove()
    assert 0 not in found
    assert found[1] == 8 * 2
    assert found[2] == 8 * 2  # what the second layer broke, the third one reads


def test_explain_answers_for_rows_and_tokens(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model, small(**POLICIES["recent"])) as handle:
        run(model, prompt(60, rows=2), 8)
        places = handle.cache.explain(1, 10)
        assert {(p.tier, p.removed_by) for p in places} == {("removed", "recent")}
        with pytest.raises(gsm.GsmError, match="there is no row 2"):
            handle.cache.explain(2)
        with pytest.raises(gsm.GsmError, match="there is no token 67"):
            handle.cache.explain(0, 67)


def test_budgets_per_layer_are_refused() -> None:  # CASES A12
    """Layers and heads may lose different pages (above), but there is one budget; a list of them is no number."""
    with pytest.raises(gsm.GsmError, match=r"cache.sparse.budget_tokens is \[256, 512\]"):
        gsm.load_config({"cache": {"sparse": {"enabled": True, "budget_tokens": [256, 512]}}})
