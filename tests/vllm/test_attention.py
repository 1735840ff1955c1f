"""Page selection inside vLLM: everything selected equals vLLM without GSM; a selection equals our transformers path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Start = Callable[..., Any]

ALL = {"cache": {"sparse": {"enabled": True, "budget_fraction": 1.0}}, "vllm": {"always_select": True}}
SPARSE = {"cache": {"page_size": 32, "warm": {"codec": "none"}, "sparse": {"enabled": True, "budget_tokens": 256}}}
LENGTHS = [700, 300, 1200, 64]


@pytest.fixture(scope="module")
def stock(start: Start, tools: Any) -> list[Any]:
    return tools.generate(start(None), tools.prompts(LENGTHS), 40)


@pytest.fixture
def selecting(stock: Any, start: Start) -> Any:
    return start(ALL)


class TestSelectAll:
    def test_equals_stock_with_chunked_prefill_and_prefix_hits(self, selecting: Any, stock: Any, tools: Any) -> None:
        assert not tools.reload(selecting, ALL).get("error")
        ids = tools.prompts(LENGTHS)
        assert tools.same(tools.generate(selecting, ids, 40), stock)
        assert tools.same(tools.generate(selecting, ids, 40), stock)  # every full block of the prompts is a hit now
        assert tools.same(tools.generate(selecting, ids[2:3], 40), stock[2:3])

    def test_nothing_configured_is_stock(self, selecting: Any, stock: Any, tools: Any) -> None:
        assert not tools.reload(selecting, {}).get("error")
        assert tools.same(tools.generate(selecting, tools.prompts(LENGTHS), 40), stock)

    @pytest.mark.parametrize("vllm", [{"dense_layers": [0, 1, 2]}, {"dense_below_tokens": 2000}])
    def test_dense_layers_and_dense_lengths(self, selecting: Any, stock: Any, tools: Any, vllm: dict[str, Any]) -> None:
        assert not tools.reload(selecting, {**SPARSE, "vllm": vllm}).get("error")
        assert tools.same(tools.generate(selecting, tools.prompts(LENGTHS), 40), stock)


class TestSelection:
    def test_company_and_prefix_hits_change_nothing(self, selecting: Any, stock: Any, tools: Any) -> None:
        tools.reload(selecting, SPARSE)
        ids = tools.prompts(LENGTHS)
        together = tools.generate(selecting, ids, 40)
        assert not tools.same(together, stock)
        assert tools.same(tools.generate(selecting, ids, 40), together)
        selecting.reset_prefix_cache()
        assert tools.same([tools.generate(selecting, [one], 40)[0] for one in ids], together)

    def test_blocks_filled_while_selection_was_off_are_summarised(self, selecting: Any, tools: Any) -> None:
        tools.reload(selecting, SPARSE)
        ids = tools.prompts([900], seed=5)
        expected = tools.generate(selecting, ids, 40)
        selecting.reset_prefix_cache()
        tools.reload(selecting, {})
        tools.generate(selecting, ids, 1)  # the prompt's blocks are cached now, nobody has summarised them
        tools.reload(selecting, SPARSE)
        assert tools.same(tools.generate(selecting, ids, 40), expected)

    def test_the_prefix_cache_holds_prompts_only(self, selecting: Any, tools: Any) -> None:
        tools.reload(selecting, SPARSE)
        selecting.reset_prefix_cache()
        (prompt,) = tools.prompts([512], seed=6)
        ((answer, _),) = tools.generate(selecting, [prompt], 100)
        tools.reload(selecting, {})
        after = tools.generate(selecting, [prompt + answer], 20)
        selecting.reset_prefix_cache()
        assert tools.same(tools.generate(selecting, [prompt + answer], 20), after, within=1e-6)

    @pytest.mark.parametrize("scorer", ["clusters", "anchor", "mean_sigma", "minmax"])
    def test_reads_what_the_transformers_path_reads(self, tiny_llama: Any, scorer: str, forced: Any) -> None:
        self._compare(forced, tiny_llama, _with_scorer(scorer))

    def test_blocks_of_16_tokens_read_it_too(self, tiny_llama: Any, start: Start) -> None:
        settings = {**_with_scorer("clusters"), "vllm": {"block_tokens": 16}}
        settings["cache"]["page_size"] = 16
        self._compare(start(settings, forced=True, block_size=16), tiny_llama, settings, seed=3)

    def _compare(self, forced: Any, tiny_llama: Any, settings: dict[str, Any], seed: int = 0) -> None:
        """On text of which no two pages look alike but for the last bit."""
        from gsm.config import load_config
        from gsm.quality import GsmArm, PlainArm, WindowPlan, teacher_forced
        from gsm.quality.vllm import VllmArm

        config = load_config(settings)
        ids = torch.randint(3, 512, (1100,), generator=torch.Generator().manual_seed(seed))
        arms = [VllmArm(forced, config, "vllm"), PlainArm(tiny_llama, name="full")]
        plan = WindowPlan(900, 1, 40, 1)
        scores = dict(teacher_forced(GsmArm(tiny_llama, config, name="gsm"), arms, ids, plan))
        assert scores["vllm"][0].kl < 1e-7
        assert scores["full"][0].kl > 1e-3  # a selection is not everything


def _with_scorer(scorer: str) -> dict[str, Any]:
    cache = {**SPARSE["cache"], "backend": "torch", "sparse": {**SPARSE["cache"]["sparse"], "scorer": scorer}}
    return {"cache": cache}


@pytest.fixture
def forced(start: Start) -> Any:
    """An engine whose tokens are chosen from outside."""
    return start(SPARSE, forced=True)


class TestDriver:
    def test_forced_tokens_give_the_models_own_logits(self, forced: Any, tiny_llama: Any) -> None:
        from gsm.quality import PlainArm, WindowPlan, teacher_forced
        from gsm.quality.vllm import VllmArm, full_cache

        ids = torch.randint(3, 512, (500,), generator=torch.Generator().manual_seed(1))
        full = VllmArm(forced, full_cache(forced.live.config), "vllm")
        ((_, (score,)),) = teacher_forced(PlainArm(tiny_llama), [full], ids, WindowPlan(400, 1, 20, 1))
        assert score.kl < 1e-7
        assert score.top1 == 1.0

    def test_a_fork_goes_on_where_its_origin_is(self, forced: Any) -> None:
        from gsm.quality.vllm import VllmArm

        ids = torch.randint(3, 512, (1, 300), generator=torch.Generator().manual_seed(2))
        with VllmArm(forced, forced.live.config, "vllm").open() as session:
            session.prefill(ids[:, :290])
            fork = session.fork()
            ahead = fork.step(ids[:, 290:291])
            fork.prefill(ids[:, 291:])
            fork.close()
            assert torch.equal(session.step(ids[:, 290:291]), ahead)


class TestSpeculation:
    def test_several_tokens_at_once_are_read_densely(self, start: Start, tools: Any) -> None:
        """Repeating prompts, so that n-gram guesses come up; everything selected must still equal stock."""
        ids = [(one[:50] * 20)[:700] for one in tools.prompts([50, 50], seed=9)]
        expected = tools.generate(start(None), ids, 40)
        guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        assert tools.same(tools.generate(start(ALL, speculative_config=guess), ids, 40), expected, within=1e-3)


class TestLowPrecisionCache:
    @pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 cache on CPU needs AVX-512")
    def test_fp8_keys_are_summarised_from_their_codes(self, start: Start, tools: Any) -> None:
        ids = tools.prompts([400, 700])
        options = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
        expected = tools.generate(start(None, **options), ids, 16)
        llm = start(ALL, **options)
        assert tools.same(tools.generate(llm, ids, 16), expected)
        tools.reload(llm, SPARSE)
        assert all(len(tokens) == 16 for tokens, _ in tools.generate(llm, ids, 16))
