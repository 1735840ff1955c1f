"""What the KV store shows to attention: one layer of some sequences, as page tables over pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gsm.core.codec import CODECS, Codec, Fields
from gsm.core.scorers import Scorer


@dataclass(frozen=True, slots=True)
class Window:
    """The bounded past of a layer: the last `size` tokens, or (chunked) those since the last multiple of `size`."""

    size: int
    chunked: bool = False

    def first_visible(self, position: int) -> int:
        """The first key that a query at `position` sees."""
        return position - position % self.size if self.chunked else max(0, position - self.size + 1)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer asks of attention, besides q, k and v."""

    scale: float
    softcap: float | None = None
    window: int | None = None  # a query at position p sees keys p - window + 1 .. p
    sink_logits: Tensor | None = None  # [num_query_heads]: one extra logit per head that takes mass, carries no value
    chunk: int | None = None  # a query at position p sees keys p - p % chunk .. p
    value_dims: int | None = None  # latent attention: values are the first channels of the keys, and V is not stored

    @property
    def most_visible(self) -> int | None:
        """Keys that a query sees at most; None where there is no such bound."""
        return self.chunk if self.chunk is not None else self.window

    def oldest(self, position: Tensor) -> Tensor:
        """First key that queries at `position` see, of its shape. Only for layers with a bound."""
        if self.chunk is not None:
            return position - position % self.chunk
        assert self.window is not None
        return position - self.window + 1

    def values(self, k: Tensor, v: Tensor) -> Tensor:
        """The values that belong to stored `k [..., k_dim]` and `v [..., v_dim]`."""
        return v if self.value_dims is None else k[..., : self.value_dims]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pages a sparse decode step reads: sinks, recent tokens, and the best older pages up to a budget."""

    num_sink_pages: int
    recent_tokens: int
    budget_pages: tuple[int, ...]  # per sequence of the batch, counting all three kinds


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer of a batch of sequences. Nothing is copied: tables point into pools.

    A page id indexes `records` (one row per page of one kv head). `records["hot"]` and `records["warm"]` say where
    the page's tokens lie: row of the full-precision pool, row of the coded pool, or -1. Full precision wins.
    Positions are logical: token t of a sequence lies in logical page t // page_size, whatever was dropped.
    """

    table: Tensor  # int32 [num_slots, H, page_capacity]: logical page -> page id, negative = dropped or not there
    slots: Tensor  # int64 [B]: rows of `table`
    seq_lens: Tensor  # int64 [B]: tokens per sequence, those of the current step included
    max_pages: int  # logical pages of the longest sequence
    page_size: int
    has_holes: bool  # some page was dropped
    records: Fields
    hot: Fields  # "k" [num_hot, page_size, k_dim], "v" [num_hot, page_size, v_dim]
    warm: Fields | None
    codec: Codec
    scorer: Scorer
    scratch: dict[str, Any]  # back ends keep here what they derive from the pools; lives as long as these
    has_skips: bool = False  # the first records["skip"] slots of some page hold no token
    cold: Fields | None = None  # int4 codes of pages whose records["cold"] is >= 0; None while there are none

    def page_ids(self) -> Tensor:
        """Page ids int64 `[B, H, max_pages]`; negative where there is no page."""
        ids = self.table[self.slots, :, : self.max_pages].long()
        page = torch.arange(self.max_pages, device=ids.device)
        beyond = page >= -(-self.seq_lens // self.page_size).unsqueeze(-1)
        return ids.masked_fill(beyond.unsqueeze(1), -1)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of pages `ids [..., S]`: `k [..., S * page_size, k_dim]`, `v [...]`; zeros where an id is negative."""
        flat = ids.reshape(-1)
        if self.warm is None:
            rows = self.records["hot"][flat.clamp_min(0)].long()
            k, v = self.hot["k"][rows], self.hot["v"][rows]
        else:
            k, v = self._read_mixed(flat)
        if self.has_holes or len(self.slots) > 1:  # otherwise every id is a page
            absent = (flat < 0).view(-1, 1, 1)
            k.masked_fill_(absent, 0.0)
            v.masked_fill_(absent, 0.0)
        shape = (*ids.shape[:-1], ids.shape[-1] * self.page_size)
        return k.reshape(*shape, k.shape[-1]), v.reshape(*shape, v.shape[-1])

    def _read_mixed(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        assert self.warm is not None
        present = flat.clamp_min(0)
        hot_rows = self.records["hot"][present].long()
        k, v = self.hot["k"][hot_rows.clamp_min(0)], self.hot["v"][hot_rows.clamp_min(0)]
        self._decode_into(k, v, present, (hot_rows < 0).nonzero().squeeze(-1), "warm", self.warm, self.codec)
        if self.cold is not None:
            is_cold = ((hot_rows < 0) & (self.records["cold"][present] >= 0)).nonzero().squeeze(-1)
            self._decode_into(k, v, present, is_cold, "cold", self.cold, CODECS["int4"])
        return k, v

    def _decode_into(
        self, k: Tensor, v: Tensor, ids: Tensor, where: Tensor, tier: str, fields: Fields, codec: Codec
    ) -> None:
        rows = self.records[tier][ids[where]].long()
        k[where], v[where] = codec.decode({name: field[rows] for name, field in fields.items()}, k.dtype)

    def summaries(self, ids: Tensor) -> Any:
        """Summaries `[...]` of pages `ids [...]` (any value where the id is negative or the page is not complete)."""
        names = self.scorer.fields(self.hot["k"].shape[-1])
        return self.scorer.decode({name: self.records[name][ids.clamp_min(0)] for name in names})
