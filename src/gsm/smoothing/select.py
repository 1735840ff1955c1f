"""Choose the sites to smooth, with the measured reason for each, chosen or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from gsm.config.smoothing import SmoothingConfig
from gsm.errors import ConfigError
from gsm.smoothing.calibration import Calibration, SiteStats
from gsm.smoothing.sites import find_sites

# The sites that a method can act on, by kind of observation.
CANDIDATES = {
    "window": ("attn_out_input", "mlp_out_input"),
    "channel": ("attn_norm", "attn_out_input", "mlp_norm", "mlp_out_input"),
    "rotate": ("attn_norm", "attn_out_input", "mlp_norm", "mlp_out_input"),
}
TOP_SHARE = 0.25


@dataclass(frozen=True)
class Choice:
    """Whether a site is smoothed, and why. ``name`` is the module that owns it."""

    name: str
    chosen: bool
    reason: str


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module's name matches a pattern (shell wildcards) or ends with it at a dot."""
    return any(fnmatchcase(name, pattern) or name.endswith(f".{pattern}") for pattern in patterns)


def choose_sites(calibration: Calibration, config: SmoothingConfig) -> list[Choice]:
    """One `Choice` per candidate site of the method; raises ConfigError when a pattern matches nothing."""
    sites = calibration.of_kind(*CANDIDATES[config.method])
    how = config.target_layers
    if how == "auto":
        how = "high_kurtosis" if config.method == "window" else "all"
    if how == "all":
        return [Choice(site.name, True, f"all sites are wanted; {_tail(site)}") for site in sites]
    if isinstance(how, tuple):
        return _by_pattern(sites, how)
    if how == "sensitivity":
        return _top(sites, _sensitivity, "sensitivity")
    return _top(sites, lambda site: site.kurtosis_body if config.skip_sink else site.kurtosis, "kurtosis")


def window_sites(model: Any, config: SmoothingConfig) -> list[Choice]:
    """The choices of `window` where they can be told without a calibration: `all`, or names. Raises ConfigError."""
    how = config.target_layers
    if how != "all" and not isinstance(how, tuple):
        raise ConfigError(
            f"smoothing.target_layers: {how} needs a calibration run, which takes a restart in a server; give samples "
            "of text or a calibration, name the modules, or say all"
        )
    names = []
    for block in find_sites(model):
        mlp = [] if block.layout.experts else [block.path(part) for part in block.layout.mlp_out]
        names += [block.path(block.layout.attn_out), *mlp]
    if how == "all":
        return [Choice(name, True, "all sites are wanted") for name in names]
    _require_matches(names, how)
    return [Choice(name, hit, "named" if hit else "not named") for name in names for hit in [matches(name, how)]]


def _require_matches(names: Sequence[str], patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in names):
            raise ConfigError(
                f"target_layers: '{pattern}' matches no site; sites are named like {names[0]} and {names[-1]}"
            )


def rollback_order(calibration: Calibration | None, names: Sequence[str]) -> list[str]:
    """``names``, the most sensitive first: by gradient sensitivity where measured, else by kurtosis, else as given."""
    if calibration is None:
        return list(names)
    rank: dict[str, tuple[float, float]] = {}  # of a module seen on both sides, the worse
    for site in calibration:
        here = (site.sensitivity or 0.0, site.kurtosis_body)
        rank[site.name] = max(here, rank.get(site.name, here))
    return sorted(names, key=lambda name: rank.get(name, (0.0, 0.0)), reverse=True)


def _by_pattern(sites: Sequence[SiteStats], patterns: tuple[str, ...]) -> list[Choice]:
    _require_matches([site.name for site in sites], patterns)
    return [
        Choice(site.name, hit, ("named in target_layers; " if hit else "not named; ") + _tail(site))
        for site in sites
        for hit in [matches(site.name, patterns)]
    ]


def _top(sites: Sequence[SiteStats], rank: Callable[[SiteStats], float], word: str) -> list[Choice]:
    count = math.ceil(TOP_SHARE * len(sites))
    ordered = sorted(sites, key=rank, reverse=True)
    best = {site.key for site in ordered[:count]}
    place = {site.key: index + 1 for index, site in enumerate(ordered)}
    return [
        Choice(site.name, site.key in best, f"rank {place[site.key]} of {len(sites)} by {word}; {_tail(site)}")
        for site in sites
    ]


def _sensitivity(site: SiteStats) -> float:
    if site.sensitivity is None:
        raise ConfigError("target_layers: sensitivity needs gradients; calibrate with --gradients")
    return site.sensitivity


def _tail(site: SiteStats) -> str:
    text = f"kurtosis {site.kurtosis_body:.3g} without the first token, {site.kurtosis:.3g} with it"
    if site.sink_driven:
        text += (
            f"; sink-driven: the first token carries {site.sink_share:.0%} of its energy, so smoothing it mixes that in"
        )
    return text
