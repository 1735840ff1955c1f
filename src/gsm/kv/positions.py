"""Where every token of a sequence is, or why and when it went (SPEC K8).

Positions are logical: removal never renumbers. Under `positions: compact` a token also has a compact position, the one
its key is rotated for (`gsm.kv.compact`); otherwise the two are equal. A snapshot costs a few bytes per page, layer and
kv head; the reasons of removals come out of the page table itself (`removal`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsm.errors import KVError
from gsm.kv.compact import logical_pages
from gsm.kv.removal import REASONS, removed_at, removed_by

if TYPE_CHECKING:
    from gsm.kv.group import StreamGroup
    from gsm.kv.manager import KVManager, SequenceState

TIERS = ("hot", "warm", "cold", "removed")
HOT, WARM, COLD, REMOVED = range(4)


@dataclass(frozen=True, slots=True)
class Place:
    """One token in one layer and kv head."""

    layer: int
    head: int
    tier: str  # one of TIERS; sinks and the hot zone are hot
    page: int  # logical page: position // page_size
    page_id: int | None  # physical page; None when removed
    stored: str | None  # "full precision", or the codec's name
    unit: int | None  # row of the pool of that kind
    compact_position: int | None = None  # the position its key is rotated for; None when removed
    removed_at: int | None = None  # sequence length when it went
    removed_by: str | None = None  # the policy, or "warm_size" for the cap


@dataclass(frozen=True, slots=True)
class PositionMap:
    """A snapshot of one sequence. Tensors are `[layers, H, pages]`, on the CPU; absent heads have tier -1."""

    num_tokens: int
    page_size: int
    layers: tuple[int, ...]
    page_ids: Tensor  # int64, -1 = removed
    tier: Tensor  # int8: index into TIERS
    codec: str  # of coded pages
    is_coded: Tensor  # bool: only codes are left, no full precision
    unit: Tensor  # int64: row of the pool of coded or of full-precision pages, -1 = removed
    skip: Tensor  # int64: leading slots of the page whose tokens were removed before the page was opened anew
    codes: Tensor  # int64: removal of the page, or of its skipped slots
    column: Tensor  # int64: compact page, -1 = removed; equal to the page's own number unless positions are compact

    @property
    def num_positions(self) -> int:
        """Positions in use: the length the model sees. Smaller than `num_tokens` once positions were compacted."""
        last = self.tier.shape[-1] - 1
        behind = int(self.column[..., last].max()) if last >= 0 and self.column.numel() else last
        return self.num_tokens - (last - behind) * self.page_size

    def token(self, position: int) -> list[Place]:
        """Every layer's and head's copy of the token at a logical position. Raises KVError outside the sequence."""
        if not 0 <= position < self.num_tokens:
            raise KVError(f"there is no token {position}: the sequence has {self.num_tokens}; ask for 0 to n - 1")
        page, offset = divmod(position, self.page_size)
        return [
            self._place(row, head, page, offset)
            for row in range(len(self.layers))
            for head in range(self.tier.shape[1])
            if int(self.tier[row, head, page]) >= 0
        ]

    def _place(self, row: int, head: int, page: int, offset: int) -> Place:
        at = (row, head, page)
        layer, tier = self.layers[row], int(self.tier[at])
        if tier == REMOVED or offset < int(self.skip[at]):
            code = self.codes[at]
            reason = REASONS[int(removed_by(code))]
            return Place(layer, head, TIERS[REMOVED], page, None, None, None, None, int(removed_at(code)), reason)
        stored = "full precision"
        if bool(self.is_coded[at]):
            stored = "int4" if tier == COLD else self.codec
        position = int(self.column[at]) * self.page_size + offset
        return Place(layer, head, TIERS[tier], page, int(self.page_ids[at]), stored, int(self.unit[at]), position)

    def tokens_by_tier(self) -> Tensor:
        """int8 `[layers, H, num_tokens]`: index into TIERS of every token, -1 for absent heads."""
        tokens = self.tier.repeat_interleave(self.page_size, dim=-1)[..., : self.num_tokens].clone()
        offset = torch.arange(self.num_tokens) % self.page_size
        skipped = offset < self.skip.repeat_interleave(self.page_size, dim=-1)[..., : self.num_tokens]
        return tokens.masked_fill_(skipped & (tokens >= 0), REMOVED)

    def shares(self) -> dict[str, float]:
        """Share of all (token, layer, head) in each tier; sums to 1 for a sequence that is not empty."""
        tokens = self.tokens_by_tier()
        total = max(1, int((tokens >= 0).sum()))
        return {name: int((tokens == index).sum()) / total for index, name in enumerate(TIERS)}

    def removals(self) -> list[dict[str, Any]]:
        """What went, grouped: reason, sequence length at that moment, and how many (token, layer, head)."""
        sizes = torch.full_like(self.codes, self.page_size)
        sizes[..., -1:] -= self.tier.shape[-1] * self.page_size - self.num_tokens  # the last page may not be full
        sizes = torch.where(self.tier == REMOVED, sizes, self.skip)
        codes, inverse = self.codes[sizes > 0].unique(return_inverse=True)
        counts = torch.zeros(len(codes), dtype=torch.long).index_add_(0, inverse, sizes[sizes > 0])
        found = zip(removed_by(codes).tolist(), removed_at(codes).tolist(), counts.tolist(), strict=True)
        groups = [{"reason": REASONS[reason], "at_num_tokens": when, "num_tokens": n} for reason, when, n in found]
        return sorted(groups, key=lambda group: (group["at_num_tokens"], group["reason"]))

    def to_dict(self) -> dict[str, Any]:
        """A summary for JSON: shares, removals, and per logical page how many streams hold it in which tier."""
        per_page = [(self.tier == index).sum((0, 1)).tolist() for index in range(len(TIERS))]
        return {
            "num_tokens": self.num_tokens,
            "page_size": self.page_size,
            "num_positions": self.num_positions,
            "num_streams": int((self.tier[..., :1] >= 0).sum()),
            "share_by_tier": self.shares(),
            "removals": self.removals(),
            "streams_by_page": {name: per_page[index] for index, name in enumerate(TIERS)},
        }


def place_dict(place: Place) -> dict[str, Any]:
    """A place as plain data for JSON."""
    return asdict(place)


def position_map(manager: KVManager, slot: int) -> PositionMap:
    """A snapshot of one sequence. Raises KVError for an unknown slot."""
    num_tokens = manager.num_logical_tokens(slot)
    page_size = manager.config.page_size
    num_pages = -(-num_tokens // page_size)
    layers = sorted(layer for group in manager.groups for layer in group.rows)
    heads = max((group.geometry.num_kv_heads for group in manager.groups), default=0)
    shape = (len(layers), heads, num_pages)
    result = PositionMap(
        num_tokens,
        page_size,
        tuple(layers),
        page_ids=torch.full(shape, -1),
        tier=torch.full(shape, -1, dtype=torch.int8),
        codec=manager.config.warm.codec,
        is_coded=torch.zeros(shape, dtype=torch.bool),
        unit=torch.full(shape, -1),
        skip=torch.zeros(shape, dtype=torch.long),
        codes=torch.full(shape, -1),
        column=torch.full(shape, -1),
    )
    for index, group in enumerate(manager.groups):
        _fill(result, group, index, slot, manager.sequences[slot])
    return result


def _fill(result: PositionMap, group: StreamGroup, index: int, slot: int, state: SequenceState) -> None:
    num_pages = result.tier.shape[-1]
    if num_pages == 0:
        return
    num_cut = state.cut.num_pages if state.cut is not None else 0
    columns = group.table[slot, : len(group.rows), :, : num_pages - num_cut].cpu().long()
    entries, column = logical_pages(state, index, columns)
    records = {name: group.pages.fields[name].cpu() for name in ("hot", "warm", "cold", "skip")}
    held = entries.clamp_min(0)
    there = entries >= 0
    hot, warm, cold = (records[name][held].long() for name in ("hot", "warm", "cold"))
    page = torch.arange(num_pages)
    is_warm = ((page >= state.demoted.start) & (page < state.demoted.stop + num_cut)).expand_as(entries)
    tier = torch.where(is_warm, WARM, HOT).masked_fill(cold >= 0, COLD).masked_fill(~there, REMOVED).to(torch.int8)
    skip = records["skip"][held].long().masked_fill(~there, 0)
    codes = entries.masked_fill(there, -1)
    for page_id, code in group.gaps.items():
        codes[(entries == page_id) & (skip > 0)] = code
    rows = [result.layers.index(layer) for layer in group.rows]
    heads = slice(0, group.geometry.num_kv_heads)
    values = {
        "page_ids": entries.masked_fill(~there, -1),
        "tier": tier,
        "is_coded": there & (hot < 0),
        "unit": torch.where(hot >= 0, hot, torch.where(cold >= 0, cold, warm)).masked_fill(~there, -1),
        "skip": skip,
        "codes": codes,
        "column": column,
    }
    for name, value in values.items():
        getattr(result, name)[rows, heads] = value[list(group.rows.values())]
