"""Which blocks are read, as pure tensor functions: no vLLM needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gsm.config import load_config
from gsm.core.scorers import make_scorer
from gsm.integrations.vllm.pages import ScrambledKeys, head_pages, read_plain_keys
from gsm.integrations.vllm.selection import Rows, blocks_to_read, choose, page_scores, plan_rows
from gsm.integrations.vllm.summaries import KnownBlocks, Summaries

BLOCK, HEADS, GROUP, DIM, BLOCKS = 8, 2, 3, 16, 40


def a_store(scorer: str = "clusters") -> tuple[Summaries, Tensor]:
    torch.manual_seed(0)
    keys = torch.randn(BLOCKS, HEADS, BLOCK, DIM)
    summaries = Summaries(make_scorer(scorer, 2.5), BLOCKS, HEADS, DIM, torch.device("cpu"))
    summaries.store(torch.arange(BLOCKS), keys)
    return summaries, keys


def some_rows(lengths: list[int], **sparse: object) -> Rows:
    config = load_config(
        {
            "cache": {
                "page_size": 8,
                "sink_tokens": 4,
                "recent_tokens": 16,
                "hot_size": 16,
                "sparse": {"enabled": True, **sparse},
            }
        }
    ).cache
    torch.manual_seed(1)
    tables = torch.stack([torch.randperm(BLOCKS - 1)[:20] + 1 for _ in lengths])
    return plan_rows(config, tables, lengths, BLOCK)


class TestChoose:
    def test_reads_sinks_recent_and_the_best_with_the_newest_last(self) -> None:
        rows = some_rows([150, 101], budget_tokens=56)
        scores = torch.rand(2, HEADS, rows.tables.shape[1])
        chosen = choose(scores, rows)
        for b, length in enumerate((150, 101)):
            table = rows.tables[b].tolist()
            count, last = int(rows.counts[b]), (length - 1) // BLOCK
            recent = range((length - 16) // BLOCK, last + 1)
            for h in range(HEADS):
                logical = [table.index(x) for x in chosen[b, h, :count].tolist()]
                assert logical[-1] == last
                assert {0, *recent} <= set(logical)
                assert len(set(logical)) == count
                others = sorted(set(range(1, recent[0])), key=lambda p: -scores[b, h, p])
                assert set(logical) == {0, *recent} | set(others[: count - 1 - len(recent)])

    def test_a_budget_for_everything_reads_every_block_once(self) -> None:
        rows = some_rows([150, 33], budget_fraction=1.0)
        chosen = choose(torch.rand(2, HEADS, rows.tables.shape[1]), rows)
        for b, blocks in enumerate((19, 5)):
            assert rows.counts[b] == blocks
            for h in range(HEADS):
                assert sorted(chosen[b, h, :blocks].tolist()) == sorted(rows.tables[b, :blocks].tolist())
        assert rows.read_lengths.tolist() == [150, 33]

    def test_lengths_read_count_the_tokens_of_the_last_block(self) -> None:
        rows = some_rows([150], budget_tokens=56)
        assert rows.counts.tolist() == [7]
        assert rows.read_lengths.tolist() == [6 * BLOCK + (149 % BLOCK) + 1]

    def test_the_smallest_budget_still_reads_sinks_recent_and_one_page(self) -> None:
        config = load_config({"cache": {"sparse": {"enabled": True, "budget_fraction": 0.001}}}).cache
        assert blocks_to_read(config, 8000, 32) == 1 + 5 + 1


class TestCompiled:
    @pytest.mark.parametrize("lengths", [[150], [151, 77, 40], [9, 160]])
    @pytest.mark.parametrize("budget", [{"budget_tokens": 56}, {"budget_fraction": 1.0}])
    @pytest.mark.parametrize("scorer", ["clusters", "anchor", "mean_sigma", "minmax"])
    def test_equals_the_tensor_functions(self, scorer: str, lengths: list[int], budget: dict[str, float]) -> None:
        numba = pytest.importorskip("gsm.integrations.vllm.selection_numba", reason="needs numba")
        summaries, _ = a_store(scorer)
        rows = some_rows(lengths, **budget)
        torch.manual_seed(3)
        query = torch.randn(len(lengths), HEADS, GROUP, DIM)
        pages = head_pages(torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM))
        prepared = numba.Prepared(rows, HEADS)
        numba.CompiledSelection(summaries, pages)(query, 0.3, prepared)
        scores = page_scores(query * 0.3, rows, summaries)
        for b, length in enumerate(lengths):
            known = (length - 1) // BLOCK
            torch.testing.assert_close(prepared.shares[b, :, :known], scores[b, :, :known], rtol=1e-4, atol=1e-6)
        expected = pages.ids(choose(scores, rows))
        for b in range(len(lengths)):
            count = int(rows.counts[b])
            assert torch.equal(prepared.pages[b, :, :count].sort().values, expected[b, :, :count].sort().values)
            assert torch.equal(prepared.pages[b, :, count - 1], expected[b, :, count - 1])


class TestPages:
    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
    def test_a_page_of_one_head_is_found_in_either_memory_order(self, order: tuple[int, ...]) -> None:
        shape = [6, HEADS, BLOCK, 2 * DIM]
        cache = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(4)])
        assert list(cache.shape) == shape
        view = head_pages(cache)
        blocks = torch.tensor([[[3, 0, 5], [1, 2, 4]]])
        ids = view.ids(blocks)
        for h in range(HEADS):
            for i in range(3):
                page = view.cache[int(ids[0, h, i]), 0]
                assert torch.equal(page, cache[int(blocks[0, h, i]), h])

    def test_one_head_is_the_cache_itself(self) -> None:
        cache = torch.randn(6, 1, BLOCK, 2 * DIM)
        view = head_pages(cache)
        assert torch.equal(view.cache, cache)
        assert view.ids(torch.tensor([[[4, 2]]])).tolist() == [[[4, 2]]]

    def test_layers_inside_a_block_do_not_matter(self) -> None:
        cache = torch.randn(6, 3, HEADS, BLOCK, 2 * DIM)[:, 1]
        view = head_pages(cache)
        page = int(view.ids(torch.tensor([[[5], [2]]]))[0, 1, 0])
        assert torch.equal(view.cache[page, 0], cache[2, 1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_keys_are_found_whatever_order_a_kernel_keeps_them_in(self, dtype: torch.dtype) -> None:
        scramble = torch.randperm(BLOCK * DIM)
        reader = ScrambledKeys(lambda keys: keys.flatten()[scramble].to(dtype).float(), BLOCK, DIM)
        keys = torch.randn(5, HEADS, BLOCK, DIM).to(dtype)
        rest = torch.zeros(5, HEADS, BLOCK * DIM, dtype=dtype)
        cache = torch.cat((keys.flatten(2)[..., scramble], rest), -1).view(5, HEADS, BLOCK, 2 * DIM)
        assert torch.equal(reader(cache, torch.tensor([3, 1])), keys[[3, 1]])

    def test_plain_keys_are_the_first_half_of_a_row(self) -> None:
        cache = torch.randn(6, HEADS, BLOCK, 2 * DIM)
        assert torch.equal(read_plain_keys(cache, torch.tensor([2])), cache[[2], ..., :DIM])


class TestSummaries:
    @pytest.mark.parametrize("scorer", ["clusters", "anchor", "mean_sigma", "minmax"])
    def test_a_block_in_many_tables_has_one_summary(self, scorer: str) -> None:
        summaries, keys = a_store(scorer)
        read = summaries.read(torch.tensor([[7, 3], [3, 1]]))
        alone = summaries.scorer.decode(summaries.scorer.encode(summaries.scorer.summarise(keys[3])))
        for field, expected in zip(read, alone, strict=True):
            torch.testing.assert_close(field[0, :, 1], expected)
            torch.testing.assert_close(field[1, :, 0], expected)

    def test_blocks_become_known_when_full_and_unknown_when_written_again(self) -> None:
        blocks = KnownBlocks(10, torch.device("cpu"))
        assert blocks.update(torch.arange(3 * BLOCK, 4 * BLOCK + 2), BLOCK).tolist() == [3]
        assert blocks.known.tolist() == [i == 3 for i in range(10)]
        assert blocks.update(torch.tensor([3 * BLOCK, -1]), BLOCK).tolist() == []
        assert not blocks.known.any()

    def test_blocks_filled_while_nobody_looked_are_noticed_when_needed(self) -> None:
        blocks = KnownBlocks(10, torch.device("cpu"))
        tables, complete = torch.tensor([[4, 6, 2], [4, 1, 0]]), torch.tensor([2, 1])
        assert blocks.update(torch.tensor([2 * BLOCK]), BLOCK, tables, complete).tolist() == [4, 6]
        assert blocks.update(torch.tensor([2 * BLOCK + 1]), BLOCK, tables, complete).tolist() == []
