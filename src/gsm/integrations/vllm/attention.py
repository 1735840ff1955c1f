"""What is added to an attention back end of vLLM, whichever it is: three mixins and a layer's state.

`cpu.py` and `cuda.py` put them in front of the platform's own classes.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gsm.core.scorers import make_scorer
from gsm.errors import ConfigError
from gsm.integrations.vllm.live import Live, foreign_connector, live_of, logger
from gsm.integrations.vllm.pages import HeadPages, KeyReader, head_pages
from gsm.integrations.vllm.selection import choose, page_scores
from gsm.integrations.vllm.step import Plan, Step, compiled_selection
from gsm.integrations.vllm.summaries import KnownBlocks, Summaries


class BuilderMixin:
    """In front of a metadata builder: a `Step` travels with the metadata of layers that see their whole past."""

    gsm: Live | None
    known: KnownBlocks | None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.known = None
        self.gsm = live_of(vllm_config) if isinstance(kv_cache_spec, FullAttentionSpec) else None
        self.loads_blocks = foreign_connector(vllm_config) is not None
        if self.gsm is not None:
            _require_our_manager(kv_cache_spec, vllm_config)
            self.reorder_batch_threshold = 1  # rows that add one token come first
            self._per_head = self.make_per_head()
            _warn_of_large_blocks(kv_cache_spec.block_size)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """None while pages are selected: tables differ from layer to layer and step to step."""
        from vllm.v1.attention.backend import AttentionCGSupport

        if live_of(vllm_config) is not None:
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        if self.gsm is not None:
            metadata.gsm = Step(self, common_attn_metadata, metadata)
        return metadata

    def build_stock(self, common: Any) -> Any:
        """Metadata of a part of the batch, as the back end itself makes it."""
        return super().build(0, common, True)  # type: ignore[misc]

    def build_selected(self, common: Any, per_head: bool) -> Any:
        """The same for the decode rows; `per_head`: a request is one kv head of one row."""
        return self._per_head.build_stock(common) if per_head else self.build_stock(common)

    def make_per_head(self) -> Any:
        """This builder for a model with one kv head."""
        raise NotImplementedError


def _require_our_manager(spec: Any, vllm_config: Any) -> None:
    """Refuse a group that vLLM has merged from layers of other kinds: its manager would cache answers as exact."""
    if type(spec) is FullAttentionSpec and vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "layers with a window are kept as if they had none, so the prefix cache would hold what was computed under "
            "a selection; start without --disable-hybrid-kv-cache-manager, or with --no-enable-prefix-caching"
        )


def _warn_of_large_blocks(block_size: int) -> None:
    if block_size > 32:
        logger.warning(
            "blocks of %d tokens are coarse pages to choose from; start with --block-size 32 for better answers at the "
            "same budget",
            block_size,
        )


class ImplMixin:
    """In front of an attention implementation: decode rows read the pages their query asks for."""

    stock: ClassVar[type]  # the class behind the mixin, whose `forward` does the attention

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gsm: LayerState | None = None
        from vllm.config import get_current_vllm_config

        live_of(get_current_vllm_config())  # a config that cannot work is refused while the model is built

    def key_reader(self, layer: Any, cache: Tensor) -> KeyReader:
        """How keys are read back from this back end's cache."""
        raise NotImplementedError

    def per_head_impl(self) -> Any:
        """This implementation for one kv head and its query heads."""
        impl = copy.copy(self)
        impl.num_heads, impl.num_kv_heads = self.num_heads // self.num_kv_heads, 1  # type: ignore[attr-defined]
        return impl

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **more: Any,
    ) -> Tensor:
        step: Step | None = getattr(attn_metadata, "gsm", None)
        arguments = (layer, query, key, value, kv_cache)
        if step is None:
            return super().forward(*arguments, attn_metadata, output, *scales, **more)  # type: ignore[misc]
        plan = step.plan(kv_cache.shape[0], kv_cache.shape[1], kv_cache.device)
        state = self._state(layer, kv_cache, step)
        if state is not None and len(plan.to_summarise):
            state.summarise(kv_cache, plan.to_summarise)
        if state is None or plan.rows is None or state.index in step.config.vllm.dense_layers:
            return super().forward(*arguments, plan.dense, output, *scales, **more)  # type: ignore[misc]
        rows = len(plan.rows.lengths)
        state.decode(plan, step, query[:rows], output[:rows])
        if plan.rest is not None:
            rest = (layer, query[rows:], key[rows:], value[rows:], kv_cache)
            super().forward(*rest, plan.rest, output[rows:], *scales, **more)  # type: ignore[misc]
        return output

    def _state(self, layer: Any, cache: Tensor, step: Step) -> LayerState | None:
        """This layer's summaries; None where its attention is no plain softmax over the whole past."""
        if not step.config.cache.sparse.enabled or not _selectable(self):
            return None
        if self._gsm is None or not self._gsm.fits(cache, step):
            if self._gsm is not None:
                step.live.counters.summary_bytes -= self._gsm.summaries.nbytes
            self._gsm = LayerState(self, layer, cache, step)
        return self._gsm


def _selectable(impl: Any) -> bool:
    """Whether a layer sees its whole past by plain softmax; sinks and position biases belong to single query heads."""
    window = impl.sliding_window
    bounded = (window[0] if isinstance(window, tuple) else window) not in (None, -1)
    packed = getattr(impl, "_is_per_token_head_quant", False)  # keys with their scales inside: no half of a row
    plain = impl.alibi_slopes is None and impl.sinks is None and not packed
    return not bounded and impl.attn_type == "decoder" and plain


class LayerState:
    """Summaries of one layer and the views its decode rows read through."""

    def __init__(self, impl: Any, layer: Any, cache: Tensor, step: Step) -> None:
        from vllm.model_executor.models.utils import extract_layer_index

        num_blocks, num_heads, _, width = cache.shape
        sparse = step.config.cache.sparse
        self.impl, self.layer = impl, layer
        self.index = extract_layer_index(layer.layer_name)
        self.cache = cache
        self.cache_address = cache.data_ptr()
        self.scorer_name, self.sigma = sparse.scorer, sparse.sigma
        scorer = make_scorer(sparse.scorer, sparse.sigma)
        self.summaries = Summaries(scorer, num_blocks, num_heads, width // 2, cache.device)
        step.live.counters.summary_bytes += self.summaries.nbytes
        self.pages: HeadPages = head_pages(cache)
        self.read_keys = impl.key_reader(layer, cache)
        self.per_head = impl.per_head_impl()
        module = compiled_selection()
        self.compiled = None
        if module is not None and module.CompiledSelection.serves(self.summaries):
            self.compiled = module.CompiledSelection(self.summaries, self.pages)

    def fits(self, cache: Tensor, step: Step) -> bool:
        """Whether the cache is where it was and the scorer is the same."""
        sparse = step.config.cache.sparse
        same = (self.scorer_name, self.sigma) == (sparse.scorer, sparse.sigma)
        return cache.data_ptr() == self.cache_address and same

    def summarise(self, cache: Tensor, blocks: Tensor) -> None:
        self.summaries.store(blocks, self.read_keys(cache, blocks).float())

    def decode(self, plan: Plan, step: Step, query: Tensor, output: Tensor) -> None:
        """Attention of decode rows: `query`, `output` are `[B, num_heads, head_dim]`."""
        assert plan.rows is not None
        assert plan.tables is not None
        num_heads = self.cache.shape[1]
        grouped = query.unflatten(1, (num_heads, -1))
        if self.compiled is not None and plan.prepared is not None:
            self.compiled(grouped, self.impl.scale, plan.prepared)
            plan.tables.copy_(plan.prepared.pages.flatten(0, 1))
            scores = plan.prepared.shares
        else:
            scores = page_scores(grouped * self.impl.scale, plan.rows, self.summaries)
            if step.config.vllm.per_head:
                plan.tables.copy_(self.pages.ids(choose(scores, plan.rows)).flatten(0, 1))
            else:
                plan.tables.copy_(choose(scores.sum(1, keepdim=True), plan.rows).squeeze(1))
        if plan.mass is not None:
            torch.maximum(plan.mass, scores.amax(1), out=plan.mass)
        if step.config.vllm.per_head:
            self._forward(self.per_head, query.reshape(-1, *grouped.shape[2:]), self.pages.cache, plan, output)
        else:
            self._forward(self.impl, query, self.cache, plan, output)

    def _forward(self, impl: Any, query: Tensor, cache: Tensor, plan: Plan, output: Tensor) -> None:
        nothing = query.new_zeros(0)
        result = output.view(query.shape)
        self.impl.stock.forward(impl, self.layer, query, nothing, nothing, cache, plan.selected, result)
