"""The configuration a process works by, and what it counted. One object per engine and process; a reload swaps it.

A worker, its attention layers and its connector find it by the instance id that vLLM gives every configuration.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gsm.config import GsmConfig, load_config
from gsm.errors import ConfigError

logger = logging.getLogger("vllm.gsm")

ENVIRONMENT = "GSM_VLLM_CONFIG"  # a path, or the config itself as JSON
KEY = "gsm"  # in vLLM's --additional-config


@dataclass
class Counters:
    """Since the worker started. Token counts are per layer that selects, summed over requests and steps."""

    steps: int = 0
    sparse_steps: int = 0
    context_tokens: int = 0
    read_tokens: int = 0
    summarised_blocks: int = 0
    summary_bytes: int = 0


@dataclass
class Live:
    """What is in force in this process."""

    config: GsmConfig
    epoch: int = 1
    counters: Counters = field(default_factory=Counters)
    holes: dict[int, list[int]] = field(default_factory=dict)
    """Rows with dropped blocks: physical block that holds the newest token -> logical blocks that are gone."""
    judged: dict[int, tuple[Tensor, Tensor | None, int]] = field(default_factory=dict)
    """Attention estimated in the last step. Physical newest block -> mass float32 `[columns]`, the logical block of
    each column where some are gone, and how many columns are complete blocks."""

    def reload(self, values: Mapping[str, Any]) -> int:
        """Take over a config; returns the new epoch. Raises ConfigError and changes nothing if it cannot be live."""
        new = load_config(values)
        check(new)
        refuse_restart(self.config, new)
        block_tokens = self.config.vllm.block_tokens  # also where the new config leaves it open
        self.config = new.model_copy(update={"vllm": new.vllm.model_copy(update={"block_tokens": block_tokens})})
        self.epoch += 1
        return self.epoch


_LIVE: dict[str, Live] = {}


def live_of(vllm_config: Any) -> Live | None:
    """The live configuration of an engine in this process; None where GSM is not configured. Raises ConfigError."""
    name = vllm_config.instance_id
    if name not in _LIVE:
        config = configured(vllm_config)
        if config is None:
            return None
        check(config)
        _LIVE[name] = Live(config)
        if isinstance(vllm_config.additional_config, dict):
            # vLLM keeps compiled models by what its configuration says: a path would hide what the file says
            vllm_config.additional_config[KEY] = config.model_dump(mode="json", exclude_unset=True)
    return _LIVE[name]


def configured(vllm_config: Any) -> GsmConfig | None:
    """The config that vLLM was started with: `--additional-config '{"gsm": ...}'`, else the environment variable."""
    additional = vllm_config.additional_config
    source = additional.get(KEY) if isinstance(additional, Mapping) else None
    if source is None:
        source = os.environ.get(ENVIRONMENT) or None
    if source is None:
        return None
    if isinstance(source, str) and source.lstrip().startswith("{"):
        source = json.loads(source)
    return load_config(Path(source) if isinstance(source, str) else source)


def evicts(config: GsmConfig) -> bool:
    """Whether blocks of running requests are given back for good."""
    return config.cache.cold == "drop" and config.cache.policy != "keep_all"


def judges_by_mass(config: GsmConfig) -> bool:
    """Whether what is given back depends on estimated attention."""
    return evicts(config) and (config.cache.policy in ("threshold", "budget") or config.cache.sink_mass is not None)


def foreign_connector(vllm_config: Any) -> str | None:
    """Name of a KV connector that is not ours: it may fill blocks that no forward pass has written."""
    transfer = vllm_config.kv_transfer_config
    name = transfer.kv_connector if transfer is not None else None
    return name if name != "GsmConnector" else None


def check(config: GsmConfig) -> None:
    """Refuse what vLLM's cache cannot do. Raises ConfigError."""
    cache, smoothing = config.cache, config.smoothing
    if cache.positions == "compact":
        raise ConfigError("positions: compact renumbers stored keys, which vLLM's cache cannot; use positions: logical")
    if cache.cold == "int4":
        raise ConfigError("cold: int4 re-encodes pages, which vLLM's cache cannot; use keep or drop, or fp8 KV of vLLM")
    if judges_by_mass(config):
        what = "sink_mass" if cache.sink_mass is not None else f"policy '{cache.policy}'"
        if not cache.sparse.enabled:
            raise ConfigError(
                f"{what} judges blocks by attention that only selection estimates; set sparse.enabled: true, or use "
                "policy: recent without sink_mass"
            )
        if cache.sparse.scorer not in ("clusters", "anchor"):
            raise ConfigError(
                f"{what} needs a scorer that estimates attention shares, not "
                f"'{cache.sparse.scorer}'; use clusters or anchor"
            )
    if smoothing.int8 != "off" or smoothing.is_folded:
        what = smoothing.method if smoothing.enable else "int8"
        raise ConfigError(
            f"smoothing: {what} changes weights, which vLLM loads by itself; write a checkpoint with `gsm smooth "
            "--output` and serve that"
        )


def refuse_restart(old: GsmConfig, new: GsmConfig) -> None:
    """Raise ConfigError where going from `old` to `new` needs other layers or another cache manager."""
    if evicts(new) != evicts(old):
        raise ConfigError(
            f"cold: {new.cache.cold} with policy: {new.cache.policy} needs another cache manager; restart with it"
        )
    if new.vllm.block_tokens not in (None, old.vllm.block_tokens):
        raise ConfigError(
            f"vllm.block_tokens ({old.vllm.block_tokens} -> {new.vllm.block_tokens}): cached blocks have another size; "
            "restart with it"
        )
    if new.engine != old.engine:
        raise ConfigError("the engine section does not rule vLLM's scheduler; restart with vLLM's own flags instead")
    if new.smoothing != old.smoothing:
        window_only = ("smooth_strength", "window_size")
        changed = old.smoothing.model_copy(update={name: getattr(new.smoothing, name) for name in window_only})
        if changed != new.smoothing or not old.smoothing.enable:
            raise ConfigError(
                "only strength and size of the smoothing window are live, and only where it was on at the start; "
                "restart with the new smoothing section"
            )
        if new.smoothing.window_for(1 << 20) > old.smoothing.window_for(1 << 20):
            raise ConfigError("the window can only shrink while running, its state is allocated; restart to enlarge it")


def any_live() -> bool:
    """Whether an engine of this process is configured; where vLLM does not say which engine it asks for."""
    return bool(_LIVE)
