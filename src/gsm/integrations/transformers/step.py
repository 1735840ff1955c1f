"""The attention of one forward pass: which spans decode, which prefill, and with which selection."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsm.attention import DecodeAttention, make_attention, prefill_attention, prefill_page_mass
from gsm.config import CacheConfig
from gsm.core.view import AttentionSpec, Selection
from gsm.kv.step import KVStep

if TYPE_CHECKING:
    from gsm.integrations.transformers.cache import Cache


class AttentionStep:
    """Joins a `KVStep` with a decode back end. Lives as long as one forward pass."""

    def __init__(self, kv: KVStep, config: CacheConfig) -> None:
        self.kv = kv
        self.config = config
        self.selection = self._selection() if kv.is_decode and config.sparse.enabled else None
        self._backends: dict[torch.device, DecodeAttention] = {}

    def attend(self, layer: int, query: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """`query [rows, num_query_heads, length, k_dim]`, new `k`, `v` -> `[rows, length, num_query_heads, v_dim]`."""
        if self.kv.is_decode:
            return self._decode(layer, query, spec)
        out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], v.shape[-1])
        for index, span in enumerate(self.kv.spans):
            columns = slice(span.start, span.start + span.num_tokens)
            history = self.kv.span_view(layer, index) if self.kv.past_lens[index] else None
            q, new_k, new_v = (x[span.row, :, columns] for x in (query, k, v))
            out[span.row, columns] = prefill_attention(q, new_k, new_v, history, spec).transpose(0, 1)
            if self.kv.needs_mass:
                observed = self.kv.observed_queries(index)
                mass = prefill_page_mass(q, new_k, history, spec, *observed, page_size=self.config.page_size)
                self.kv.observe_span(layer, index, mass)
        return out

    def _decode(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        view = self.kv.view(layer)
        result = self._backend(query.device).decode(self.kv.pick(query), view, spec, self.selection)
        if layer == 0:
            self.kv.count_read(result.pages)
        if self.kv.needs_mass:
            self.kv.observe(layer, result.pages, result.mass)
        if self.kv.rows_are_batch and len(self.kv.spans) == query.shape[0]:
            return result.out.unsqueeze(1)
        out = query.new_zeros(query.shape[0], query.shape[2], *result.out.shape[1:])
        for index, span in enumerate(self.kv.spans):
            out[span.row, span.start] = result.out[index]
        return out

    def _selection(self) -> Selection | None:
        """The pages each sequence may read, or None when every budget covers everything."""
        c = self.config
        smallest = c.num_sink_pages + c.num_recent_pages + 1
        budgets = [max(smallest, c.sparse.budget_for(length) // c.page_size) for length in self.kv.kept_lens]
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
