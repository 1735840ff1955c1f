"""Layers with a bounded past: what they see, what they keep, and what cannot be taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generation import assert_equal_run, given, prompt, run, run_gsm, small, used

import gsm
from gsm.attention import make_attention, prefill_attention
from gsm.core.batch import Span
from gsm.core.view import AttentionSpec, Window
from gsm.errors import KVError
from gsm.kv.manager import KVManager
from gsm.kv.positions import REMOVED

PLAIN = {"warm": {"codec": "none"}}
LENGTH = 10


def _visible(spec: AttentionSpec, window: Window, split: int) -> list[list[int]]:
    """Which keys each of 10 queries sees when the first `split` are one prefill and the others decode steps.

    All logits are equal and value i is the i-th unit vector, so the output shows who was seen.
    """
    config = gsm.load_config(small(**PLAIN)).cache
    manager = KVManager(1, config, windows=[window])
    slot, rows = manager.add_sequence(), []
    k, v = torch.zeros(1, 1, LENGTH, 8), torch.eye(LENGTH, 16).view(1, 1, LENGTH, 16)
    for first, last in [(0, split), *((i, i + 1) for i in range(split, LENGTH))]:
        step = manager.begin([Span(slot, 0, 0, last - first)])
        new = (k[:, :, first:last], v[:, :, first:last])
        step.write(0, *new)
        query = torch.zeros(1, 1, last - first, 8)
        if step.is_decode:
            out = make_attention("torch", torch.device("cpu")).decode(query[:, :, 0], step.view(0), spec, None).out
        else:
            out = prefill_attention(query[0], new[0][0], new[1][0], None, spec)[0]
        step.commit()
        rows += [row.nonzero().flatten().tolist() for row in out.view(last - first, -1)]
    return rows


@pytest.mark.parametrize("split", [1, 5, 10])
def test_a_window_of_four_shows_four_keys(split: int) -> None:  # CASES A8
    rows = _visible(AttentionSpec(1.0, window=4), Window(4), split)
    assert rows == [list(range(max(0, i - 3), i + 1)) for i in range(LENGTH)]


@pytest.mark.parametrize("split", [1, 5, 10])
def test_a_chunk_shows_what_lies_in_it(split: int) -> None:
    rows = _visible(AttentionSpec(1.0, chunk=4), Window(4, chunked=True), split)
    assert rows == [list(range(i // 4 * 4, i + 1)) for i in range(LENGTH)]


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_pages_outside_the_window_are_given_back(codec: str, tiny_model: Any) -> None:
    """Memory of five sliding layers to one full: window x sliding + context x full."""
    model = tiny_model("gemma3_text")  # 6 layers, 2 kv heads, window 32
    with gsm.attach(model, small(warm={"codec": codec})) as handle:
        run(model, prompt(200), 30)
        cache = handle.cache
        tiers = cache.explain().tokens_by_tier()
        kept = (tiers != REMOVED).sum(-1)
        assert kept.shape == (6, 2)
        assert bool((kept[5] == 229).all())
        assert bool((kept[:5] <= 32 + 4).all())
        assert used(cache) == int((kept.float() / 4).ceil().sum())
        assert {x.removed_by for x in cache.explain(0, 10) if x.tier == "removed"} == {"window"}
        assert cache.stats().num_dropped == 0


def test_budgets_are_counted_by_the_layers_that_see_everything(tiny_model: Any) -> None:
    model = tiny_model("gemma3_text")
    with gsm.attach(model, small(sparse={"enabled": True, "budget_tokens": 24})) as handle:
        run(model, prompt(120), 10)
        assert handle.cache.stats().attended_tokens_mean == 24


def test_a_crop_inside_the_last_step_is_exact(tiny_model: Any) -> None:
    model, ids = tiny_model("mistral", sliding_window=16), prompt(60)
    expected = run(model, ids, 8)
    with gsm.attach(model, small(**PLAIN)), torch.inference_mode():
        cache = gsm.Cache(model, small(**PLAIN))
        model(ids[:, :50], **given(model, cache))
        model(prompt(14, seed=9), **given(model, cache))
        cache.crop(-14)
        cache.manager.check_integrity()
        ours = run(model, ids, 8, **given(model, cache))
    assert_equal_run(ours, expected)


def test_a_crop_to_what_is_gone_is_refused(tiny_model: Any) -> None:
    model = tiny_model("mistral", sliding_window=16)
    with gsm.attach(model, small(**PLAIN)), torch.inference_mode():
        cache = gsm.Cache(model, small(**PLAIN))
        for chunk in prompt(80).split(16, dim=1):
            model(chunk, **given(model, cache))
        before = used(cache)
        with pytest.raises(KVError, match="cannot crop to 40 tokens: layers with a window of 16 tokens gave back"):
            cache.crop(-40)
        assert (used(cache), cache.get_seq_length()) == (before, 80)
        cache.manager.check_integrity()
        cache.crop(-80)
        assert used(cache) == 0
        again = model(prompt(20), **given(model, cache)).logits
    torch.testing.assert_close(again, model(prompt(20)).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "policy", [{"policy": "recent", "cold": "drop"}, {"policy": "budget", "warm_size": 16, "cold": "drop"}]
)
def test_windows_and_dropping_policies_together(policy: dict[str, Any], tiny_model: Any) -> None:
    _, logits = run_gsm(tiny_model("gemma2"), small(**policy), prompt(90), 40)
    assert torch.isfinite(logits).all()
