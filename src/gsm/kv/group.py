"""The pages of all layers that share one geometry, device and dtype.

A *stream* is one (sequence slot, layer row, kv head). The table gives each stream's logical pages a page id; streams of
one sequence start with pages at the same places and may lose pages one by one. A page id owns

* one row of `records`: where its tokens lie, its key summary, how many sequences still want it in full precision;
* a unit of the `hot` pool (full precision) until every sequence that holds it has demoted it;
* a unit of the `warm` pool (codes) from then on. Codes are written once: a page that is reopened for writing after it
  was coded stays in full precision for the rest of its life, so that no token is ever quantised a second time;
* a unit of the `cold` pool (int4) instead, once the policy calls it cold under `cold: int4`, for good.

`skip` counts the leading slots of a page that hold no token: a crop into a dropped page opens an empty one in its
place, and what was dropped stays dropped. Where a page was dropped the table says when and why (`removal`).

Everything here works on all layers and heads at once; nothing loops over layer x head x page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gsm.core.codec import CODECS, FieldSpec
from gsm.core.scorers import Scorer
from gsm.core.view import KVView, Window
from gsm.kv.mass import MassStatistics
from gsm.kv.pool import UnitPool, lasting

_BLOCK = 1024  # pages worked on at once when many complete or demote together: bounds temporary memory


@dataclass(frozen=True, slots=True)
class Geometry:
    """What must agree for layers to share pools."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    device: torch.device
    window: Window | None = None


class StreamGroup:
    """Pools and page table of the layers of one geometry."""

    def __init__(
        self,
        geometry: Geometry,
        page_size: int,
        codec: str,
        scorer: Scorer,
        num_layers: int,
        statistics: MassStatistics | None = None,
        has_cold_pool: bool = False,
    ) -> None:
        self.geometry = geometry
        self.page_size = page_size
        self.codec = CODECS[codec]
        self.scorer = scorer
        self.statistics = statistics
        self.rows: dict[int, int] = {}  # layer index -> row of the table
        self.has_holes = False
        self.scratch: dict[str, Any] = {}
        self.has_skips = False
        self.gaps: dict[int, int] = {}  # page id -> the removal that explains its skipped slots
        self.nonfinite: Counter[int] = Counter()  # layer -> completed pages with an inf or a NaN
        g = geometry
        plain = CODECS["none"].fields(page_size, g.k_dim, g.v_dim, g.dtype)
        records = _RECORD | scorer.fields(g.k_dim) | (statistics.fields if statistics is not None else {})
        self.pages = UnitPool(records, g.device, capacity=0)
        self.hot = UnitPool(plain, g.device, capacity=0)
        coded = self.codec.fields(page_size, g.k_dim, g.v_dim, g.dtype)
        self.warm = UnitPool(coded, g.device, capacity=0) if codec != "none" else None
        int4 = CODECS["int4"].fields(page_size, g.k_dim, g.v_dim, g.dtype)
        self.cold = UnitPool(int4, g.device, capacity=0) if has_cold_pool else None
        self.table = lasting((0, num_layers, g.num_kv_heads, 0), torch.int32, g.device)
        self._layers_of: Tensor | None = None
        self._layer_tables: tuple[Tensor, ...] = ()

    @property
    def pools(self) -> dict[str, UnitPool]:
        """The pools of tokens by the record field that points into them."""
        pools = {"hot": self.hot, "warm": self.warm, "cold": self.cold}
        return {name: pool for name, pool in pools.items() if pool is not None}

    # -- tables ------------------------------------------------------------------------------------------------

    def add_layer(self, layer: int) -> int:
        return self.rows.setdefault(layer, len(self.rows))

    @property
    def streams_per_slot(self) -> int:
        return len(self.rows) * self.geometry.num_kv_heads

    def fit_table(self, num_slots: int, num_pages: int) -> None:
        """Make room for `num_slots` slots of `num_pages` logical pages."""
        slots, layers, heads, pages = self.table.shape
        if num_slots <= slots and num_pages <= pages:
            return
        new_pages = pages if num_pages <= pages else max(num_pages + 8, pages + pages // 2)
        grown = lasting((max(num_slots, slots), layers, heads, new_pages), torch.int32, self.geometry.device).fill_(-1)
        grown[:slots, :, :, :pages] = self.table
        self.table = grown

    def ids(self, slot: int, first: int, last: int) -> Tensor:
        """Page ids int64 of pages [first, last) of every stream of a slot that are still there, flat."""
        ids = self.table[slot : slot + 1, : len(self.rows), :, first:last].reshape(-1)
        return ids[ids >= 0].long()

    # -- life of a page ----------------------------------------------------------------------------------------

    def open_pages(self, slot: int, first: int, last: int, rows: slice | None = None) -> None:
        """Give pages [first, last) of a slot (of `rows`, default all) empty full-precision pages."""
        rows = rows or slice(0, len(self.rows))
        target = self.table[slot, rows, :, first:last]
        self.table[slot, rows, :, first:last] = self._new_pages(target.numel()).int().view(target.shape)

    def _new_pages(self, num_pages: int) -> Tensor:
        self.hot.reserve(num_pages)
        ids = self.pages.allocate(num_pages)
        self._make_hot(ids)
        records = self.pages.fields
        records["warm"][ids] = -1
        records["cold"][ids] = -1
        records["hot_refs"][ids] = 1
        records["skip"][ids] = 0
        records["reopened"][ids] = False
        if self.statistics is not None:
            records["observed"][ids] = 0
        return ids

    def complete(self, slot: int, first: int, last: int) -> None:
        """Summarise the keys of full pages [first, last) of a slot, and look for numbers that are not finite."""
        records = self.pages.fields
        for ids in _blocks(self.ids(slot, first, last)):
            units = records["hot"][ids].long()
            k, v = self.hot.fields["k"][units], self.hot.fields["v"][units]
            self.summarise(ids, k)
            totals = k.float().sum((1, 2)) + v.float().sum((1, 2))
            if not bool(totals.isfinite().all()):
                self._note_nonfinite(slot, ids[~totals.isfinite()])

    def summarise(self, ids: Tensor, keys: Tensor) -> None:
        """Record the summaries of pages with these `keys [N, page_size, k_dim]`."""
        for name, values in self.scorer.encode(self.scorer.summarise(keys)).items():
            self.pages.fields[name][ids] = values

    def _note_nonfinite(self, slot: int, ids: Tensor) -> None:
        per_row = torch.isin(self.table[slot, : len(self.rows)], ids.int()).sum((1, 2)).tolist()
        self.nonfinite.update({layer: per_row[row] for layer, row in self.rows.items() if per_row[row]})

    def demote(self, slot: int, first: int, last: int) -> int:
        """A slot no longer needs pages [first, last) in full precision; returns how many pages really went down."""
        if self.warm is None:
            return 0
        records = self.pages.fields
        num_demoted = 0
        for ids in _blocks(self.ids(slot, first, last)):
            num_demoted += self._leave_hot(ids[records["hot"][ids] >= 0])
        return num_demoted

    def _leave_hot(self, ids: Tensor) -> int:
        records = self.pages.fields
        records["hot_refs"][ids] -= 1
        going = ids[(records["hot_refs"][ids] <= 0) & ~records["reopened"][ids]]
        if len(going) == 0:
            return 0
        assert self.warm is not None
        hot_units = records["hot"][going].long()
        uncoded = records["warm"][going] < 0
        if bool(uncoded.any()):
            to_code, source = going[uncoded], hot_units[uncoded]
            fields = self.codec.encode(self.hot.fields["k"][source], self.hot.fields["v"][source])
            units = self.warm.allocate(len(to_code))
            for name, values in fields.items():
                self.warm.fields[name][units] = values
            records["warm"][to_code] = units.int()
        self.hot.release(hot_units)
        records["hot"][going] = -1
        return len(going)

    def release(self, slot: int, first: int, last: int, demoted: range) -> None:
        """Remove a slot from the owners of its pages [first, last); `demoted` are those it has demoted already."""
        self._release(self.ids(slot, first, min(last, max(first, demoted.start))), wants_hot=True)
        self._release(self.ids(slot, max(first, demoted.start), min(last, demoted.stop)), wants_hot=False)
        self._release(self.ids(slot, max(first, demoted.stop), last), wants_hot=True)
        self.table[slot, :, :, first:last] = -1
        if self.pages.num_used == 0:
            self.has_holes = self.has_skips = False

    def _release(self, ids: Tensor, wants_hot: bool) -> None:
        if len(ids) == 0:
            return
        records = self.pages.fields
        freed = self.pages.release(ids)
        for page_id in freed.tolist() if self.gaps else ():
            self.gaps.pop(page_id, None)
        for name, pool in self.pools.items():
            units = records[name][freed]
            pool.release(units[units >= 0].long())
        if self.warm is not None and wants_hot:
            survivors = ids[self.pages.refs[ids] > 0]
            self._leave_hot(survivors[records["hot"][survivors] >= 0])

    def drop(self, slot: int, stream_mask: Tensor, demoted: range, code: int) -> int:
        """Forget pages: `stream_mask [rows, H, pages]` is true where a page of a stream goes. Returns their number.

        The table remembers `code` (see `removal`) in their place.
        """
        pages = stream_mask.shape[-1]
        held = self.table[slot, : len(self.rows), :, :pages]
        gone = stream_mask & (held >= 0)
        page = torch.arange(pages, device=held.device)
        was_demoted = (page >= demoted.start) & (page < demoted.stop)
        for wants_hot, subset in ((False, gone & was_demoted), (True, gone & ~was_demoted)):
            self._release(held[subset].long(), wants_hot)
        held[gone] = code
        num_dropped = int(gone.sum())
        self.has_holes |= num_dropped > 0
        return num_dropped

    def chill(self, slot: int, stream_mask: Tensor) -> int:
        """Turn the codes of pages `stream_mask [rows, H, pages]` into int4, for good; returns how many changed.

        Pages that some sequence wants in full precision, and those that are int4 already, stay as they are.
        """
        assert self.cold is not None
        records = self.pages.fields
        held = self.table[slot, : len(self.rows), :, : stream_mask.shape[-1]]
        ids = held[stream_mask & (held >= 0)].long()
        ids = ids[(records["hot"][ids] < 0) & (records["warm"][ids] >= 0)]
        for block in _blocks(ids):
            fields = CODECS["int4"].encode(*self._tokens(block))
            units = self.cold.allocate(len(block))
            for name, values in fields.items():
                self.cold.fields[name][units] = values
            self._release_codes(block)
            records["cold"][block] = units.int()
        return len(ids)

    def _release_codes(self, ids: Tensor) -> None:
        """Pages give up the codes they have."""
        for name, pool in self.pools.items():
            if name != "hot":
                units = self.pages.fields[name][ids]
                pool.release(units[units >= 0].long())
                self.pages.fields[name][ids] = -1

    def num_dropped(self, slot: int, num_pages: int) -> int:
        """Pages among the first `num_pages` of a slot that were dropped, summed over streams."""
        return int((self.table[slot : slot + 1, : len(self.rows), :, :num_pages] < -1).sum())

    # -- sharing -----------------------------------------------------------------------------------------------

    def share(self, source: int, target: int, num_pages: int, demoted: range) -> None:
        """Let slot `target` own the pages of slot `source` too."""
        self.table[target] = self.table[source]
        self.pages.retain(self.ids(source, 0, num_pages))
        for first, last in ((0, demoted.start), (demoted.stop, num_pages)):
            wanted = self.ids(source, min(first, num_pages), min(last, num_pages))
            self.pages.fields["hot_refs"][wanted] += 1

    def own(self, slot: int, page: int, was_demoted: bool, num_kept: int) -> int:
        """Make the pages at `page` of a slot its own and writable in full precision; returns how many were coded.

        Shared pages are copied, coded ones decoded, dropped ones replaced by empty ones. `num_kept` is the number of
        leading tokens that stay; `was_demoted` tells whether the slot had given up its claim to full precision.
        """
        held = self.table[slot, : len(self.rows), :, page]
        present = held >= 0
        ids = held[present].long()
        is_shared = self.pages.refs[ids] > 1
        self.hot.reserve(held.numel())
        num_coded = int((self.pages.fields["hot"][ids] < 0).sum())
        if bool(is_shared.any()):
            shared = ids[is_shared]
            ids[is_shared] = self._copy(shared)
            self._release(shared, wants_hot=not was_demoted)
            held[present] = ids.int()
        coded = ids[self.pages.fields["hot"][ids] < 0]
        if len(coded):
            self._reopen(coded)
        skip = self.pages.fields["skip"]
        skip[ids] = skip[ids].clamp_max(num_kept)
        if len(ids) < held.numel():
            empty = self._new_pages(held.numel() - len(ids))
            skip = self.pages.fields["skip"]  # the pool may have grown
            skip[empty] = num_kept
            if num_kept > 0:
                self.has_skips = True
                self.gaps.update(zip(empty.tolist(), held[~present].tolist(), strict=True))
            held[~present] = empty.int()
        return num_coded

    def _copy(self, ids: Tensor) -> Tensor:
        copies = self.pages.allocate(len(ids))
        records = self.pages.fields
        k, v = self._tokens(ids)
        for field in records.values():
            field[copies] = field[ids]
        records["reopened"][copies] |= records["hot"][ids] < 0
        for source, copy in zip(ids.tolist(), copies.tolist(), strict=True) if self.gaps else ():
            if source in self.gaps:
                self.gaps[copy] = self.gaps[source]
        self._attach_hot(copies, k, v)
        return copies

    def _reopen(self, ids: Tensor) -> None:
        records = self.pages.fields
        k, v = self._tokens(ids)
        self._release_codes(ids)
        records["reopened"][ids] = True
        self._attach_hot(ids, k, v)

    def _attach_hot(self, ids: Tensor, k: Tensor, v: Tensor) -> None:
        """Give pages full-precision units with this content, wanted by one owner."""
        records = self.pages.fields
        self._make_hot(ids)
        units = records["hot"][ids].long()
        self.hot.fields["k"][units], self.hot.fields["v"][units] = k, v
        records["warm"][ids] = -1
        records["cold"][ids] = -1
        records["hot_refs"][ids] = 1

    def _tokens(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Full-precision tokens `[N, page_size, dim]` of pages, decoded where only codes are left."""
        view = self.view_of(self.table[:0, 0], torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), 0)
        k, v = view.read(ids.unsqueeze(-1))
        return k, v

    def _make_hot(self, ids: Tensor) -> None:
        """Attach a full-precision unit to each page. V is zeroed: 0 * NaN from an unused slot would poison outputs."""
        units = self.hot.allocate(len(ids))
        self.hot.fields["k"][units] = 0
        self.hot.fields["v"][units] = 0
        self.pages.fields["hot"][ids] = units.int()

    # -- attention mass ----------------------------------------------------------------------------------------

    def places(self, layer: int, slots: Tensor, pages: Tensor) -> Tensor:
        """Flat places in the table of logical pages `[B, H, S]` of a layer, int64; -1 where a page is negative."""
        _, layers, heads, capacity = self.table.shape
        head = torch.arange(heads, device=pages.device)
        stream = (slots.view(-1, 1) * layers + self.rows[layer]) * heads + head
        return (pages + stream.unsqueeze(-1) * capacity).masked_fill(pages < 0, -1)

    def observe(self, places: Tensor, mass: Tensor) -> None:
        """Record `mass [N]` for the pages at flat table `places [N]` that are still there."""
        if self.statistics is None:
            return
        ids = self.table.view(-1)[places.clamp_min(0)].long()
        there = (ids >= 0) & (places >= 0)
        self.statistics.record(self.pages.fields, ids[there], mass[there])

    def mean_mass(self, entries: Tensor) -> Tensor | None:
        """float32 mass of table entries `[...]`, NaN where there is no page or no observation; None if not kept."""
        return self.statistics.mean(self.pages.fields, entries) if self.statistics is not None else None

    # -- reading -----------------------------------------------------------------------------------------------

    def layer_view(self, layer: int, slots: Tensor, seq_lens: Tensor, max_pages: int) -> KVView:
        if self._layers_of is not self.table:  # it moved; cutting it once is cheaper than once per layer and step
            self._layer_tables, self._layers_of = self.table.unbind(1), self.table
        return self.view_of(self._layer_tables[self.rows[layer]], slots, seq_lens, max_pages)

    def view_of(self, table: Tensor, slots: Tensor, seq_lens: Tensor, max_pages: int) -> KVView:
        return KVView(
            table=table,
            slots=slots,
            seq_lens=seq_lens,
            max_pages=max_pages,
            page_size=self.page_size,
            has_holes=self.has_holes,
            has_skips=self.has_skips,
            records=self.pages.fields,
            hot=self.hot.fields,
            warm=self.warm.fields if self.warm is not None else None,
            cold=self.cold.fields if self.cold is not None and self.cold.num_used else None,
            codec=self.codec,
            scorer=self.scorer,
            scratch=self.scratch,
        )


_RECORD: FieldSpec = {
    "hot": ((), torch.int32),
    "warm": ((), torch.int32),
    "cold": ((), torch.int32),
    "hot_refs": ((), torch.int16),
    "skip": ((), torch.int16),
    "reopened": ((), torch.bool),
}


def _blocks(ids: Tensor) -> Iterator[Tensor]:
    return iter(ids.split(_BLOCK)) if len(ids) else iter(())
