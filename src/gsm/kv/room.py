"""How many bytes sequences of given lengths take, before they take them: what admission asks.

The hot zone of a sequence is bounded, so most of a long one counts at the size of its codes: that is why more requests
fit into the same memory. Estimates are upper bounds for sequences that share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from gsm.kv.manager import KVManager


class KVRoom:
    """Answers whether a manager has room. `max_bytes` bounds the bytes of pages in use; None is no bound."""

    def __init__(self, manager: KVManager, max_bytes: int | None, chunk_tokens: int) -> None:
        self.manager = manager
        self.max_bytes = max_bytes
        self.chunk_tokens = chunk_tokens
        self.num_hot_pages = manager.config.num_hot_pages  # the most that any sequence may want

    def limit(self, max_mib: float | None) -> None:
        """From now on no more than that many MiB of pages may be in use; what is beyond it stays until it is freed."""
        self.max_bytes = int(max_mib * 2**20) if max_mib is not None else None

    @property
    def used_bytes(self) -> int:
        """Bytes of pages in use in every tier, with summaries and statistics."""
        pools = [pool for group in self.manager.groups for pool in (*group.pools.values(), group.pages)]
        return sum(pool.num_used * pool.unit_bytes for pool in pools)

    def has_room(self, new_tokens: Mapping[int, int], new_sequence_tokens: int = 0) -> bool:
        """Whether every slot can take that many more tokens, and a new sequence `new_sequence_tokens`."""
        if not self.manager.can_append(new_tokens):
            return False
        lengths = [(self.manager.num_tokens(slot), added) for slot, added in new_tokens.items()]
        grown = sum(self.bytes_of(held + added) - self.bytes_of(held) for held, added in lengths)
        if self.max_bytes is not None and self.used_bytes + grown + self.bytes_of(new_sequence_tokens) > self.max_bytes:
            return False
        return self._pages_left(new_tokens) >= self._pages(new_sequence_tokens)

    def bytes_of(self, num_tokens: int) -> int:
        """Most bytes a sequence of that length takes, the chunk that is being computed included. Where positions are
        compacted no sequence ever holds more than the model's window."""
        config = self.manager.config
        pages = self._pages(num_tokens)
        hot_pages = min(pages, config.num_sink_pages + self.num_hot_pages + self._pages(self.chunk_tokens) + 1)
        total = 0
        for group in self.manager.groups:
            older = group.hot if group.warm is None else group.warm
            unit = hot_pages * group.hot.unit_bytes + (pages - hot_pages) * older.unit_bytes
            total += group.streams_per_slot * (unit + pages * group.pages.unit_bytes)
        return total

    def fits_empty(self, num_tokens: int) -> bool:
        """Whether one sequence of that length fits when it is alone."""
        limit = self.manager.max_pages
        if limit is not None and self._pages(num_tokens) > limit:
            return False
        return self.max_bytes is None or self.bytes_of(num_tokens) <= self.max_bytes

    @property
    def capacity_tokens(self) -> int | None:
        """Longest sequence that fits when it is alone; None where nothing bounds it."""
        if self.max_bytes is None and self.manager.max_pages is None:
            return None
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits_empty(middle) else (low, middle - 1)
        return low

    def _pages_left(self, new_tokens: Mapping[int, int]) -> float:
        """Pages of every stream that are free once `new_tokens` are stored."""
        limit = self.manager.max_pages
        if limit is None:
            return float("inf")
        used = max((-(-g.pages.num_used // max(1, g.streams_per_slot)) for g in self.manager.groups), default=0)
        lengths = [(self.manager.num_tokens(slot), added) for slot, added in new_tokens.items()]
        return limit - used - sum(self._pages(held + added) - self._pages(held) for held, added in lengths)

    def _pages(self, num_tokens: int) -> int:
        compactor = self.manager.compactor
        held = num_tokens if compactor is None else min(num_tokens, compactor.limit)
        return -(-held // self.manager.config.page_size)
