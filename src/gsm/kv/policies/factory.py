"""From the configuration's word to a policy."""

from __future__ import annotations

from gsm.config import CacheConfig
from gsm.errors import ConfigError
from gsm.kv.policies.base import Policy
from gsm.kv.policies.budget import Budget
from gsm.kv.policies.keep_all import KeepAll
from gsm.kv.policies.recent import Recent
from gsm.kv.policies.threshold import Threshold


def make_policy(config: CacheConfig) -> Policy:
    """The policy `cache.policy` names. Raises ConfigError for an unknown one."""
    if config.policy == "keep_all":
        return KeepAll()
    if config.policy == "recent":
        return Recent(config.warm_size or 0)
    if config.policy == "threshold":
        return Threshold(config.threshold, config.threshold_relative)
    if config.policy == "budget" and config.warm_size is not None:
        return Budget(config.warm_size)
    raise ConfigError(f"cache.policy '{config.policy}' is unknown; use keep_all, recent, threshold or budget")
