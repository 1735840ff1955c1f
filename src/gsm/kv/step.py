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


OBSERVED_QUERIES = 32  # the last ones of a prompt's chunk


SpanMass = dict[int, Tensor]  # layer -> mass [N, H, pages] of a span's observed tokens


class KVStep:
    """Created by `KVManager.begin`; ends with `commit` or `abort`, whichever comes first."""

    def __init__(self, manager: KVManager, spans: tuple[Span, ...]) -> None:
        self.manager = manager
        self.spans = spans
        self.past_lens = [manager.num_tokens(span.slot) for span in spans]
        self.is_decode = bool(spans) and all(span.num_tokens == 1 for span in spans)
        self.needs_mass = manager.needs_mass
        self._open = True
        self._write_rows: dict[int, Tensor] = {}
        self._index: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._decoded: dict[int, tuple[StreamGroup, list[Tensor], list[Tensor]]] = {}  # group, places, mass
        self._observed: list[SpanMass] = [{} for _ in spans]

    @cached_property
    def seq_lens(self) -> list[int]:
        """Length of every span's sequence, the new tokens included."""
        return [past + span.num_tokens for past, span in zip(self.past_lens, self.spans, strict=True)]

    @cached_property
    def kept_lens(self) -> list[int]:
        """Tokens a head holds on average for every span, the new ones included: shorter once pages were dropped."""
        return [self.manager.num_kept_tokens(span.slot) + span.num_tokens for span in self.spans]

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

    # -- observing ---------------------------------------------------------------------------------------------

    def observe(self, layer: int, pages: Tensor, mass: Tensor) -> None:
        """Remember a decode step's attention mass: logical `pages [B, H, S]` (-1 = padding), `mass [B, H, S]`.

        It is recorded at `commit`, for all layers at once.
        """
        group = self.manager._group_of[layer]
        slots, _ = self.index(group.geometry.device)
        _, all_places, all_mass = self._decoded.setdefault(id(group), (group, [], []))
        all_places.append(group.places(layer, slots, pages).flatten())
        all_mass.append(mass.flatten())

    def observed_queries(self, index: int) -> tuple[slice, int]:
        """Which new tokens of a span are observed, and in how many observations: the last ones of a prompt in a full
        window; every one of what may be a draft, so that those of rejected tokens can be forgotten."""
        num_tokens = self.spans[index].num_tokens
        if self.manager.may_be_draft(self.past_lens[index], num_tokens):
            return slice(0, num_tokens), num_tokens
        return slice(max(0, num_tokens - OBSERVED_QUERIES), num_tokens), self.manager.config.observation_window

    def observe_span(self, layer: int, index: int, mass: Tensor) -> None:
        """The same for a span of several tokens: `mass [N, H, pages]`, oldest first, over all its logical pages."""
        self._observed[index][layer] = mass

    def count_read(self, pages: Tensor) -> None:
        """Count what a decode step reads, `pages [B, H, S]` of one layer: tokens, and those older than the hot zone."""
        manager, page_size = self.manager, self.manager.config.page_size
        is_read = pages >= 0
        manager.attended_tokens += float(is_read.sum(-1).float().mean()) * page_size
        manager.attended_samples += 1
        ranges = [manager.sequences[span.slot].demoted for span in self.spans]
        if any(ranges):
            first = torch.tensor([r.start for r in ranges], device=pages.device).view(-1, 1, 1)
            stop = torch.tensor([r.stop for r in ranges], device=pages.device).view(-1, 1, 1)
            recalled = (pages >= first) & (pages < stop)
            manager.recalled_tokens += float(recalled.sum(-1).float().mean()) * page_size

    # -- ending ------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        if self._open:
            self._open = False
            for group, places, mass in self._decoded.values():
                group.observe(torch.cat(places), torch.cat(mass))
            self.manager.commit(self.spans, self._observed)

    def abort(self) -> None:
        if self._open:
            self._open = False
            self.manager.abort(self.spans)
