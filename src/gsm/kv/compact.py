"""Positions without end: past the trained window, what was dropped is cut out and the keys behind it move forward.

A sequence of the store has *compact* positions: the place of a token among what the table still has columns for. They
equal the logical ones until the next tokens would pass the trained window. Then, in every stream (layer, kv head),

    before   [sinks] [dropped, kept, dropped, ...] [hot zone]        columns 0 .. n
    after    [sinks] [kept, side by side]          [hot zone]        columns 0 .. n - cut

the columns that no stream needs any more are cut out, and every page that moved gets its keys rotated by the distance
it moved. The hot zone moves by the same distance in all streams, so that new tokens have one position for all of them.
From then on the store holds an ordinary, shorter sequence: attention, tiers and kernels know nothing of it, and neither
memory nor time per token grows with what was forgotten.

What a cut costs in precision: full-precision pages are rotated in float32 and rounded to their dtype. Coded pages are
decoded, rotated and encoded again (K only; V is never touched), which adds at most half a step of the code each time;
how often a page meets this is bounded by `most_moves`; the error is measured in benchmarks/LOG.md. A page that other
sequences own too is copied first.

Sources: StreamingLLM (arXiv:2309.17453) for positions inside the cache; SPEC K8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsm.arch import ModelArch
from gsm.arch.rotary import rotary_layouts
from gsm.config import CacheConfig
from gsm.core.codec import CODECS, Fields
from gsm.core.rotary import Rotary
from gsm.errors import ConfigError, KVError, UnsupportedModel
from gsm.kv.pool import UnitPool

if TYPE_CHECKING:
    from gsm.core.batch import Span
    from gsm.kv.group import StreamGroup
    from gsm.kv.manager import KVManager, SequenceState

_BLOCK = 1024  # pages turned at once: bounds temporary memory


@dataclass(frozen=True)
class Cut:
    """What was cut out of one sequence so far. Immutable: forks share it.

    Per group of layers: `origin` int32 `[rows, H, columns]`, the logical page of each packed column (-1: none);
    `codes` int32 `[rows or 1, H or 1, logical pages]`, why a page below the last cut is gone (-1: it is there).
    """

    num_pages: int  # columns fewer than logical pages
    num_packed: int  # leading columns with an origin of their own; later ones are logical pages minus num_pages
    origin: tuple[Tensor, ...]
    codes: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.origin, *self.codes))


class Compactor:
    """Keeps the positions of a manager's sequences inside `limit`, the model's trained window."""

    def __init__(self, rotaries: tuple[Rotary, ...], limit: int) -> None:
        self.rotaries = rotaries
        self.limit = limit
        self.num_cuts = 0
        self.num_recoded = 0  # coded pages that were encoded anew, counted once per move

    def check_chunk(self, config: CacheConfig, chunk_tokens: int) -> None:
        """Raises ConfigError when chunks of that size do not fit beside what the policy `recent` keeps."""
        room = self.limit - _most_kept(config)
        if config.policy == "recent" and chunk_tokens > room:
            raise ConfigError(
                f"engine.chunk_tokens is {chunk_tokens} but positions: compact leaves room for {room} beside what is "
                "kept; lower it, or keep less (hot_size, warm_size)"
            )

    def make_room(self, manager: KVManager, spans: Sequence[Span]) -> None:
        """Before a step: see that every span's new tokens have positions. Raises KVError when they cannot."""
        for span in spans:
            state = manager._sequence(span.slot)
            if state.num_tokens + span.num_tokens <= self.limit:
                continue
            if state.unsettled:
                manager._settle_draft(span.slot, state)
            self.cut(manager, span.slot)
            if state.num_tokens + span.num_tokens > self.limit:
                raise KVError(
                    f"{state.num_tokens} tokens are kept and {span.num_tokens} come, but the model was trained for "
                    f"{self.limit} positions; feed at most {max(1, self.limit - state.num_tokens)} at once, or keep "
                    "less (hot_size, warm_size)"
                )

    def cut(self, manager: KVManager, slot: int) -> int:
        """Cut out what all streams dropped; returns by how many pages the hot zone moved."""
        state = manager._sequence(slot)
        num_old, num_columns = state.demoted.stop, -(-state.num_tokens // manager.config.page_size)
        held = [group.table[slot, : len(group.rows), :, :num_columns].clone() for group in manager.groups]
        kept = [int((entries[..., :num_old] >= 0).sum(-1).max()) if num_old else 0 for entries in held]
        num_packed = max(kept, default=0)
        shift = num_old - num_packed
        if shift <= 0:
            return 0
        origins, codes = [], []
        for index, (group, entries) in enumerate(zip(manager.groups, held, strict=True)):
            order = _packing(entries[..., :num_old] >= 0, num_packed, to_the_left=not _has_window(group))
            origin, code = _history(state.cut, index, entries, num_old)
            packed = entries[..., :num_old].gather(-1, order)
            column = torch.arange(num_packed, device=order.device)
            distance = torch.cat(
                (column - order, order.new_full((*order.shape[:2], num_columns - num_old), -shift)), -1
            )
            moved = torch.cat((packed, entries[..., num_old:]), dim=-1)
            moved = self._turn(group, slot, moved, distance * manager.config.page_size, state.demoted, num_packed)
            group.table[slot, : len(group.rows), :, : moved.shape[-1]] = moved
            group.table[slot, :, :, moved.shape[-1] :] = -1
            group.has_holes = bool((group.table < -1).any())
            origins.append(origin.gather(-1, order).masked_fill(packed < 0, -1))
            codes.append(code)
        past = state.cut.num_pages if state.cut else 0
        state.cut = Cut(past + shift, num_packed, tuple(origins), tuple(codes))
        self._shorten(manager, state, shift, num_packed)
        self.num_cuts += 1
        return shift

    def _shorten(self, manager: KVManager, state: SequenceState, shift: int, num_packed: int) -> None:
        """All counters of a sequence move with its hot zone."""
        tokens = shift * manager.config.page_size
        state.num_tokens -= tokens
        state.num_complete -= shift
        state.num_judged = max(0, state.num_judged - tokens)
        state.num_unwindowed = max(0, state.num_unwindowed - tokens)
        state.demoted = range(min(state.demoted.start, num_packed), num_packed)
        unbounded = [group for group in manager.groups if not _has_window(group)]
        state.num_dropped -= min(state.num_dropped, shift * sum(group.streams_per_slot for group in unbounded))

    # -- turning keys ------------------------------------------------------------------------------------------

    def _turn(
        self, group: StreamGroup, slot: int, entries: Tensor, distance: Tensor, demoted: range, num_packed: int
    ) -> Tensor:
        """Rotate keys of pages `entries [rows, H, columns]` by `distance` tokens; returns entries, copies included."""
        entries = entries.clone()
        is_demoted = torch.arange(entries.shape[-1], device=entries.device) < num_packed
        is_demoted = is_demoted & (torch.arange(entries.shape[-1], device=entries.device) >= demoted.start)
        moves = (entries >= 0) & (distance != 0)
        for rotary, rows in self._rows_by_rotary(group):
            here = torch.zeros_like(moves)
            here[rows] = moves[rows]
            places = here.nonzero()
            for block in places.split(_BLOCK) if len(places) else ():
                at = tuple(block.unbind(-1))
                entries[at] = self._turn_pages(group, entries[at].long(), distance[at], is_demoted[at[2]], rotary).int()
        return entries

    def _rows_by_rotary(self, group: StreamGroup) -> list[tuple[Rotary, list[int]]]:
        found: dict[Rotary, list[int]] = {}
        for layer, row in group.rows.items():
            found.setdefault(self.rotaries[layer], []).append(row)
        return list(found.items())

    def _turn_pages(
        self, group: StreamGroup, ids: Tensor, distance: Tensor, is_demoted: Tensor, rotary: Rotary
    ) -> Tensor:
        k, v = group._tokens(ids)
        k = rotary.moved(k, distance)
        shared = group.pages.refs[ids] > 1
        ids = _own_copies(group, ids, shared, is_demoted)
        group.summarise(ids, k)
        is_hot = group.pages.fields["hot"][ids] >= 0
        for name, pool in group.pools.items():
            units = group.pages.fields[name][ids].long()
            there = (units >= 0) & (is_hot if name == "hot" else ~is_hot)
            codec = {"hot": CODECS["none"], "warm": group.codec, "cold": CODECS["int4"]}[name]
            if bool(there.any()):
                _store(pool, units[there], codec.encode(k[there], v[there]), shared[there])
                self.num_recoded += 0 if name == "hot" else int(there.sum())
        return ids


def _store(pool: UnitPool, units: Tensor, fields: Fields, is_new: Tensor) -> None:
    """Write the K fields of all units, and the V fields of those that hold nothing yet."""
    for name, values in fields.items():
        if name.startswith("k"):
            pool.fields[name][units] = values
        elif bool(is_new.any()):
            pool.fields[name][units[is_new]] = values[is_new]


def _own_copies(group: StreamGroup, ids: Tensor, shared: Tensor, is_demoted: Tensor) -> Tensor:
    """`ids` with shared pages replaced by new ones of this sequence, in the tier it wants; the caller fills them."""
    if not bool(shared.any()):
        return ids
    old, wants_codes = ids[shared], is_demoted[shared]
    records = group.pages.fields
    was_cold = records["cold"][old] >= 0
    if group.warm is None:
        wants_codes = torch.zeros_like(wants_codes)
    wants_codes = wants_codes & ~records["reopened"][old]
    new = group.pages.allocate(len(old))
    records = group.pages.fields  # the pool may have grown
    for field in records.values():
        field[new] = field[old]
    for name in ("hot", "warm", "cold"):
        records[name][new] = -1
    records["hot_refs"][new] = (~wants_codes).to(records["hot_refs"].dtype)
    kinds = {"hot": ~wants_codes, "warm": wants_codes & ~was_cold, "cold": wants_codes & was_cold}
    for name, chosen in kinds.items():
        if bool(chosen.any()):
            units = group.pools[name].allocate(int(chosen.sum()))
            records[name][new[chosen]] = units.int()
    for source, copy in zip(old.tolist(), new.tolist(), strict=True) if group.gaps else ():
        if source in group.gaps:
            group.gaps[copy] = group.gaps[source]
    for demoted in (False, True):
        group._release(old[is_demoted[shared] == demoted], wants_hot=not demoted)
    ids = ids.clone()
    ids[shared] = new
    return ids


def _has_window(group: StreamGroup) -> bool:
    return group.geometry.window is not None


def _packing(present: Tensor, num_packed: int, to_the_left: bool) -> Tensor:
    """Old columns `[rows, H, num_packed]` in their new order: pages that are there side by side, the rest air.

    Layers with a window keep theirs beside the hot zone, at the distance the window is measured by.
    """
    if to_the_left:
        return (~present).to(torch.int8).argsort(dim=-1, stable=True)[..., :num_packed]
    return present.to(torch.int8).argsort(dim=-1, stable=True)[..., present.shape[-1] - num_packed :]


# -- logical positions -----------------------------------------------------------------------------------------


def _history(cut: Cut | None, index: int, entries: Tensor, num_old: int) -> tuple[Tensor, Tensor]:
    """Logical page of the first columns `[rows, H, num_old]`, and removal codes of all logical pages below."""
    old = entries[..., :num_old]
    num_cut, num_packed = (cut.num_pages, cut.num_packed) if cut else (0, 0)
    plain = torch.arange(num_packed + num_cut, num_old + num_cut, dtype=torch.int32, device=old.device)
    origin = plain.expand(*old.shape[:2], -1)
    codes = old.new_full((*old.shape[:2], num_old + num_cut), -1)
    if cut is not None:
        origin = torch.cat((cut.origin[index], origin), dim=-1)
        before = cut.codes[index].expand(*old.shape[:2], -1)
        codes[..., : before.shape[-1]] = before
    # a column without a page tells why; packed columns that never held one (-1 origin) have told before
    gone = (old < -1) & (origin >= 0)
    rows, heads, columns = gone.nonzero(as_tuple=True)
    codes[rows, heads, origin[rows, heads, columns].long()] = old[rows, heads, columns]
    return origin, _uniform(codes)


def _uniform(codes: Tensor) -> Tensor:
    """One row where all streams agree, as they do under the policy `recent`."""
    return codes[:1, :1].clone() if bool((codes == codes[:1, :1]).all()) else codes


def logical_pages(state: SequenceState, index: int, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Table entries by logical page from those by column `[rows, H, columns]`, and each page's column (-1: none)."""
    columns = torch.arange(entries.shape[-1], device=entries.device).expand(entries.shape)
    cut = state.cut
    if cut is None:
        return entries, columns.masked_fill(entries < 0, -1)
    shape = entries.shape[:2]
    tail = entries[..., cut.num_packed :]
    wide = entries.new_full((*shape, cut.num_pages + entries.shape[-1]), -1)
    codes = cut.codes[index].to(entries.device).expand(*shape, -1)
    wide[..., : codes.shape[-1]] = codes
    wide[..., cut.num_packed + cut.num_pages :] = tail
    where = torch.full_like(wide, -1, dtype=torch.long)
    where[..., cut.num_packed + cut.num_pages :] = columns[..., cut.num_packed :]
    origin = cut.origin[index].to(entries.device).long()
    rows, heads, packed = (origin >= 0).nonzero(as_tuple=True)
    wide[rows, heads, origin[rows, heads, packed]] = entries[rows, heads, packed]
    where[rows, heads, origin[rows, heads, packed]] = packed
    return wide, where.masked_fill(wide < 0, -1)


def check_crop_below_cut(state: SequenceState, num_tokens: int, page_size: int) -> None:
    """Refuse a crop to a place in front of the last cut, whose streams no longer agree. Raises KVError."""
    if state.cut is None or num_tokens == 0:
        return
    if num_tokens < state.cut.num_packed * page_size:
        first = (state.cut.num_packed + state.cut.num_pages) * page_size
        raise KVError(
            f"cannot crop below token {first}: positions before it were compacted; crop to {first} or later, or to 0"
        )


def num_cut_tokens(state: SequenceState, page_size: int) -> int:
    """Tokens by which the logical length exceeds the compact one."""
    return state.cut.num_pages * page_size if state.cut is not None else 0


# -- making one ------------------------------------------------------------------------------------------------


def make_compactor(config: CacheConfig, arch: ModelArch) -> Compactor | None:
    """What `positions: compact` needs to know of a model; None under `positions: logical`.

    Raises UnsupportedModel for rotary embeddings that cannot be moved, ConfigError when what the policy keeps does not
    leave room for new tokens.
    """
    if config.positions == "logical":
        return None
    limit = arch.max_position_embeddings
    if limit <= 0:
        raise UnsupportedModel(f"{arch.model_type} does not say how many positions it was trained for")
    if any(layer.chunked for layer in arch.layers):
        raise UnsupportedModel(
            f"{arch.model_type} aligns attention to fixed positions, which compaction moves; use positions: logical"
        )
    room = limit - _most_kept(config)
    if config.policy == "recent" and room < config.page_size:
        raise ConfigError(
            f"cache.hot_size ({config.hot_size}) and warm_size ({config.warm_size or 0}) fill the {limit} positions "
            f"the model was trained for; keep at most {limit - config.page_size - _most_kept(config) + _window(config)}"
        )
    layouts = rotary_layouts(arch)
    return Compactor(tuple(Rotary(x.frequencies, x.pairs) for x in layouts), limit)


def most_moves(config: CacheConfig, limit: int) -> int:
    """How often a page can be moved, and therefore encoded anew, during its life under the policy `recent`."""
    room = limit - _most_kept(config)
    return -(-_most_kept(config) // max(1, room))


def _window(config: CacheConfig) -> int:
    return config.hot_size + (config.warm_size or 0)


def _most_kept(config: CacheConfig) -> int:
    """Tokens kept by the policy `recent`, with the page that is not full and the one that is not empty yet."""
    return _window(config) + (config.num_sink_pages + 2) * config.page_size
