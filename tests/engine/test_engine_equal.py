"""Whatever runs beside a request, and in whatever order it came: the answer is the one it gets alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from running import PLAIN, SPARSE, Outcome, config, drain, solo, used_pages

from gsm.config import SparseConfig
from gsm.engine import Engine, SamplingParams
from gsm.models import LoadedModel
from gsm.smoothing import apply
from support_engine import load_tiny, prompt_ids

WIDER = {"enabled": True, "budget_tokens": 32}
ARMS: dict[str, dict[str, Any]] = {
    "full": config(PLAIN),
    "int8": config(),
    "sparse": config(SPARSE),
    "int4 sparse": config({"sparse": WIDER, "page_size": 8, "hot_size": 16, "warm": {"codec": "int4"}}),
}
LENGTHS = (1, 16, 17, 47, 75)
NEW = SamplingParams(max_tokens=20, logprobs=2)


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LoadedModel:
    return load_tiny(tiny_model("llama"))


# Rows of another number give rounding differences of 1e-6, which may turn a code over: half a step of int8 or int4.
TOLERANCE = {"full": 1e-4, "int8": 1e-2, "sparse": 1e-2, "int4 sparse": 5e-2}


def assert_same(ours: Outcome, alone: Outcome, tolerance: float = 1e-4) -> None:
    """Equal tokens, or a first difference where the two likeliest tokens are closer than the tolerance."""
    pairs = enumerate(zip(ours.token_ids, alone.token_ids, strict=True))
    first = next((i for i, (a, b) in pairs if a != b), len(alone.token_ids))
    assert ours.logprobs[:first] == pytest.approx(alone.logprobs[:first], abs=tolerance)
    if first < len(alone.token_ids):
        assert alone.gaps[first] < tolerance
    else:
        assert (ours.text, ours.finish_reason) == (alone.text, alone.finish_reason)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_arrival_equals_solo(arm: str, seed: int, tiny: LoadedModel) -> None:
    order = random.Random(seed)
    arrivals = {f"r{i}": (order.randrange(12), prompt_ids(n, seed=i)) for i, n in enumerate(LENGTHS)}
    settings = ARMS[arm]
    with Engine(tiny, {**settings, "engine": {**settings["engine"], "prefix_cache": False}}) as engine:

        def add(step: int) -> None:
            for name, (when, ids) in arrivals.items():
                if when == step:
                    engine.add(name, ids, NEW)

        found = drain(engine, add)
        assert used_pages(engine) == 0
    for name, (_, ids) in arrivals.items():
        assert_same(found[name, 0], solo(tiny, settings, ids, NEW), TOLERANCE[arm])


def test_greedy_equals_plain_transformers(tiny: LoadedModel) -> None:
    ids = prompt_ids(45)
    plain = tiny.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, 45:].tolist()
    assert solo(tiny, ARMS["full"], ids, NEW).token_ids == plain


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "gpt_neox", "deepseek_v3", "gpt_oss"])
def test_packed_rows_of_other_families(family: str, tiny_model: Any) -> None:
    loaded = load_tiny(tiny_model(family))
    prompts = {f"r{n}": prompt_ids(n, seed=n) for n in (5, 40, 21)}
    with Engine(loaded, config(PLAIN)) as engine:
        for name, ids in prompts.items():
            engine.add(name, ids, NEW)
        found = drain(engine)
    for name, ids in prompts.items():
        plain = loaded.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
        assert found[name, 0].token_ids == plain.tolist()


@pytest.mark.parametrize("arm", ["full", "int8", "sparse"])
def test_six_requests_in_a_pool_for_two(arm: str, tiny: LoadedModel) -> None:
    settings = ARMS[arm]  # CASES D3; preempted requests compute anew what they had
    prompts, sampling = {f"r{i}": prompt_ids(40, seed=i) for i in range(6)}, SamplingParams(max_tokens=24, logprobs=2)
    with Engine(tiny, {**settings, "engine": {**settings["engine"], "kv_pages": 28}}) as engine:
        for name, ids in prompts.items():
            engine.add(name, ids, sampling)
        found = drain(engine)
        assert used_pages(engine) == 0
        assert engine.stats.num_preemptions > 0
    for name, ids in prompts.items():
        assert_same(found[name, 0], solo(tiny, settings, ids, sampling), TOLERANCE[arm])


@pytest.mark.parametrize("arm", ["full", "int8", "sparse"])
def test_drafts_change_nothing(arm: str, tiny: LoadedModel) -> None:
    settings = ARMS[arm]  # CASES D7: tiny models repeat themselves, so that guesses are sometimes right
    sampling = SamplingParams(max_tokens=60)  # no logprobs: drafts have none
    with Engine(tiny, {**settings, "engine": {**settings["engine"], "draft_tokens": 6}}) as engine:
        prompts = {f"r{i}": prompt_ids(11, seed=i) * 3 for i in range(4)}
        for name, ids in prompts.items():
            engine.add(name, list(ids), sampling)
        found = drain(engine)
        assert used_pages(engine) == 0
        assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens > 0
    for name, ids in prompts.items():
        assert found[name, 0].token_ids == solo(tiny, settings, ids, sampling).token_ids


def test_settings_of_one_request(tiny: LoadedModel) -> None:
    ids = prompt_ids(75)
    narrow = SparseConfig(enabled=True, budget_tokens=16)
    with Engine(tiny, config(PLAIN)) as engine:
        engine.add("dense", list(ids), NEW, salt="a")
        engine.add("sparse", list(ids), NEW, sparse=narrow, salt="b")
        found = drain(engine)
    assert_same(found["dense", 0], solo(tiny, config(PLAIN), ids, NEW))
    assert_same(found["sparse", 0], solo(tiny, config({**PLAIN, **SPARSE}), ids, NEW))


def test_choices_share_the_prompt_and_differ_by_seed(tiny: LoadedModel) -> None:
    sampling = SamplingParams(max_tokens=12, n=3, temperature=1.5, seed=5)
    with Engine(tiny, config(PLAIN)) as engine:
        engine.add("one", prompt_ids(30), sampling)
        engine.add("other", prompt_ids(9, seed=1), SamplingParams(max_tokens=40))
        first = drain(engine)
        assert engine.stats.num_prompt_tokens == 39
        assert used_pages(engine) == 0
        engine.add("one", prompt_ids(30), sampling)
        second = drain(engine)
    texts = [first["one", i].text for i in range(3)]
    assert len(set(texts)) == 3
    assert texts == [second["one", i].text for i in range(3)]


@pytest.mark.parametrize("kv_pages", [None, 24])
@pytest.mark.parametrize(("backend", "precision"), [("torch", "bf16"), ("auto", "fp32")])
def test_smoothing_windows_follow_their_requests(
    kv_pages: int | None, backend: str, precision: str, tiny_model: Any
) -> None:
    """Not auto with bf16: products of many and of few rows differ in the last bit, and bf16 rounds that otherwise."""
    loaded = load_tiny(tiny_model("llama"))
    smoothing = {
        "enable": True,
        "method": "window",
        "window_size": 4,
        "smooth_strength": 0.3,
        "precision": precision,
        "target_layers": ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"],
        "short_request": {"max_tokens": 24, "action": "off"},
    }
    settings = {**config(PLAIN), "smoothing": smoothing, "linear": {"backend": backend}}
    prompts = {f"r{n}": prompt_ids(n, seed=n) for n in (2, 20, 33, 41)}
    samples = torch.tensor([prompt_ids(32, seed=s) for s in range(4)])
    with apply(loaded.model, settings, samples=samples) as applied:

        def run(names: list[str], pages: int | None, drafts: int) -> dict[str, Outcome]:
            merged = {**settings["engine"], "kv_pages": pages, "draft_tokens": drafts}
            with Engine(loaded, {**settings, "engine": merged}, window=applied.window) as engine:
                for name in names:
                    engine.add(name, list(prompts[name]), SamplingParams(max_tokens=18, logprobs=0))
                engine.add("gone", prompt_ids(30, seed=9), NEW)
                found = drain(engine, lambda step: engine.cancel("gone") if step == 3 else None)
                assert applied.window is not None
                assert applied.window.state.num_requests == 0
            return {name: found[name, 0] for name in names}

        together = run(list(prompts), kv_pages, 0)
        drafted = run(list(prompts), kv_pages, 4)
        for name in prompts:
            alone = run([name], None, 0)[name]
            assert together[name].token_ids == alone.token_ids
            assert together[name].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
            assert drafted[name].token_ids == alone.token_ids
