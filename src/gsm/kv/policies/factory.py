"""From the configuration's word to a policy."""

from __future__ import annotations

from gsm.config import CacheConfig
from gsm.errors import ConfigError
from gsm.kv.policies.base import Policy
from gsm.kv.policies.keep_all import KeepAll
from gsm.kv.policies.recent import Recent


def make_policy(config: CacheConfig) -> Policy:
    """The policy `cache.policy` names. Raises ConfigError for one that is not built."""
    if config.policy == "keep_all":
        return KeepAll()
    if config.policy == "recent":
        return Recent()
    raise ConfigError(f"cache.policy '{config.policy}' is not available in this version; use keep_all or recent")
