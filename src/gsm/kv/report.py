"""What the KV store costs, tier by tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gsm.kv.manager import KVManager


@dataclass(frozen=True, slots=True)
class KVStats:
    """Sizes in bytes, pages counted per kv head and layer, means per kv head and decode step.

    `kv_bytes` are pages in use with codes, scales, full-precision copies, summaries, statistics and tables;
    `kv_pool_bytes` is what is reserved for them. The two means are None before the first decode step.
    """

    kv_bytes: int
    kv_pool_bytes: int
    bytes_by_tier: dict[str, int]
    pages_by_tier: dict[str, int]
    statistics_bytes: int  # attention mass, part of bookkeeping
    num_demoted: int
    num_chilled: int  # turned from warm codes into int4
    num_dropped: int
    num_reopened: int  # coded pages that a crop made writable again; they stay in full precision
    attended_tokens_mean: float | None
    recalled_tokens_mean: float | None  # of those, older than the hot zone
    nonfinite_pages: dict[int, int]  # layer -> completed pages that hold an inf or a NaN; empty when all is well


def collect(manager: KVManager) -> KVStats:
    """Add up all groups of a manager."""
    tiers = {"hot": 0, "warm": 0, "cold": 0, "bookkeeping": 0}
    pages = {"hot": 0, "warm": 0, "cold": 0}
    reserved = statistics = 0
    nonfinite: Counter[int] = Counter()
    for group in manager.groups:
        for name, pool in {**group.pools, "bookkeeping": group.pages}.items():
            tiers[name] += pool.num_used * pool.unit_bytes
            reserved += pool.capacity * pool.unit_bytes
        for name, pool in group.pools.items():
            pages[name] += pool.num_used
        tiers["bookkeeping"] += group.pages.num_used * group.table.element_size()
        reserved += group.table.nbytes
        statistics += group.pages.num_used * group.statistics.nbytes if group.statistics is not None else 0
        nonfinite += group.nonfinite
    samples = manager.attended_samples
    return KVStats(
        kv_bytes=sum(tiers.values()),
        kv_pool_bytes=reserved,
        bytes_by_tier=tiers,
        pages_by_tier=pages,
        statistics_bytes=statistics,
        num_demoted=manager.counters["demoted"],
        num_chilled=manager.counters["chilled"],
        num_dropped=manager.counters["dropped"],
        num_reopened=manager.counters["reopened"],
        attended_tokens_mean=manager.attended_tokens / samples if samples else None,
        recalled_tokens_mean=manager.recalled_tokens / samples if samples else None,
        nonfinite_pages=dict(sorted(nonfinite.items())),
    )


def sequence_bytes(manager: KVManager, slot: int) -> int:
    """Bytes of the pages a sequence holds in every tier; shared ones count in full."""
    num_pages = -(-manager.num_tokens(slot) // manager.config.page_size)
    total = 0
    for group in manager.groups:
        ids = group.ids(slot, 0, num_pages)
        total += len(ids) * group.pages.unit_bytes
        for name, pool in group.pools.items():
            total += int((group.pages.fields[name][ids] >= 0).sum()) * pool.unit_bytes
    return total
