"""Named starting points. A preset only supplies defaults: whatever is written beside it wins."""

from __future__ import annotations

import difflib
from typing import Any

# The document's task rules: in dialogue a fact is said once and matters later, so the threshold stays low;
# documents are redundant, so it may be higher. Both keep cold pages unless the user adds `cold: drop`.
# The documents' eviction, at page level with a threshold that means the same at every length, and word for word:
# token by token, cold below 1 % of the attention. Both forget for good; their price is in the README's table.
_EVICT: dict[str, Any] = {
    "policy": "threshold",
    "threshold_relative": 0.1,
    "cold": "drop",
    "warm": {"codec": "none"},
    "warm_size": 2048,
}
_EVICT_LITERAL: dict[str, Any] = {
    "page_size": 1,
    "policy": "threshold",
    "threshold": 0.01,
    "hot_size": 512,
    "cold": "drop",
    "warm": {"codec": "none"},
    "warm_size": 2048,
}

PRESETS: dict[str, dict[str, Any]] = {
    "dialog": {"policy": "threshold", "threshold": 0.005, "hot_size": 512},
    "document": {"policy": "threshold", "threshold": 0.02, "hot_size": 1024},
    # A chain of thought leans on its last steps, code on names said once: more kept hot, a low threshold.
    "reasoning": {"policy": "threshold", "threshold": 0.005, "hot_size": 1024},
    "code": {"policy": "threshold", "threshold": 0.0025, "hot_size": 1024},
    "full": {"warm": {"codec": "none"}},
    "tiers": {},
    "sparse": {"sparse": {"enabled": True}},
    "sparse-int4": {"sparse": {"enabled": True}, "warm": {"codec": "int4"}},
    "evict": _EVICT,
    "evict-literal": _EVICT_LITERAL,
    "evict+sparse": {**_EVICT, "sparse": {"enabled": True, "budget_fraction": 0.5}},
}


def apply_preset(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` laid over the preset it names; raises ValueError for an unknown name."""
    name = values.get("preset")
    if name is None:
        return values
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known presets: {', '.join(sorted(PRESETS))}"
        raise ValueError(f"preset '{name}' is unknown{hint}")
    return _overlay(PRESETS[name], values)


def _overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both_are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _overlay(merged[key], value) if both_are_sections else value
    return merged
