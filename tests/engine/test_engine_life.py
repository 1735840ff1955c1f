"""Queues, cancellation, limits and failures: nothing is lost, no page stays behind."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from running import PLAIN, config, drain, used_pages

from gsm.engine import Engine, SamplingParams
from gsm.errors import EngineError, InputError, QueueFull, UnsupportedModel
from gsm.models import LoadedModel
from support_engine import load_tiny, prompt_ids


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LoadedModel:
    return load_tiny(tiny_model("llama"))


@pytest.mark.parametrize("when", [0, 1, 2, 4, 7])
def test_cancel_at_any_point_gives_every_page_back(when: int, tiny: LoadedModel) -> None:
    with Engine(tiny, config(prefix_cache=False)) as engine:
        engine.add("one", prompt_ids(60), SamplingParams(max_tokens=30))
        engine.add("many", prompt_ids(20, seed=1), SamplingParams(max_tokens=30, n=3, temperature=1.0))
        engine.add("stays", prompt_ids(9, seed=2), SamplingParams(max_tokens=5))

        def cancel(step: int) -> None:
            if step == when:
                engine.cancel("one")
                engine.cancel("many")
                engine.cancel("unknown")

        found = drain(engine, cancel)
        assert found["stays", 0].finish_reason == "length"
        assert {found[key].finish_reason for key in found if key[0] != "stays"} == {"abort"}
        assert used_pages(engine) == 0
        assert not engine.requests


def test_a_full_queue_and_impossible_requests(tiny: LoadedModel) -> None:
    with Engine(tiny, config(max_waiting=1, kv_pages=20)) as engine:
        with pytest.raises(InputError, match="KV memory"):
            engine.add("large", prompt_ids(70), SamplingParams(max_tokens=30))
        with pytest.raises(InputError, match="vocabulary"):
            engine.add("word", [500], SamplingParams())
        with pytest.raises(InputError, match="empty"):
            engine.add("none", [], SamplingParams())
        with pytest.raises(InputError, match="512"):
            engine.add("long", prompt_ids(500), SamplingParams(max_tokens=30))
        engine.add("one", prompt_ids(8), SamplingParams(max_tokens=3))
        with pytest.raises(QueueFull):
            engine.add("two", prompt_ids(8), SamplingParams(max_tokens=3))
        assert drain(engine)["one", 0].finish_reason == "length"


def test_who_waits_too_long_is_told(tiny: LoadedModel) -> None:
    with Engine(tiny, config(max_running=1, queue_timeout_s=0.01)) as engine:
        engine.add("first", prompt_ids(8), SamplingParams(max_tokens=30))
        engine.step()
        engine.add("late", prompt_ids(8), SamplingParams(max_tokens=3))
        time.sleep(0.02)
        found = drain(engine)
        assert found["late", 0].finish_reason == "timeout"
        assert found["first", 0].finish_reason == "length"


def test_tenants_take_turns(tiny: LoadedModel) -> None:
    with Engine(tiny, config(max_running=1)) as engine:
        for i in range(3):
            engine.add(f"a{i}", prompt_ids(8, seed=i), SamplingParams(max_tokens=2), tenant="a")
        engine.add("b0", prompt_ids(8, seed=9), SamplingParams(max_tokens=2), tenant="b")
        order = [request_id for request_id, _ in drain(engine)]
        assert order == ["a0", "b0", "a1", "a2"]


def test_a_failing_model_ends_its_requests_only(tiny: LoadedModel) -> None:
    with Engine(tiny, config(PLAIN)) as engine:

        def fail(*_: Any) -> None:
            raise ValueError("made to fail")

        engine.add("unlucky", prompt_ids(30), SamplingParams(max_tokens=5))
        hook = tiny.model.model.layers[1].register_forward_pre_hook(fail)
        try:
            found = drain(engine)
        finally:
            hook.remove()
        assert found["unlucky", 0].finish_reason == "error"
        assert used_pages(engine) == 0
        engine.add("lucky", prompt_ids(30), SamplingParams(max_tokens=5))
        assert drain(engine)["lucky", 0].finish_reason == "length"


def test_three_failures_in_a_row_are_the_end(tiny: LoadedModel) -> None:
    with Engine(tiny, config(PLAIN, max_running=1)) as engine:

        def fail(*_: Any) -> None:
            raise ValueError("made to fail")

        hook = tiny.model.model.layers[1].register_forward_pre_hook(fail)
        try:
            for i in range(3):
                engine.add(f"r{i}", prompt_ids(8), SamplingParams(max_tokens=2))
            with pytest.raises(EngineError, match="made to fail"):
                drain(engine)
        finally:
            hook.remove()


def test_the_model_is_given_back(tiny: LoadedModel) -> None:
    ids = torch.tensor([prompt_ids(20)])
    before = tiny.model(ids).logits
    with Engine(tiny, config()):
        assert tiny.model.config._attn_implementation == "gsm"
    assert tiny.model.config._attn_implementation == "sdpa"
    assert torch.equal(tiny.model(ids).logits, before)


def test_what_the_engine_does_not_serve_is_refused(tiny: LoadedModel, tiny_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="state"):
        Engine(load_tiny(tiny_model("qwen3_next")), config())
    assert tiny.model.config._attn_implementation == "sdpa"


def test_two_engines_in_two_threads(tiny: LoadedModel, tiny_model: Any) -> None:
    other = load_tiny(tiny_model("llama", seed=1))  # CASES D12: two models, prompts and configs at the same time
    jobs = [
        (tiny, config(PLAIN), prompt_ids(60)),
        (other, config({"page_size": 8, "hot_size": 16}), prompt_ids(45, seed=3)),
    ]

    def run(job: tuple[LoadedModel, dict[str, Any], list[int]]) -> list[int]:
        loaded, settings, ids = job
        with Engine(loaded, settings) as engine:
            engine.add("r", list(ids), SamplingParams(max_tokens=25))
            return drain(engine)["r", 0].token_ids

    alone = [run(job) for job in jobs]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, jobs)) == alone


@pytest.mark.slow
def test_a_thousand_requests_leave_no_page(tiny: LoadedModel) -> None:
    with Engine(tiny, config(kv_pages=100)) as engine:  # CASES D4
        for i in range(1000):
            engine.add(f"r{i}", prompt_ids(1 + i % 7, seed=i % 50), SamplingParams(max_tokens=1))
            if i % 8 == 7:
                drain(engine)
        assert used_pages(engine) == 0
        capacity = engine.manager.groups[0].pages.capacity
        assert capacity <= 100 * engine.manager.groups[0].streams_per_slot
        assert engine.prefix is not None
        engine.prefix.clear()
        assert engine.manager.groups[0].pages.num_used == 0
