"""From page scores to the rows of a block table. Pure tensor functions; `selection_numba` is the same, compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsm.config import CacheConfig
from gsm.integrations.vllm.summaries import Summaries


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests that read a selection in this step; the same for every layer.

    `tables int64 [B, P]`: physical blocks. `lengths int64 [B]`: tokens, the newest included. `counts int64 [B]`: blocks
    to read.
    """

    tables: Tensor
    lengths: Tensor
    counts: Tensor
    recent_tokens: int
    num_sinks: int
    block_size: int
    width: int  # the largest count

    @property
    def first_recent(self) -> Tensor:
        """The block from which on everything is read, `[B]`."""
        return (self.lengths - self.recent_tokens).clamp_min(0) // self.block_size

    @property
    def last(self) -> Tensor:
        """The block that holds the newest token, `[B]`."""
        return (self.lengths - 1) // self.block_size

    @property
    def read_lengths(self) -> Tensor:
        """Tokens that the kernel reads, `[B]`: full blocks and what the last one holds."""
        return (self.counts - 1) * self.block_size + (self.lengths - 1) % self.block_size + 1


def blocks_to_read(config: CacheConfig, num_tokens: int, block_size: int) -> int:
    """Blocks one kv head reads of `num_tokens` tokens: the budget, but sinks, recent tokens and one page at least."""
    sinks = -(-config.sink_tokens // block_size)
    recent = -(-config.recent_tokens // block_size) + 1
    everything, budget = -(-num_tokens // block_size), config.sparse.budget_for(num_tokens)
    return everything if budget >= num_tokens else min(max(budget // block_size, sinks + recent + 1), everything)


def plan_rows(config: CacheConfig, tables: Tensor, lengths: list[int], block_size: int) -> Rows:
    """Rows of requests with `lengths` tokens whose blocks are `tables [B, P]`."""
    counts = [blocks_to_read(config, n, block_size) for n in lengths]
    tensor = torch.tensor([lengths, counts], device=tables.device)
    columns = -(-max(lengths) // block_size)
    return Rows(
        *(tables[:, :columns], tensor[0], tensor[1], config.recent_tokens),
        *(-(-config.sink_tokens // block_size), block_size, max(counts)),
    )


def page_scores(query: Tensor, rows: Rows, summaries: Summaries) -> Tensor:
    """Scores `[B, H, P]` of a softmax-scaled `query [B, H, G, d]`; complete pages of earlier steps have summaries."""
    num_heads = query.shape[1]
    known = torch.arange(rows.tables.shape[1], device=query.device) < rows.last.view(-1, 1)
    known = known.unsqueeze(1).expand(-1, num_heads, -1)
    return summaries.scorer.score(query, summaries.read(rows.tables), known, rows.block_size)


def choose(scores: Tensor, rows: Rows) -> Tensor:
    """Physical blocks to read, `[B, H, width]`: sinks, recent ones and the best of `scores [B, H, P]`.

    The block with the newest token comes last among a row's `counts`; what follows it is never read.
    """
    page = torch.arange(rows.tables.shape[1], device=scores.device)
    last = rows.last.view(-1, 1, 1)
    always = (page < rows.num_sinks) | (page >= rows.first_recent.view(-1, 1, 1))
    scores = scores.masked_fill(always, torch.inf).masked_fill(page >= last, -torch.inf)
    chosen = scores.topk(rows.width, dim=-1).indices
    place = (rows.counts - 1).view(-1, 1, 1).expand(*chosen.shape[:2], 1)
    chosen = chosen.scatter(-1, place, last.expand_as(place))
    tables = rows.tables.unsqueeze(1).expand(-1, chosen.shape[1], -1)
    return tables.gather(-1, chosen)
