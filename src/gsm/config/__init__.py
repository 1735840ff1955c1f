"""Frozen, validated configuration; presets; fingerprints."""

from gsm.config.engine import EngineConfig
from gsm.config.load import ConfigLike, fingerprint, load_config
from gsm.config.schema import CacheConfig, GsmConfig, SparseConfig, WarmConfig

__all__ = [
    "CacheConfig",
    "ConfigLike",
    "EngineConfig",
    "GsmConfig",
    "SparseConfig",
    "WarmConfig",
    "fingerprint",
    "load_config",
]
