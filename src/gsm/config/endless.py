"""A session without end in fixed memory: sinks and a window of the newest tokens, positions compacted."""

from __future__ import annotations

from gsm.config.load import load_config
from gsm.config.schema import GsmConfig
from gsm.errors import ConfigError


def endless_config(max_positions: int, keep_tokens: int | None = None) -> GsmConfig:
    """For a model trained on `max_positions`; three quarters of them are kept unless `keep_tokens` says otherwise.

    What is not kept is the room that new tokens fill until positions are compacted again: the less of it, the more
    often. Raises ConfigError when nothing would be left.
    """
    if max_positions < 64:
        raise ConfigError(
            f"the model was trained for {max_positions} positions; a session without end needs 64 or more"
        )
    keep = keep_tokens or max_positions * 3 // 4
    if keep > max_positions * 15 // 16:
        raise ConfigError(
            f"keeping {keep} of {max_positions} trained positions leaves no room for new tokens; keep at most "
            f"{max_positions * 15 // 16}"
        )
    page = 16 if max_positions >= 1024 else 4
    room = max_positions - keep - 4 * page
    if room < page:
        raise ConfigError(f"keeping {keep} of {max_positions} trained positions leaves no room for a page; keep fewer")
    cache = {
        "policy": "recent",
        "cold": "drop",
        "positions": "compact",
        "page_size": page,
        "hot_size": keep,
        "recent_tokens": min(128, keep),
        "warm": {"codec": "none"},
        "prefill_chunk_tokens": min(1024, room),
    }
    return load_config({"cache": cache})
