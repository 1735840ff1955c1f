"""The attention of one forward pass: which spans decode, which prefill, and with which selection."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsm.attention import DecodeAttention, make_attention, prefill_attention, prefill_page_mass
from gsm.config import CacheConfig, SparseConfig
from gsm.core.view import AttentionSpec, Selection
from gsm.kv.step import KVStep

if TYPE_CHECKING:
    from gsm.integrations.transformers.cache import Cache


class AttentionStep:
    """Joins a `KVStep` with a decode back end. Lives as long as one forward pass.

    `sparse` has the sparse settings of every span where they differ from the config's.
    """

    def __init__(self, kv: KVStep, config: CacheConfig, sparse: Sequence[SparseConfig] | None = None) -> None:
        self.kv = kv
        self.config = config
        self.selection = self._selection(sparse)
        self._backends: dict[torch.device, DecodeAttention] = {}
        self._counted: int | None = None
        self.latents: dict[int, Tensor] = {}  # layer -> new keys of latent attention, before their expansion

    def attend(self, layer: int, query: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """`query [rows, num_query_heads, length, k_dim]`, new `k`, `v` -> `[rows, length, num_query_heads, v_dim]`."""
        kv = self.kv
        if kv.is_decode and kv.rows_are_batch and len(kv.spans) == query.shape[0]:
            return self._decode(layer, query, spec).unsqueeze(1)
        if kv.is_decode and kv.is_packed and query.shape[2] == len(kv.decode_tokens):
            return self._decode(layer, query, spec).unsqueeze(0)
        out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], spec.value_dims or v.shape[-1])
        if kv.decode_tokens:
            out[kv.places(query.device)] = self._decode(layer, query, spec)
        for index in kv.long_spans:
            self._attend_span(index, out, layer, query, k, v, spec)
        return out

    def _attend_span(
        self, index: int, out: Tensor, layer: int, query: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> None:
        span = self.kv.spans[index]
        columns = slice(span.start, span.start + span.num_tokens)
        history = self.kv.span_view(layer, index) if self.kv.past_lens[index] else None
        q, new_k, new_v = (x[span.row, :, columns] for x in (query, k, v))
        out[span.row, columns] = prefill_attention(q, new_k, new_v, history, spec).transpose(0, 1)
        if self.kv.needs_mass:
            observed = self.kv.observed_queries(index)
            mass = prefill_page_mass(q, new_k, history, spec, *observed, page_size=self.config.page_size)
            self.kv.observe_span(layer, index, mass)

    def _decode(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """All decode tokens of the step in one call: `[B, num_query_heads, v_dim]`."""
        view = self.kv.view(layer)
        result = self._backend(query.device).decode(self.kv.pick(query), view, spec, self._selection_for(spec))
        if self._counts(layer, spec):
            self.kv.count_read(result.pages)
        if self.kv.needs_mass:
            self.kv.observe(layer, result.pages, result.mass)
        return result.out

    def _selection_for(self, spec: AttentionSpec) -> Selection | None:
        """No choosing where all that a layer may see fits into every budget."""
        if self.selection is None or spec.most_visible is None:
            return self.selection
        smallest = min(self.selection.budget_pages) * self.config.page_size
        return None if spec.most_visible <= smallest else self.selection

    def _counts(self, layer: int, spec: AttentionSpec) -> bool:
        """One layer stands for all: the first that sees the whole past, where there is one."""
        if self._counted is None and (spec.most_visible is None or all(self.kv.manager.windows)):
            self._counted = layer
        return self._counted == layer

    def _selection(self, sparse: Sequence[SparseConfig] | None) -> Selection | None:
        """The pages each decode token may read, or None when every budget covers everything."""
        c = self.config
        settings = [sparse[i] if sparse is not None else c.sparse for i, _ in self.kv.decode_tokens]
        if not any(s.enabled for s in settings):
            return None
        smallest = c.num_sink_pages + c.num_recent_pages + 1
        budgets = []
        for s, kept, length in zip(settings, self.kv.kept_lens, self.kv.seq_lens, strict=True):
            everything = -(-length // c.page_size)
            budgets.append(max(smallest, s.budget_for(kept) // c.page_size) if s.enabled else everything)
        if all(budget * c.page_size >= length for budget, length in zip(budgets, self.kv.seq_lens, strict=True)):
            return None
        return Selection(c.num_sink_pages, c.recent_tokens, tuple(budgets))

    def _backend(self, device: torch.device) -> DecodeAttention:
        if device not in self._backends:
            self._backends[device] = make_attention(self.config.backend, device)
        return self._backends[device]


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass that runs in this thread, from the pre-hook to the hook of `attach`."""

    cache: Cache
    step: AttentionStep
    columns: int


CURRENT_FORWARD: ContextVar[Forward | None] = ContextVar("gsm_current_forward", default=None)
