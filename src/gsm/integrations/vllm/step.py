"""What the attention layers of one forward pass read.

The metadata builder makes a `Step`; the first layer plans it (by then the connector has said which blocks are gone).
Decode rows come first in vLLM's batches. With page selection on they go to one kernel call over a table of selected
pages, everything else (prompts, drafts of several tokens, layers that stay dense) to the back end as it is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from gsm.integrations.vllm.live import Live, judges_by_mass
from gsm.integrations.vllm.selection import Rows, plan_rows
from gsm.integrations.vllm.summaries import KnownBlocks


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of one layer, the same for all layers that are treated alike."""

    dense: Any  # metadata for all rows
    to_summarise: Tensor  # int64 [N]: blocks that became complete
    rows: Rows | None = None  # requests that read a selection: the first ones of the batch
    selected: Any = None  # metadata for them, over `tables`
    tables: Tensor | None = None  # int32 [B * H, width] (per head) or [B, width]: what `selected` reads
    rest: Any = None  # metadata for all other rows
    prepared: Any = None  # room shared by layers (selection_numba)
    mass: Tensor | None = None  # float32 [B, P]: the largest share any layer and head estimated; for eviction


class Step:
    """One forward pass as the layers of one metadata builder see it."""

    def __init__(self, builder: Any, common: Any, metadata: Any) -> None:
        self.builder = builder
        self.live: Live = builder.gsm
        self.config = self.live.config
        self.block_size: int = builder.kv_cache_spec.block_size
        self._common = common
        self._metadata = metadata
        self._plan: Plan | None = None
        self._derived: dict[str, Any] = {}

    def plan(self, num_blocks: int, num_kv_heads: int, device: torch.device) -> Plan:
        """The plan, made when first asked for."""
        if self._plan is None:
            self._plan = self._make_plan(num_blocks, num_kv_heads, device)
        return self._plan

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row, the new ones included."""
        known = self._common.seq_lens_cpu_upper_bound  # exact for rows that add one token
        lengths: list[int] = (known if known is not None else self._common.seq_lens.cpu()).tolist()
        return lengths[: self._common.num_reqs]

    @cached_property
    def starts(self) -> list[int]:
        """Where each row begins in the tokens of this step, and the end."""
        starts: list[int] = self._common.query_start_loc_cpu[: self._common.num_reqs + 1].tolist()
        return starts

    @property
    def tables(self) -> Tensor:
        """Physical blocks as vLLM has them, `[B, P]`."""
        tables: Tensor = self._common.block_table_tensor[: self._common.num_reqs]
        return tables

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """What layers derive from the step, made once."""
        if name not in self._derived:
            self._derived[name] = make()
        return self._derived[name]

    @cached_property
    def num_decodes(self) -> int:
        """Leading rows that add one token of an answer. A prompt that happens to end with a chunk of one is none."""
        starts = self._common.query_start_loc_cpu[: self._common.num_reqs + 1]
        decodes = starts.diff() == 1
        if self._common.is_prefilling is not None:
            decodes &= ~self._common.is_prefilling[: self._common.num_reqs].cpu()
        return int(decodes.long().cumprod(0).sum())

    def _make_plan(self, num_blocks: int, num_kv_heads: int, device: torch.device) -> Plan:
        common, columns = self._without_holes()
        dense = self._metadata if columns is None else self.builder.build_stock(common)
        vllm, counters = self.config.vllm, self.live.counters
        counters.steps += 1
        if not self.config.cache.sparse.enabled:
            self.builder.known = None  # nobody keeps summaries now
            return Plan(dense, common.slot_mapping.new_zeros(0))
        held = self.lengths if columns is None else common.seq_lens.tolist()
        rows = self._rows(common, held) if self.num_decodes else None
        to_summarise = self._update_known(common, rows, num_blocks, device)
        if rows is None:
            return Plan(dense, to_summarise)
        n = self.num_decodes
        counters.sparse_steps += 1
        counters.context_tokens += sum(self.lengths[:n])
        counters.read_tokens += int(rows.read_lengths.sum())
        selected, tables = self._selected(common, rows, num_kv_heads if vllm.per_head else 1, device)
        return Plan(
            *(dense, to_summarise, rows, selected, tables),
            rest=self.builder.build_stock(_from_row(common, n)) if n < common.num_reqs else None,
            prepared=self._prepare(rows, num_kv_heads),
            mass=self._room_for_mass(rows, columns),
        )

    def _rows(self, common: Any, held: list[int]) -> Rows | None:
        """The decode rows and how much each reads; None where that is everything. `held` are tokens still there."""
        n, vllm = self.num_decodes, self.config.vllm
        rows = plan_rows(self.config.cache, common.block_table_tensor[:n].long(), held[:n], self.block_size)
        everything = [-(-tokens // self.block_size) for tokens in held[:n]]
        counts = rows.counts.tolist()
        for i, logical in enumerate(self.lengths[:n]):
            if logical < vllm.dense_below_tokens:
                counts[i] = everything[i]
        if counts == everything and not vllm.always_select and not judges_by_mass(self.config):
            return None
        return replace(rows, counts=torch.tensor(counts, device=rows.counts.device), width=max(counts))

    def _update_known(self, common: Any, rows: Rows | None, num_blocks: int, device: torch.device) -> Tensor:
        sparse, known = self.config.cache.sparse, self.builder.known
        of = sparse.scorer, sparse.sigma
        if known is None or len(known.known) != num_blocks or known.of != of:
            known = self.builder.known = KnownBlocks(num_blocks, device, of)
        if self.builder.loads_blocks:
            known.forget(self._loaded(common))
        slots = common.slot_mapping[: common.num_actual_tokens].long()
        found: Tensor = known.update(slots, self.block_size, *((rows.tables, rows.last) if rows else ()))
        self.live.counters.summarised_blocks += len(found)
        return found

    def _loaded(self, common: Any) -> Tensor:
        """Blocks before the new tokens of rows in their prompt: a connector may have filled them just now."""
        found = [self.tables.new_zeros(0)]
        prefilling = common.is_prefilling
        for i, length in enumerate(self.lengths):
            if prefilling is None or bool(prefilling[i]):
                num_past = length - (self.starts[i + 1] - self.starts[i])
                found.append(self.tables[i, : num_past // self.block_size])
        return torch.cat(found).long()

    def _selected(self, common: Any, rows: Rows, num_tables: int, device: torch.device) -> tuple[Any, Tensor]:
        """Metadata for the decode rows; where heads choose for themselves, each is a request of its own."""
        requests = len(rows.lengths) * num_tables
        tables = torch.zeros(requests, rows.width, dtype=torch.int32, device=device)
        lengths = rows.read_lengths.repeat_interleave(num_tables).to(common.seq_lens.dtype)
        starts = torch.arange(requests + 1, dtype=torch.int32)
        fake = replace(
            common,
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=None,
            num_reqs=requests,
            num_actual_tokens=requests,
            max_query_len=1,
            max_seq_len=rows.width * self.block_size,
            block_table_tensor=tables,
            slot_mapping=common.slot_mapping[:0],
            **_PER_ROW,
        )
        return self.builder.build_selected(fake, per_head=self.config.vllm.per_head), tables

    def _prepare(self, rows: Rows, num_kv_heads: int) -> Any:
        compiled = compiled_selection() if rows.tables.device.type == "cpu" else None
        return compiled.Prepared(rows, num_kv_heads) if compiled and self.config.vllm.per_head else None

    def _room_for_mass(self, rows: Rows, columns: Tensor | None) -> Tensor | None:
        """Where layers add what they estimate, if a policy asks for it; handed to the connector after the step."""
        if not judges_by_mass(self.config):
            return None
        mass = torch.zeros(len(rows.lengths), rows.tables.shape[1], device=rows.tables.device)
        for i, last in enumerate(rows.last.tolist()):
            self.live.judged[int(rows.tables[i, last])] = (mass[i], columns[i] if columns is not None else None, last)
        return mass

    def _without_holes(self) -> tuple[Any, Tensor | None]:
        """The batch with dropped blocks taken out of its tables; logical block of each remaining column, or None.

        Only complete blocks before the newest tokens are ever dropped, so causal masks, which count from the end,
        stay right however many tokens a row adds.
        """
        common, holes = self._common, self.live.holes
        if not holes:
            return common, None
        tables = common.block_table_tensor[: common.num_reqs].clone()
        lengths = common.seq_lens[: common.num_reqs].clone()
        columns = torch.arange(tables.shape[1], device=tables.device).repeat(len(tables), 1)
        found = False
        for i, length in enumerate(self.lengths):
            gone = holes.get(int(tables[i, (length - 1) // self.block_size])) if length else None
            if gone:
                kept = torch.ones(tables.shape[1], dtype=torch.bool)
                kept[gone] = False
                order = torch.cat((kept.nonzero().flatten(), torch.tensor(gone))).to(tables.device)
                tables[i], columns[i] = tables[i][order], order
                lengths[i] -= len(gone) * self.block_size
                found = True
        if not found:
            return common, None
        changed = replace(
            common,
            block_table_tensor=tables,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.cpu(),
            max_seq_len=int(lengths.max()),
            _num_computed_tokens_cache=None,
        )
        return changed, columns


# What a batch says of each row or token, and the kernels of decode rows never ask for.
_PER_ROW: dict[str, Any] = {
    "is_prefilling": None,
    "req_idx": None,
    "positions": None,
    "_num_computed_tokens_cache": None,
    "_token_to_req_indices_cache": None,
}


def _from_row(common: Any, first: int) -> Any:
    """The batch without its first rows, each of which has one token."""

    def rows(x: Any) -> Any:
        return x[first:] if isinstance(x, Tensor) else x

    return replace(
        common,
        query_start_loc=common.query_start_loc[first:] - first,
        query_start_loc_cpu=common.query_start_loc_cpu[first:] - first,
        seq_lens=common.seq_lens[first:],
        seq_lens_cpu_upper_bound=rows(common.seq_lens_cpu_upper_bound),
        num_reqs=common.num_reqs - first,
        num_actual_tokens=common.num_actual_tokens - first,
        block_table_tensor=common.block_table_tensor[first:],
        slot_mapping=common.slot_mapping[first:],
        causal=rows(common.causal),
        **_PER_ROW,
    )


@lru_cache(maxsize=1)
def compiled_selection() -> Any:
    """The compiled selection, or None where numba is missing."""
    if importlib.util.find_spec("numba") is None:
        return None
    from gsm.integrations.vllm import selection_numba

    return selection_numba
