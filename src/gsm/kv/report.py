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
    num_dropped: int
    num_reopened: int  # coded pages that a crop made writable again; they stay in full precision
    attended_tokens_mean: float | None
    recalled_tokens_mean: float | None  # of those, older than the hot zone
    nonfinite_pages: dict[int, int]  # layer -> completed pages that hold an inf or a NaN; empty when all is well


def collect(manager: KVManager) -> KVStats:
    """Add up all groups of a manager."""
    tiers = {"hot": 0, "warm": 0, "bookkeeping": 0}
    pages = {"hot": 0, "warm": 0}
    reserved = statistics = 0
    nonfinite: Counter[int] = Counter()
    for group in manager.groups:
        pools = {"hot": group.hot, "warm": group.warm, "bookkeeping": group.pages}
        for name, pool in pools.items():
            if pool is not None:
                tiers[name] += pool.num_used * pool.unit_bytes
                reserved += pool.capacity * pool.unit_bytes
        tiers["bookkeeping"] += group.pages.num_used * group.table.element_size()
        reserved += group.table.nbytes
        statistics += group.pages.num_used * group.statistics.nbytes if group.statistics is not None else 0
        live = group.pages.refs > 0
        in_hot = int((live & (group.pages.fields["hot"] >= 0)).sum())
        pages["hot"] += in_hot
        pages["warm"] += int(live.sum()) - in_hot
        nonfinite += group.nonfinite
    samples = manager.attended_samples
    return KVStats(
        kv_bytes=sum(tiers.values()),
        kv_pool_bytes=reserved,
        bytes_by_tier=tiers,
        pages_by_tier=pages,
        statistics_bytes=statistics,
        num_demoted=manager.counters["demoted"],
        num_dropped=manager.counters["dropped"],
        num_reopened=manager.counters["reopened"],
        attended_tokens_mean=manager.attended_tokens / samples if samples else None,
        recalled_tokens_mean=manager.recalled_tokens / samples if samples else None,
        nonfinite_pages=dict(sorted(nonfinite.items())),
    )
