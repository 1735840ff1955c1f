"""Thoughts fade in the store, in attach, in the engine; old turns give their KV back; positions stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prompt_cases import chat, demo_tokenizer

import gsm
from gsm.arch import describe
from gsm.config import load_config
from gsm.engine import Engine, SamplingParams
from gsm.errors import ConfigError, InputError
from gsm.integrations.transformers import Cache, prefill
from gsm.integrations.transformers.grading import Lowered
from gsm.kv.policies.graded import COLD, HOT, REMOVED, WARM, Thinking, graded_tiers, range_tiers
from gsm.models import LoadedModel

CACHE: dict[str, Any] = {"page_size": 16, "hot_size": 32, "recent_tokens": 16, "sink_tokens": 4}
REASONING: dict[str, Any] = {
    "enabled": True,
    "min_tokens": 32,
    "high": {"keep": 0.5, "heavy": 0.0, "int8": 0.2, "running": 0.5},
}
CONFIG = {"cache": CACHE, "reasoning": REASONING, "engine": {"chunk_tokens": 32, "max_batch_tokens": 64}}
STEP = "Then I look at the number of sheep in the field and count them one by one, slowly.\n\n"
PROMPT = "<|im_start|>user\nHow many sheep are there?<|im_end|>\n<|im_start|>assistant\n<think>\n"
TRANSCRIPT = PROMPT + STEP * 12 + "</think>\n\nThere are twelve sheep in the field, and all of them are white today."


def ids_of(text: str) -> list[int]:
    return list(demo_tokenizer()(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LoadedModel:
    model = tiny_model("llama", vocab_size=len(demo_tokenizer()), max_position_embeddings=1024)
    return LoadedModel(model, demo_tokenizer(), "tiny", "tiny", describe(model.config))


def test_tiers_by_age() -> None:
    steps = ((10, 40), (40, 80), (80, 110))  # 100 tokens
    running = graded_tiers([Thinking(steps, False)], 0.2, 0.1, 0, 130, 1, running=0.5).tolist()
    assert running[:10] == [HOT] * 10
    assert running[10:60] == [REMOVED] * 50
    assert running[60:100] == [COLD] * 40
    assert running[100:110] == [WARM] * 10
    assert running[110:] == [HOT] * 20
    over = graded_tiers([Thinking(steps, True)], 0.5, 0.1, 90, 130, 1).tolist()
    assert over[10:60] == [REMOVED] * 50
    assert over[60:110] == [COLD] * 50
    floor = graded_tiers([Thinking(steps, False)], 0.0, 0.0, 90, 130, 1, running=0.0).tolist()
    assert floor.count(REMOVED) == 10
    assert REMOVED not in graded_tiers([Thinking(steps, False)], 0.0, 0.0, 0, 130, 1).tolist()
    pages = graded_tiers([Thinking(steps, True)], 0.0, 0.0, 0, 130, 16).tolist()
    assert pages == [HOT, *[REMOVED] * 5, HOT, HOT], "a page with a protected token stays"
    assert range_tiers([(16, 40)], REMOVED, 64, 16).tolist() == [HOT, REMOVED, HOT, HOT]


def test_attach_lowers_thoughts_and_nothing_else(tiny: LoadedModel) -> None:
    ids = ids_of(TRANSCRIPT)
    start, end = len(ids_of(PROMPT)), len(ids_of(TRANSCRIPT.split("</think>")[0]))
    with gsm.attach(tiny.model, CONFIG, tokenizer=tiny.tokenizer) as handle:
        cache = handle.new_cache()
        prefill(tiny.model, torch.tensor([ids]), cache, 32)
        positions = cache.explain()
        cache.manager.check_integrity()
        bytes_graded = cache.stats().kv_bytes
        tiers = positions.tokens_by_tier()[0, 0].tolist()
        assert positions.num_tokens == len(ids) == cache.get_seq_length()
        removed = [i for i, tier in enumerate(tiers) if tier == 3]
        assert removed
        assert start <= min(removed)
        assert max(removed) < start + (end - start) // 2 + 16
        assert all(tiers[i] in (0, 1) for i in range(start))
        assert all(tiers[i] in (0, 1) for i in range(end + 3, len(ids)))
        assert {tiers[i] for i in range((start + end) // 2 + 32, end - 32)} == {2}
        place = cache.explain(0, removed[0])[0]
        assert place.removed_by == "reasoning"
    with gsm.attach(tiny.model, {"cache": CACHE}) as handle:
        plain = handle.new_cache()
        prefill(tiny.model, torch.tensor([ids]), plain, 32)
        assert bytes_graded < 0.8 * plain.stats().kv_bytes


def test_heads_keep_what_they_attend_to(tiny: LoadedModel) -> None:
    ids = ids_of(TRANSCRIPT)
    kept = {}
    for heavy in (0.0, 0.6):
        config = {**CONFIG, "reasoning": {**REASONING, "high": {"keep": 0.5, "heavy": heavy, "int8": 0.2}}}
        with gsm.attach(tiny.model, config, tokenizer=tiny.tokenizer) as handle:
            cache = handle.new_cache()
            prefill(tiny.model, torch.tensor([ids]), cache, 32)
            cache.manager.check_integrity()
            kept[heavy] = (cache.explain().tokens_by_tier() != 3).flatten(0, 1)
    by_age, by_mass = (kept[heavy].unique(dim=0) for heavy in (0.0, 0.6))
    assert len(by_age) == 1
    assert len(by_mass) > 1, "every head has pages of its own"
    assert abs(int(kept[0.0].sum()) - int(kept[0.6].sum())) <= 32 * len(kept[0.0]), "for the same memory"


def test_chunks_of_any_size_end_the_same(tiny: LoadedModel) -> None:
    ids = ids_of(TRANSCRIPT)
    found = []
    for chunk in (len(ids), 48, 7):
        with gsm.attach(tiny.model, CONFIG, tokenizer=tiny.tokenizer) as handle:
            cache = handle.new_cache()
            prefill(tiny.model, torch.tensor([ids]), cache, chunk)
            found.append(cache.explain().tokens_by_tier())
    # what is protected and what is gone; hot or warm depends on the last chunk alone
    assert torch.equal(found[0] == 3, found[1] == 3)
    assert torch.equal(found[0] == 3, found[2] == 3)


def test_generate_crop_fork_and_batches(tiny: LoadedModel) -> None:
    ids = torch.tensor([ids_of(TRANSCRIPT)])
    with gsm.attach(tiny.model, CONFIG, tokenizer=tiny.tokenizer) as handle:
        tiny.model.generate(ids, max_new_tokens=20, do_sample=False)
        cache = handle.cache
        assert cache is not None
        assert cache.stats().num_dropped > 0
        twin = cache.fork()
        cache.crop(-30)
        cache.manager.check_integrity()
        tiny.model(ids[:, :40], past_key_values=cache, use_cache=True)
        tiny.model(ids[:, :5], past_key_values=twin, use_cache=True)
        cache.manager.check_integrity()
        tiny.model.generate(ids[:, -60:], max_new_tokens=8, num_beams=2, do_sample=False)


def test_without_tokenizer_or_ids_is_said(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="pass the tokenizer"), gsm.attach(tiny.model, CONFIG):
        pass
    with pytest.raises(ConfigError, match="pass the tokenizer"):
        Cache(tiny.model, CONFIG)


def run(engine: Engine, request_id: str, ids: list[int], max_tokens: int = 24, **kwargs: Any) -> Any:
    request = engine.add(request_id, ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **kwargs)
    tiers = None
    while engine.has_work:
        slot = request.leader.slot
        if slot is not None:
            tiers = engine.manager.explain(slot).tokens_by_tier()
        engine.step()
    engine.manager.check_integrity()
    return request, tiers


def test_the_engine_grades_by_effort_and_keeps_prefixes(tiny: LoadedModel) -> None:
    ids = ids_of(TRANSCRIPT)
    with Engine(tiny, CONFIG) as engine:
        dropped = {}
        for effort in ("max", "high", 60, "low", "none"):
            _, tiers = run(engine, str(effort), ids, effort=effort)
            dropped[effort] = int((tiers == 3).sum())
        assert list(dropped.values()) == sorted(dropped.values())
        assert dropped["max"] < dropped["none"]
        # the same answer from a prefix that was found as from none
        first, _ = run(engine, "again", ids)
        assert first.num_cached_tokens == len(ids_of(PROMPT)) // 16 * 16
    with Engine(tiny, {**CONFIG, "engine": {**CONFIG["engine"], "prefix_cache": False}}) as engine:
        cold, _ = run(engine, "cold", ids)
        assert cold.leader.token_ids == first.leader.token_ids
        with pytest.raises(InputError, match="reasoning effort 'huge'"):
            engine.add("x", ids, effort="huge")


def test_preempted_requests_end_as_they_would_alone(tiny: LoadedModel) -> None:
    ids = ids_of(TRANSCRIPT)
    limited = {**CONFIG, "engine": {**CONFIG["engine"], "kv_pages": 24, "prefix_cache": False}}
    with Engine(tiny, CONFIG) as engine:
        alone, _ = run(engine, "alone", ids, 60)
    with Engine(tiny, limited) as engine:
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        requests = [engine.add(str(i), ids, sampling) for i in range(3)]
        while engine.has_work:
            engine.step()
        engine.manager.check_integrity()
        assert all(request.leader.token_ids == alone.leader.token_ids for request in requests)


def test_old_turns_give_their_kv_back_and_prefixes_stay_shared(tiny: LoadedModel) -> None:
    contents = [f"{i} {STEP}" for i in range(10)]
    text = demo_tokenizer().apply_chat_template(chat(*contents, "And now?"), tokenize=False, add_generation_prompt=True)
    ids = ids_of(text)
    config = {"cache": CACHE, "engine": CONFIG["engine"]}
    lowered = Lowered(((20, 160),), "drop", len(ids))
    with Engine(tiny, config) as engine:
        plain, _ = run(engine, "plain", ids)
        request, tiers = run(engine, "lowered", ids, lowered=lowered)
        assert request.num_cached_tokens >= len(ids) - 32, "prompt pages are the same for everybody"
        gone = (tiers == 3)[0, 0].nonzero().flatten().tolist()
        assert gone == list(range(32, 160))
        again, _ = run(engine, "plain again", ids)
        assert again.leader.token_ids == plain.leader.token_ids
    with gsm.attach(tiny.model, config) as handle:
        cache = handle.new_cache()
        prefill(tiny.model, torch.tensor([ids]), cache, 32)
        cache.lower([(20, 160)])
        assert (cache.explain().tokens_by_tier() == 3)[0, 0].nonzero().flatten().tolist() == list(range(32, 160))
        assert cache.explain(0, 100)[0].removed_by == "history"
        assert cache.get_seq_length() == len(ids)
        cache.manager.check_integrity()


def test_sections_are_live_or_say_why_not() -> None:
    from gsm.config.live import needs_restart

    off = load_config({"cache": CACHE})
    on = load_config(CONFIG)
    assert any("reasoning.enabled" in reason for reason in needs_restart(off, on))
    assert needs_restart(on, load_config({**CONFIG, "reasoning": {**REASONING, "effort": "max"}})) == []
