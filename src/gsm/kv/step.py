"""One forward pass over the KV store: write new tokens, hand out views."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsm.core.batch import Span
from gsm.core.view import KVView
from gsm.kv.group import StreamGroup

if TYPE_CHECKING:
    from gsm.kv.manager import KVManager


class KVStep:
    """Created by `KVManager.begin`; ends with `commit` or `abort`, whichever comes first."""

    def __init__(self, manager: KVManager, spans: tuple[Span, ...]) -> None:
        self.manager = manager
        self.spans = spans
        self.past_lens = [manager.num_tokens(span.slot) for span in spans]
        self.is_decode = all(span.num_tokens == 1 for span in spans)
        self._open = True
        self._write_rows: dict[int, Tensor] = {}
        self._index: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @cached_property
    def seq_lens(self) -> list[int]:
        """Length of every span's sequence, the new tokens included."""
        return [past + span.num_tokens for past, span in zip(self.past_lens, self.spans, strict=True)]

    @cached_property
    def max_pages(self) -> int:
        return -(-max(self.seq_lens) // self.manager.config.page_size)

    @cached_property
    def rows_are_batch(self) -> bool:
        """The input is plainly one token per row, in order: no gathering needed."""
        return self.is_decode and all(span.row == i and span.start == 0 for i, span in enumerate(self.spans))

    # -- writing -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens of one layer: `k [rows, H, length, k_dim]`, `v [rows, H, length, v_dim]`."""
        group = self.manager.group_for(layer, k, v, self.spans)
        if self.is_decode:
            self._write_decode(group, group.rows[layer], k, v)
            return
        for span, past in zip(self.spans, self.past_lens, strict=True):
            self._write_span(group, group.rows[layer], span, past, k, v)

    def _write_decode(self, group: StreamGroup, row: int, k: Tensor, v: Tensor) -> None:
        rows = self._decode_rows(group)
        if rows.shape[0] <= row:  # this layer joined its group during this step
            self._write_rows.pop(id(group))
            rows = self._decode_rows(group)
        target = rows[row].reshape(-1)
        k, v = self.pick(k), self.pick(v)  # [B, H, dim]
        group.hot.fields["k"].flatten(0, 1).index_copy_(0, target, k.reshape(-1, k.shape[-1]))
        group.hot.fields["v"].flatten(0, 1).index_copy_(0, target, v.reshape(-1, v.shape[-1]))

    def _decode_rows(self, group: StreamGroup) -> Tensor:
        """Where each layer's new tokens go in the hot pool, int64 `[layers, B, H]`; computed once per step."""
        rows = self._write_rows.get(id(group))
        if rows is None:
            slots, seq_lens = self.index(group.geometry.device)
            past = seq_lens - 1
            ids = group.table[slots, :, :, past // group.page_size].long()[:, : len(group.rows)]
            units = group.pages.fields["hot"][ids].long()
            rows = units * group.page_size + (past % group.page_size).view(-1, 1, 1)
            rows = self._write_rows[id(group)] = rows.transpose(0, 1)
        return rows

    def _write_span(self, group: StreamGroup, row: int, span: Span, past: int, k: Tensor, v: Tensor) -> None:
        page_size = group.page_size
        first, last = past // page_size, -(-(past + span.num_tokens) // page_size)
        ids = group.table[span.slot, row, :, first:last].long()
        units = group.pages.fields["hot"][ids].long()  # [H, pages]
        position = torch.arange(past, past + span.num_tokens, device=ids.device)
        target = (units[:, position // page_size - first] * page_size + position % page_size).reshape(-1)
        columns = slice(span.start, span.start + span.num_tokens)
        for name, new in (("k", k), ("v", v)):
            tokens = new[span.row, :, columns].reshape(-1, new.shape[-1])
            group.hot.fields[name].flatten(0, 1).index_copy_(0, target, tokens)

    # -- reading -----------------------------------------------------------------------------------------------

    def view(self, layer: int) -> KVView:
        """All spans' sequences at this layer, the new tokens included."""
        group = self.manager._group_of[layer]
        slots, seq_lens = self.index(group.geometry.device)
        return group.layer_view(layer, slots, seq_lens, self.max_pages)

    def span_view(self, layer: int, index: int) -> KVView:
        """The sequence of one span as it was before this step."""
        group = self.manager._group_of[layer]
        slots, _ = self.index(group.geometry.device)
        past = self.past_lens[index]
        past_lens = torch.tensor([past], device=slots.device)
        max_pages = -(-past // self.manager.config.page_size)
        return group.layer_view(layer, slots[index : index + 1], past_lens, max_pages)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots and lengths of all spans, int64 `[B]` each."""
        if device not in self._index:
            slots = torch.tensor([span.slot for span in self.spans], device=device)
            self._index[device] = (slots, torch.tensor(self.seq_lens, device=device))
        return self._index[device]

    def pick(self, x: Tensor) -> Tensor:
        """The one new token of every span from `x [rows, heads, length, dim]`: `[B, heads, dim]`."""
        if self.rows_are_batch:
            return x[:, :, 0]
        rows = torch.tensor([span.row for span in self.spans], device=x.device)
        starts = torch.tensor([span.start for span in self.spans], device=x.device)
        return x[rows, :, starts]

    # -- ending ------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        if self._open:
            self._open = False
            self.manager.commit(self.spans)

    def abort(self) -> None:
        if self._open:
            self._open = False
            self.manager.abort(self.spans)
