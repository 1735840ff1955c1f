"""The CUDA classes without a GPU: they import, and their calls have the right shapes over token-major caches.

The kernel is replaced by one that reads metadata as FlashAttention and Triton do, and is plain about it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("vllm_installed")

BLOCK, HEADS, GROUP, DIM, BLOCKS = 16, 2, 3, 32, 40


def paged_attention(impl: Any, query: Tensor, cache: Tensor, metadata: Any, output: Tensor) -> None:
    """Causal attention by block table, sequence lengths and query starts, one row at a time."""
    assert query.shape[1:] == (impl.num_heads, DIM)
    assert cache.shape[1] == impl.num_kv_heads
    for row, (first, end) in enumerate(zip(metadata.query_start_loc, metadata.query_start_loc[1:], strict=False)):
        length, count = int(metadata.seq_lens[row]), int(end - first)
        blocks = metadata.block_table[row, : -(-length // BLOCK)].long()
        keys, values = cache[blocks].transpose(1, 2).flatten(0, 1)[:length].split(DIM, -1)
        for head in range(impl.num_heads):
            kv = head // (impl.num_heads // impl.num_kv_heads)
            logits = query[first:end, head].float() @ keys[:, kv].float().T * impl.scale
            hidden = torch.ones(count, length).triu(length - count + 1).bool()
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            output[first:end, head] = weights @ values[:, kv].float()


def make(backend: str, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Builder, implementation and layer of a back end, without its constructors, which ask for a GPU."""
    from gsm.config import load_config
    from gsm.integrations.vllm import cuda
    from gsm.integrations.vllm.live import Live

    live = Live(load_config(config))
    builder_class = getattr(cuda, f"Gsm{backend}AttentionMetadataBuilder")
    impl_class = getattr(cuda, f"Gsm{backend}AttentionImpl")
    stock_builder = builder_class.__mro__[2]

    def build(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        names = ("query_start_loc", "seq_lens", "max_query_len", "max_seq_len", "num_actual_tokens", "slot_mapping")
        return SimpleNamespace(
            block_table=common.block_table_tensor,
            heads=(self.num_heads_q, self.num_heads_kv),
            **{name: getattr(common, name) for name in names},
        )

    def forward(self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any) -> Any:
        assert metadata.heads == (self.num_heads, self.num_kv_heads)
        n = metadata.num_actual_tokens
        paged_attention(self, query[:n], cache, metadata, output[:n])
        return output

    monkeypatch.setattr(stock_builder, "build", build)
    monkeypatch.setattr(impl_class.stock, "forward", forward)
    builder = object.__new__(builder_class)
    scratch = {f"softmax_segm_{name}": torch.zeros(4, HEADS * GROUP, 2) for name in ("output", "max", "expsum")}
    vars(builder).update(
        gsm=live, known=None, loads_blocks=False, num_heads_q=HEADS * GROUP, num_heads_kv=HEADS,
        kv_cache_spec=SimpleNamespace(block_size=BLOCK), **scratch,
    )  # fmt: skip
    builder._per_head = builder.make_per_head()
    impl = object.__new__(impl_class)
    window = (-1, -1)
    vars(impl).update(
        _gsm=None, num_heads=HEADS * GROUP, num_kv_heads=HEADS, scale=0.2, sliding_window=window, attn_type="decoder",
        alibi_slopes=None, sinks=None, kv_cache_dtype="auto",
    )  # fmt: skip
    return builder, impl, SimpleNamespace(layer_name="model.layers.1.self_attn.attn")


def a_batch(lengths: list[int], new: list[int]) -> tuple[Any, Tensor]:
    """A batch in vLLM's own terms, and a token-major cache full of random keys and values."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    torch.manual_seed(0)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    tables = torch.randperm(BLOCKS - 1, dtype=torch.int32)[: len(lengths) * 12].view(len(lengths), 12) + 1
    slots = torch.cat([
        tables[i, torch.arange(n - k, n) // BLOCK].long() * BLOCK + torch.arange(n - k, n) % BLOCK
        for i, (n, k) in enumerate(zip(lengths, new, strict=True))
    ])  # fmt: skip
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths), num_actual_tokens=int(starts[-1]), max_query_len=max(new), max_seq_len=max(lengths),
        block_table_tensor=tables, slot_mapping=slots, seq_lens_cpu_upper_bound=torch.tensor(lengths),
    )  # fmt: skip
    cache = torch.randn(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2)  # token-major, as FlashAttention keeps it
    return common, cache


def run(parts: tuple[Any, Any, Any], common: Any, cache: Tensor) -> tuple[Tensor, Tensor, Any]:
    builder, impl, layer = parts
    query = torch.randn(common.num_actual_tokens, HEADS * GROUP, DIM)
    nothing = torch.zeros(common.num_actual_tokens, HEADS, DIM)
    metadata = builder.build(0, common)
    output = torch.zeros_like(query)
    impl.forward(layer, query, nothing, nothing, cache, metadata, output)
    expected = torch.zeros_like(query)
    paged_attention(impl, query, cache, metadata, expected)
    return output, expected, metadata.gsm


@pytest.mark.parametrize("backend", ["Flash", "Triton"])
class TestCuda:
    @pytest.mark.parametrize("per_head", [True, False])
    def test_everything_selected_equals_dense_in_mixed_batches(
        self, backend: str, per_head: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = {
            "cache": {"sparse": {"enabled": True, "budget_fraction": 1.0}},
            "vllm": {"always_select": True, "per_head": per_head},
        }
        parts = make(backend, monkeypatch, config)
        common, cache = a_batch([150, 97, 60], [1, 1, 20])
        output, expected, step = run(parts, common, cache)
        torch.testing.assert_close(output, expected)
        plan = step._plan
        assert plan.tables.shape == ((2 * HEADS if per_head else 2), 10)
        assert plan.rest.num_actual_tokens == 20

    def test_a_selection_reads_fewer_pages_and_its_own_per_head(
        self, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sparse = {"enabled": True, "budget_tokens": 80}
        cache_section = {"sink_tokens": 4, "recent_tokens": 16, "hot_size": 16, "sparse": sparse}
        parts = make(backend, monkeypatch, {"cache": cache_section})
        common, cache = a_batch([180], [1])
        output, expected, step = run(parts, common, cache)
        assert not torch.allclose(output, expected)
        assert step.live.counters.read_tokens == 4 * BLOCK + (180 - 1) % BLOCK + 1
        first, second = (set(row.tolist()) for row in step._plan.tables)
        assert first.isdisjoint(second)  # pages of different heads

    def test_dropped_blocks_are_not_read_whatever_a_row_adds(
        self, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts = make(backend, monkeypatch, {"cache": {"policy": "recent", "cold": "drop"}})
        common, cache = a_batch([150, 97], [1, 5])
        gone = [2, 3, 5]
        parts[0].gsm.holes = {int(common.block_table_tensor[1, 96 // BLOCK]): gone}
        cache[common.block_table_tensor[1, gone].long()] = torch.nan
        output, _, _ = run(parts, common, cache)
        assert not output.isnan().any()

    def test_blocks_that_a_connector_filled_are_summarised_anew(
        self, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts = make(backend, monkeypatch, {"cache": {"sparse": {"enabled": True}}, "vllm": {"always_select": True}})
        common, cache = a_batch([150], [1])
        prompt, _ = a_batch([150], [6])  # the same blocks, as the end of a prompt
        for loads, expected in ((False, 0), (True, 144 // BLOCK)):
            parts[0].loads_blocks = loads
            run(parts, common, cache)
            run(parts, prompt, cache)
            before = parts[0].gsm.counters.summarised_blocks
            run(parts, common, cache)
            assert parts[0].gsm.counters.summarised_blocks - before == expected

    def test_nothing_configured_is_stock(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = make(backend, monkeypatch, {})
        parts[0].gsm = None
        common, _ = a_batch([150], [1])
        metadata = parts[0].build(0, common)
        assert not hasattr(metadata, "gsm")


def test_the_plugin_names_classes_that_exist() -> None:
    from importlib import import_module

    from gsm.integrations.vllm.plugin import BACKENDS

    for name, path in BACKENDS.items():
        module, _, cls = path.rpartition(".")
        assert getattr(import_module(module), cls).get_name() == name
