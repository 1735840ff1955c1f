"""Blocks of running requests given back: who starts when, right answers, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

Start = Callable[..., Any]

HOT = 128
RECENT = {"cache": {"policy": "recent", "cold": "drop", "hot_size": HOT, "recent_tokens": 64, "sink_tokens": 4}}
BUDGET = {
    "cache": {
        **RECENT["cache"],
        "policy": "budget",
        "warm_size": 128,
        "sparse": {"enabled": True, "budget_tokens": 256},
    }
}
SMALL_POOL = {"num_gpu_blocks_override": 41, "max_model_len": 1024}  # 40 blocks: one request of 1024 tokens and a bit


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def manager_of(llm: Any) -> Any:
    return scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0]


def free_blocks(llm: Any) -> int:
    return int(scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks())


def a_manager(cache: dict[str, Any], num_blocks: int) -> Any:
    """A manager with one request "r" that holds `num_blocks` blocks, without the engine around it."""
    from types import SimpleNamespace

    from gsm.config import load_config
    from gsm.integrations.vllm.kv import GsmFullAttentionManager
    from gsm.integrations.vllm.live import Live

    manager: Any = object.__new__(GsmFullAttentionManager)
    null = SimpleNamespace(is_null=True, block_id=0)
    vars(manager).update(
        gsm=Live(load_config({"cache": cache})), facts={}, num_dropped_blocks=0, block_size=32, _null_block=null,
        req_to_blocks={"r": [SimpleNamespace(is_null=False, block_id=i + 1) for i in range(num_blocks)]},
        block_pool=SimpleNamespace(free_blocks=lambda blocks: None),
    )  # fmt: skip
    return manager


def both(llm: Any, ids: list[list[int]], new_tokens: int, tools: Any) -> tuple[list[Any], int]:
    """Outputs of two requests, and the most that ran at a time."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    for i, one in enumerate(ids):
        engine.add_request(str(i), {"prompt_token_ids": one}, greedy)
    found, most = {}, 0
    while engine.has_unfinished_requests():
        for answer in engine.step():
            if answer.finished:
                found[answer.request_id] = tools.output_of(answer)
        most = max(most, len(scheduler_of(llm).running))
    return [found[str(i)] for i in range(len(ids))], most


@pytest.fixture(scope="module")
def at_a_time_without(start: Start, tools: Any) -> int:
    """How many of the two requests below run together where nothing is dropped."""
    return both(start(None, **SMALL_POOL), tools.prompts([600, 700]), 64, tools)[1]


@pytest.fixture
def recent(at_a_time_without: int, start: Start) -> Any:
    return start(RECENT, **SMALL_POOL)


class TestRecent:
    def test_the_second_request_starts_while_the_first_runs(
        self, recent: Any, at_a_time_without: int, tools: Any
    ) -> None:
        ids = tools.prompts([600, 700])  # 21 and 24 blocks with their answers
        baseline = free_blocks(recent)
        found, most = both(recent, ids, 64, tools)
        assert most == 2
        assert free_blocks(recent) == baseline
        assert at_a_time_without == 1
        alone = [both(recent, [one], 64, tools)[0][0] for one in ids]
        assert tools.same(found, alone)

    def test_what_is_read_is_sinks_and_the_newest_blocks(self, recent: Any, tiny_llama: Any, tools: Any) -> None:
        (prompt,) = tools.prompts([333], seed=3)
        (found,), _ = both(recent, [prompt], 40, tools)

        def mask(n: int) -> torch.Tensor:
            hidden = torch.full((n, n), -1e9).triu(1)
            block = torch.arange(n) // 32
            for p in range(len(prompt), n):
                first = (max(len(prompt), p // 32 * 32) - HOT) // 32
                hidden[p][(block >= 1) & (block < first)] = -1e9
            return hidden

        tiny_llama.set_attn_implementation("eager")
        assert tools.same([found], [tools.reference(tiny_llama, prompt, 40, mask)])
        tiny_llama.set_attn_implementation("sdpa")

    def test_random_requests_with_aborts_leave_nothing(self, recent: Any, tools: Any) -> None:
        from vllm import SamplingParams

        rng, engine, baseline = random.Random(0), recent.llm_engine, free_blocks(recent)
        waiting = tools.prompts([rng.choice([20, 100, 300, 600, 800]) for _ in range(200)], seed=4)
        alive: set[str] = set()
        dropped = manager_of(recent).num_dropped_blocks
        while waiting or engine.has_unfinished_requests():
            while waiting and len(alive) < 6 and rng.random() < 0.7:
                name = f"x{len(waiting)}"
                parameters = SamplingParams(
                    temperature=0.0, max_tokens=rng.randint(1, 60), ignore_eos=True, detokenize=False
                )
                engine.add_request(name, {"prompt_token_ids": waiting.pop()}, parameters)
                alive.add(name)
            alive -= {answer.request_id for answer in engine.step() if answer.finished}
            if alive and rng.random() < 0.1:
                name = rng.choice(sorted(alive))
                engine.abort_request([name])
                alive.discard(name)
        engine.step()
        manager = manager_of(recent)
        assert manager.num_dropped_blocks > dropped
        assert free_blocks(recent) == baseline
        assert not manager.facts
        assert not any(manager.req_to_blocks.values())

    def test_answers_after_a_drop_are_not_cached_as_exact(self, recent: Any, tools: Any) -> None:
        (prompt,) = tools.prompts([512], seed=7)
        recent.reset_prefix_cache()
        ((answer, _),), _ = both(recent, [prompt], 64, tools)
        longer = prompt + answer
        hit, _ = both(recent, [longer], 10, tools)
        recent.reset_prefix_cache()
        assert tools.same(both(recent, [longer], 10, tools)[0], hit, within=1e-6)


class TestBudget:
    def test_blocks_with_little_attention_go(self, start: Start, tools: Any) -> None:
        llm = start(BUDGET, num_gpu_blocks_override=65)
        ids = tools.prompts([900, 700, 300])
        together = tools.generate(llm, ids, 70)
        assert manager_of(llm).num_dropped_blocks > 20
        assert free_blocks(llm) == 64
        assert tools.same([tools.generate(llm, [one], 70)[0] for one in ids], together)
        more = {"cache": {**BUDGET["cache"], "warm_size": 2000}}
        assert not tools.reload(llm, more).get("error")
        dropped = manager_of(llm).num_dropped_blocks
        tools.generate(llm, ids, 40)
        assert manager_of(llm).num_dropped_blocks == dropped

    def test_what_goes_got_the_least_attention(self, vllm_installed: None) -> None:
        manager = a_manager({**BUDGET["cache"], "warm_size": 64}, num_blocks=12)
        manager.remove_skipped_blocks("r", 380, 300)
        assert manager.num_dropped_blocks == 0  # nothing is known yet
        mass = [0.5, 0.1, 0.3, 0.05, 0.2, 0.01, 0.02, 0.15, 0.03, 0.9, 0.9, 0.9]
        manager.observe("r", list(range(12)), mass, 0.5)
        manager.remove_skipped_blocks("r", 384, 300)
        assert manager.facts["r"].gone == [1, 3, 5, 6, 7]  # of 1 to 7, 2 and 4 have most; 0 has sinks, 8 on are hot

    def test_pages_with_much_attention_stay_and_warm_size_bounds_every_policy(self, vllm_installed: None) -> None:
        mass = [0.5, 0.1, 0.3, 0.05, 0.2, 0.01, 0.02, 0.15, 0.03, 0.9, 0.9, 0.9]
        threshold = {**BUDGET["cache"], "policy": "threshold", "threshold": 0.04, "warm_size": 96, "sink_mass": 0.09}
        manager = a_manager(threshold, num_blocks=12)
        manager.remove_skipped_blocks("r", 380, 300)
        manager.observe("r", list(range(12)), mass, 0.5)
        manager.remove_skipped_blocks("r", 384, 300)
        assert manager.facts["r"].gone == [3, 5, 6]  # the best three of 1 to 7 and all above sink_mass stay

    def test_a_request_within_its_budget_is_judged_too(self, start: Start, tools: Any) -> None:
        covered = {**BUDGET["cache"], "sparse": {"enabled": True, "budget_tokens": 1024}}
        llm = start({"cache": covered}, num_gpu_blocks_override=65)
        tools.generate(llm, tools.prompts([600]), 40)
        assert manager_of(llm).num_dropped_blocks > 5

    def test_ranks_report_the_largest_share(self, vllm_installed: None) -> None:
        from gsm.integrations.vllm.connector import GsmWorkerMetadata

        one = GsmWorkerMetadata({7: ([0, 1], [0.1, 0.5]), 9: ([0], [0.2])})
        two = GsmWorkerMetadata({7: ([0, 1], [0.3, 0.4])}, {"cache": {}})
        merged = one.aggregate(two)
        assert merged.estimates == {7: ([0, 1], [0.3, 0.5]), 9: ([0], [0.2])}
        assert merged.config == {"cache": {}}
