"""What may change while requests run, and what needs a restart, with the reason.

Live is everything that needs no other layout of pages and no other weights: budgets, thresholds, the hot zone, recent
tokens, limits, window smoothing. Two such configs may be in force at once, each for its own requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gsm.config.schema import GsmConfig

_LAYOUT = "pages that exist have another layout"
_OWNED = "cached prefixes own their first pages in full precision by it"
_STATISTICS = "the records of pages are laid out for these statistics"
_WEIGHTS = "it changes the model's weights"

# dotted name -> why a running engine cannot follow
RESTART: Mapping[str, str] = {
    "cache.page_size": _LAYOUT,
    "cache.warm": _LAYOUT,
    "cache.sink_tokens": _OWNED,
    "cache.observation_window": _STATISTICS,
    "cache.stats_max_history": _STATISTICS,
    "cache.mass_decay": _STATISTICS,
    "cache.positions": "positions of cached keys would change",
    "cache.sparse.scorer": "summaries of existing pages were made for the other scorer",
    "engine.kv_pages": "page tables were sized by it; engine.kv_memory_mib can change",
    "engine.prefix_disk_mib": "the prefix directory is opened at start",
    "linear": "the model's layers were given their code when the engine started",
    "smoothing.int8": _WEIGHTS,
    "smoothing.int8_lm_head": _WEIGHTS,
    "smoothing.keep_precision": _WEIGHTS,
}


def needs_restart(running: GsmConfig, wanted: GsmConfig) -> list[str]:
    """One phrase per setting of `wanted` that an engine started with `running` cannot take over; empty: all can."""
    found = [
        f"{name} ({_value(running, name)} -> {_value(wanted, name)}): {reason}"
        for name, reason in RESTART.items()
        if _value(running, name) != _value(wanted, name)
    ]
    if wanted.cache.cold == "int4" and running.cache.cold != "int4":
        found.append(f"cache.cold ({running.cache.cold} -> int4): there is no pool of int4 pages")
    if wanted.reasoning.enabled and not (running.reasoning.enabled or running.cache.cold == "int4"):
        found.append("reasoning.enabled (false -> true): there is no pool of int4 pages")
    return found + _smoothing(running, wanted)


def _smoothing(running: GsmConfig, wanted: GsmConfig) -> list[str]:
    """Run-time windows may come and go beside unchanged weights; what is folded into weights stays as it is."""
    before, after = running.smoothing, wanted.smoothing
    if before == after:
        return []
    if before.is_folded or after.is_folded:
        return [f"smoothing ({_kind(running)} -> {_kind(wanted)}): {_WEIGHTS}"]
    if before.int8 != "off" and after.enable:
        return ["smoothing: int8 modules may be fused where a window would act"]
    return []


def _kind(config: GsmConfig) -> str:
    return config.smoothing.method if config.smoothing.enable else "off"


def _value(config: GsmConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
