"""Positions without end in the engine: past the window, beside others, with drafts, in a small pool."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from running import PLAIN, config, drain, solo, used_pages

import gsm
from gsm.engine import Engine, SamplingParams
from gsm.errors import ConfigError
from gsm.models import LoadedModel
from support_engine import load_tiny, prompt_ids

LIMIT = 128  # positions the tiny models were trained for
COMPACT = {"positions": "compact", "policy": "recent", "cold": "drop", "hot_size": 64, **PLAIN}
GREEDY = SamplingParams(max_tokens=130, ignore_eos=True)


@pytest.fixture
def tiny(tiny_model: Any) -> LoadedModel:
    return load_tiny(tiny_model("llama", max_position_embeddings=LIMIT))


def test_an_answer_goes_on_past_the_window_as_under_attach(tiny: LoadedModel) -> None:
    ids = prompt_ids(100)
    settings = config({**COMPACT, "prefill_chunk_tokens": 16})
    with gsm.attach(tiny.model, settings) as handle, torch.inference_mode():
        expected = tiny.model.generate(torch.tensor([ids]), max_new_tokens=200, min_new_tokens=200, do_sample=False)
        assert handle.cache.manager.compactor.num_cuts > 2
    with Engine(tiny, settings) as engine:
        assert engine.max_context > 10**6
        assert engine.prefix is None
        engine.add("r", ids, SamplingParams(max_tokens=200, ignore_eos=True))
        assert drain(engine)["r", 0].token_ids == expected[0, 100:].tolist()


@pytest.mark.parametrize("engine_settings", [{}, {"draft_tokens": 4}, {"kv_pages": 34}], ids=["all", "drafts", "pool"])
def test_company_changes_nothing(engine_settings: dict[str, Any], tiny: LoadedModel) -> None:
    """Cuts happen at other steps for everybody; what a small pool preempts is computed anew, and equal."""
    settings = config(COMPACT, prefix_cache=False, **engine_settings)
    prompts = {"0": prompt_ids(20), "1": prompt_ids(90, seed=1), "2": prompt_ids(6, seed=2) * 34}
    arrivals = {name: random.Random(0).randrange(20) + 10 * int(name) for name in prompts}
    with Engine(tiny, settings) as engine:

        def arrive(step: int) -> None:
            for name, ids in prompts.items():
                if arrivals[name] == step:
                    engine.add(name, list(ids), GREEDY)

        outcomes = drain(engine, arrive)
        assert used_pages(engine) == 0
        if "kv_pages" in engine_settings:
            assert engine.stats.num_preemptions > 0
        if "draft_tokens" in engine_settings:  # wrong ones are taken back, also in front of which a cut lies
            assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens
    for name, ids in prompts.items():
        assert outcomes[name, 0].token_ids == solo(tiny, settings, ids, GREEDY).token_ids


def test_memory_does_not_grow_with_the_answer(tiny: LoadedModel) -> None:
    used = []
    with Engine(tiny, config(COMPACT)) as engine:
        most = engine.room.bytes_of(10**6)
        engine.add("r", prompt_ids(50), SamplingParams(max_tokens=500, ignore_eos=True))
        drain(engine, lambda step: used.append(engine.room.used_bytes))
    assert max(used) == max(used[:200])
    assert max(used) <= most


def test_choices_part_after_a_cut(tiny: LoadedModel) -> None:
    """Pages shared by two choices are copied before they turn."""
    sampling = SamplingParams(max_tokens=120, ignore_eos=True, n=2, temperature=1.0, seed=3)
    with Engine(tiny, config(COMPACT)) as engine:
        engine.add("r", prompt_ids(150), sampling)
        outcomes = drain(engine)
        assert used_pages(engine) == 0
    assert len(outcomes["r", 0].token_ids) == len(outcomes["r", 1].token_ids) == 120
    assert outcomes["r", 0].token_ids != outcomes["r", 1].token_ids


def test_chunks_that_do_not_fit_beside_what_is_kept_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="leaves room for 52 beside"):
        Engine(tiny, config({**COMPACT, "hot_size": 64}, chunk_tokens=64, max_batch_tokens=80))
    assert tiny.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("other", [{"reasoning": {"enabled": True}}, {"prompt": {"history": {"mode": "kv"}}}])
def test_two_ways_to_take_pages_out_are_refused_together(other: dict[str, Any], tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="both take pages out; use one of them"):
        Engine(tiny, {**config(COMPACT), **other})
