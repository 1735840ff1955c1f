"""One forward pass over the KV store: write new tokens, hand out views."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gsm.core.batch import Span
from gsm.core.scorers import Scorer
from gsm.core.view import KVView
from gsm.kv.group import StreamGroup

if TYPE_CHECKING:
    from gsm.kv.manager import KVManager


OBSERVED_QUERIES = 32  # the last ones of a prompt's chunk


SpanMass = dict[int, Tensor]  # layer -> mass [N, H, pages] of a span's observed tokens


class _Target(NamedTuple):
    """Where a step's new tokens go: rows of the hot pool seen as `[units * page_size, dim]`."""

    pool: Tensor  # as it was when the rest was made
    k: Tensor
    v: Tensor
    tokens: tuple[Tensor, ...]  # int64 [N * H] for every layer of the group


class KVStep:
    """Created by `KVManager.begin`; ends with `commit` or `abort`, whichever comes first."""

    def __init__(self, manager: KVManager, spans: tuple[Span, ...]) -> None:
        self.manager = manager
        self.spans = spans
        self.past_lens = [manager.num_tokens(span.slot) for span in spans]
        self.long_spans = [i for i, span in enumerate(spans) if span.num_tokens > 1 and not span.is_draft]
        self.is_decode = bool(spans) and not self.long_spans
        self.needs_mass = manager.needs_mass
        self.scorer: Scorer | None = None  # weighs the same summaries otherwise than the store's own
        self._open = True
        self._targets: dict[int, _Target] = {}
        self._index: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._places: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}
        self._decoded: dict[int, tuple[StreamGroup, list[Tensor], list[Tensor]]] = {}  # group, places, mass
        self._observed: list[SpanMass] = [{} for _ in spans]

    @cached_property
    def decode_tokens(self) -> list[tuple[int, int]]:
        """(span, offset) of every new token that attends alone: the batch of the one decode call per layer."""
        is_long = set(self.long_spans)
        return [(i, j) for i, span in enumerate(self.spans) if i not in is_long for j in range(span.num_tokens)]

    @cached_property
    def seq_lens(self) -> list[int]:
        """What every decode token sees: the length of its sequence up to and with itself."""
        return [self.past_lens[i] + j + 1 for i, j in self.decode_tokens]

    @cached_property
    def kept_lens(self) -> list[int]:
        """The same in tokens a head holds on average: shorter once pages were dropped."""
        kept = {i: self.manager.num_kept_tokens(self.spans[i].slot) for i, _ in self.decode_tokens}
        return [kept[i] + j + 1 for i, j in self.decode_tokens]

    @cached_property
    def max_pages(self) -> int:
        return -(-max(self.seq_lens, default=0) // self.manager.config.page_size)

    @cached_property
    def rows_are_batch(self) -> bool:
        """The input is plainly one token per row, in order: no gathering needed."""
        ordered = all(span.row == i and span.start == 0 for i, span in enumerate(self.spans))
        return self.is_decode and ordered and len(self.decode_tokens) == len(self.spans)

    # -- writing -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens of one layer: `k [rows, H, length, k_dim]`, `v [rows, H, length, v_dim]`."""
        group = self.manager.group_for(layer, k, v, self.spans)
        row = group.rows[layer]
        target = self._target(group, row)
        target.k.index_copy_(0, target.tokens[row], self._rows(k))
        target.v.index_copy_(0, target.tokens[row], self._rows(v))

    def _target(self, group: StreamGroup, row: int) -> _Target:
        """Where the new tokens go; computed once per step, because a decode step feels every operation per layer."""
        target = self._targets.get(id(group))
        hot = group.hot.fields
        # a layer may join its group, and its pool grow, during this step
        if target is None or len(target.tokens) <= row or target.pool is not hot["k"]:
            device = group.geometry.device
            slots = torch.tensor([s.slot for s in self.spans for _ in range(s.num_tokens)], device=device)
            pasts = zip(self.past_lens, self.spans, strict=True)
            position = torch.tensor([past + j for past, s in pasts for j in range(s.num_tokens)], device=device)
            ids = group.table[slots, :, :, position // group.page_size].long()[:, : len(group.rows)]
            units = group.pages.fields["hot"][ids].long()
            rows = units * group.page_size + (position % group.page_size).view(-1, 1, 1)
            tokens = rows.transpose(0, 1).flatten(1).unbind(0)
            target = _Target(hot["k"], hot["k"].flatten(0, 1), hot["v"].flatten(0, 1), tokens)
            self._targets[id(group)] = target
        return target

    def _rows(self, x: Tensor) -> Tensor:
        """All new tokens of `x [rows, heads, length, dim]`, one row per token and head: `[N * heads, dim]`."""
        if self.rows_are_batch and x.shape[0] == len(self.spans):
            return x.flatten(0, -2)  # V may have no channels (latent attention)
        return self._tokens(x).flatten(0, 1)

    def _tokens(self, x: Tensor) -> Tensor:
        """All new tokens of `x [rows, heads, length, dim]` in the order of the spans: `[N, heads, dim]`."""
        if self.rows_are_batch:
            return x[: len(self.spans), :, 0]
        if self.is_packed and sum(span.num_tokens for span in self.spans) == x.shape[2]:
            return x[0].transpose(0, 1)
        rows, columns = self.places(x.device, all_tokens=True)
        return x[rows, :, columns]

    @cached_property
    def is_packed(self) -> bool:
        """One row, filled by the spans in order."""
        start = 0
        for span in self.spans:
            if span.row != 0 or span.start != start:
                return False
            start += span.num_tokens
        return True

    # -- reading -----------------------------------------------------------------------------------------------

    def view(self, layer: int) -> KVView:
        """The sequences of all decode tokens at this layer, the new tokens included."""
        group = self.manager._group_of[layer]
        slots, seq_lens = self.index(group.geometry.device)
        view = group.layer_view(layer, slots, seq_lens, self.max_pages)
        return view if self.scorer is None else replace(view, scorer=self.scorer)

    def span_view(self, layer: int, index: int) -> KVView:
        """The sequence of one span as it was before this step."""
        group = self.manager._group_of[layer]
        device, past = group.geometry.device, self.past_lens[index]
        slots = torch.tensor([self.spans[index].slot], device=device)
        max_pages = -(-past // self.manager.config.page_size)
        return group.layer_view(layer, slots, torch.tensor([past], device=device), max_pages)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots and lengths of all decode tokens, int64 `[B]` each."""
        if device not in self._index:
            slots = torch.tensor([self.spans[i].slot for i, _ in self.decode_tokens], device=device)
            self._index[device] = (slots, torch.tensor(self.seq_lens, device=device))
        return self._index[device]

    def places(self, device: torch.device, all_tokens: bool = False) -> tuple[Tensor, Tensor]:
        """Rows and columns in the input of the decode tokens, or of all new tokens, int64 `[B]` each."""
        key = (device, all_tokens)
        if key not in self._places:
            spans = self.spans
            every = [(i, j) for i, span in enumerate(spans) for j in range(span.num_tokens)] if all_tokens else None
            tokens = every if every is not None else self.decode_tokens
            rows = torch.tensor([spans[i].row for i, _ in tokens], device=device)
            self._places[key] = (rows, torch.tensor([spans[i].start + j for i, j in tokens], device=device))
        return self._places[key]

    def pick(self, x: Tensor) -> Tensor:
        """The decode tokens of `x [rows, heads, length, dim]`: `[B, heads, dim]`."""
        if self.rows_are_batch:
            return x.squeeze(2) if x.shape[0] == len(self.spans) else x[: len(self.spans), :, 0]
        if self.is_decode:
            return self._tokens(x)
        rows, columns = self.places(x.device)
        return x[rows, :, columns]

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
        ranges = [manager.sequences[self.spans[i].slot].demoted for i, _ in self.decode_tokens]
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
