"""Bring pages of one sequence down because of what they say, not because of how they were attended.

The hook that graded policies act through. Pages only go down: out of full precision, to int4, or away. Sinks, the
newest `recent_tokens` and pages that are not complete stay; so does, in its codes, a page that others hold as well
(a prefix, a fork), because what one request does to it would change another's answer. Dropping gives back this
sequence's own claim only and is always possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsm.config import CacheConfig
from gsm.kv.policies.graded import COLD, REMOVED, WARM
from gsm.kv.removal import removal_code

if TYPE_CHECKING:
    from gsm.kv.group import StreamGroup
    from gsm.kv.manager import KVManager


def lower(manager: KVManager, slot: int, tiers: Tensor, reason: str, num_heavy: int = 0) -> int:
    """Lower pages to at most `tiers` (int8 `[pages]`, see `gsm.kv.policies.graded`); `reason` is one of REASONS.

    Of the pages that would go, every head keeps the `num_heavy` with the largest attention mass (int4 instead), and
    all with at least `cache.sink_mass`, where mass is kept. Returns the page from which on they are too new to go down;
    ask again when the sequence has grown. Layers with a bounded past are left alone: they give their pages back anyway.
    """
    state, config = manager._sequence(slot), manager.config
    first = config.num_sink_pages
    last = min(
        len(tiers), state.num_complete, (state.num_tokens - state.rules.config.recent_tokens) // config.page_size
    )
    if last <= first:
        return max(0, last)
    tiers = tiers[:last].clone()
    tiers[:first] = 0
    leaving = (tiers >= WARM).nonzero().flatten()
    if len(leaving) == 0:
        return last
    manager.demote_until(slot, int(leaving[-1]) + 1)
    for group in manager.groups:
        if group.geometry.window is not None:
            continue
        held = group.table[slot, : len(group.rows), :, :last]
        wanted = _with_heavy(group, held, tiers.to(held.device).expand(held.shape), state.rules.config, num_heavy)
        if group.cold is not None:
            alone = group.pages.refs[held.clamp_min(0).long()] == 1
            manager.counters["chilled"] += group.chill(slot, (wanted == COLD) & alone)
        going = (wanted == REMOVED) & (held >= 0)
        if bool(going.any()):
            code = removal_code(manager.num_logical_tokens(slot), reason)
            num_dropped = group.drop(slot, going, state.demoted, code)
            state.num_dropped += num_dropped
            manager.counters["dropped"] += num_dropped
    return last


def _with_heavy(group: StreamGroup, held: Tensor, wanted: Tensor, config: CacheConfig, num_heavy: int) -> Tensor:
    """`wanted` with REMOVED turned into COLD where a head attends much."""
    mass = group.mean_mass(held)
    if mass is None:
        return wanted
    mass = mass.masked_fill((wanted != REMOVED) | mass.isnan(), -1.0)
    heavy = mass >= (config.sink_mass or torch.inf)
    if num_heavy > 0:
        best = mass.topk(min(num_heavy, mass.shape[-1]), dim=-1)
        heavy = heavy.scatter(-1, best.indices, heavy.gather(-1, best.indices) | (best.values >= 0))
    return wanted.masked_fill(heavy & (wanted == REMOVED), COLD)
