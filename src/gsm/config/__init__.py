"""Frozen, validated configuration; presets; fingerprints."""

from gsm.config.engine import EngineConfig
from gsm.config.live import needs_restart
from gsm.config.load import ConfigLike, fingerprint, load_config
from gsm.config.rollout import RolloutConfig, RolloutTolerance
from gsm.config.schema import CacheConfig, GsmConfig, SparseConfig, WarmConfig

__all__ = [
    "CacheConfig",
    "ConfigLike",
    "EngineConfig",
    "GsmConfig",
    "RolloutConfig",
    "RolloutTolerance",
    "SparseConfig",
    "WarmConfig",
    "fingerprint",
    "load_config",
    "needs_restart",
]
