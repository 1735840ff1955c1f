"""What the scheduler and the workers tell each other about dropped blocks: a KV connector that moves no KV.

Scheduler to workers, with the very step in which blocks were freed: the logical blocks that are gone, by row. A row is
known by the physical block that holds its newest token, which no other request can have. Workers to scheduler: how
much attention each block was estimated to get, the largest over layers, heads and ranks. Workers keep nothing about
requests, so preemption and abort need no clean-up there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from gsm.integrations.vllm.kv import GsmFullAttentionManager
from gsm.integrations.vllm.live import Live, live_of

logger = logging.getLogger("vllm.gsm")

Estimates = dict[int, tuple[list[int], list[float]]]  # newest physical block -> (logical blocks, their mass)


@dataclass
class GsmStepMetadata(KVConnectorMetadata):
    """Newest physical block of a row -> its logical blocks that are gone."""

    holes: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class GsmWorkerMetadata(KVConnectorWorkerMetadata):
    """What a worker estimated, and the config it works by once that has changed."""

    estimates: Estimates = field(default_factory=dict)
    config: dict[str, Any] | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> GsmWorkerMetadata:
        assert isinstance(other, GsmWorkerMetadata)
        merged = dict(self.estimates)
        for newest, (blocks, mass) in other.estimates.items():
            mine = merged.get(newest)
            merged[newest] = (blocks, [max(a, b) for a, b in zip(mine[1], mass, strict=True)] if mine else mass)
        return GsmWorkerMetadata(merged, self.config or other.config)


class GsmConnector(KVConnectorBase_V1, SupportsHMA):
    """Both ends of the exchange; vLLM makes one in the scheduler and one in every worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        live = live_of(vllm_config)
        if live is None:
            raise ValueError(
                "GsmConnector drops blocks by a GSM config and none was given; add --additional-config "
                '\'{"gsm": "gsm.yaml"}\' or set GSM_VLLM_CONFIG'
            )
        self.live: Live = live
        self._told_epoch = live.epoch
        self._managers: list[GsmFullAttentionManager] = []
        self._requests: dict[int, tuple[str, GsmFullAttentionManager]] = {}

    # -- scheduler ---------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        self._managers = [m for m in managers if isinstance(m, GsmFullAttentionManager)]
        if not self._managers:
            raise ValueError(
                "GsmConnector finds no cache manager of its own: layers have latent attention, or vLLM has merged all "
                "into one group; start without cold: drop, or without --disable-hybrid-kv-cache-manager"
            )
        for manager in self._managers:
            manager.gsm = self.live

    def build_connector_meta(self, scheduler_output: Any) -> GsmStepMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        self._requests = {}
        holes: dict[int, list[int]] = {}
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            for manager in self._managers:
                facts = manager.facts.get(request_id)
                if facts is None:
                    continue
                newest = (computed[request_id] + count - 1) // manager.block_size
                block_id = manager.req_to_blocks[request_id][newest].block_id
                self._requests[block_id] = request_id, manager
                if facts.gone:
                    holes[block_id] = facts.gone
        return GsmStepMetadata(holes)

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if not isinstance(told, GsmWorkerMetadata):
            return
        if told.config is not None and told.config != self.live.config.model_dump(mode="json"):
            self.live.reload(told.config)
        cache = self.live.config.cache
        decay = cache.mass_decay if cache.mass_decay is not None else 1 - 1 / cache.observation_window
        for newest, (blocks, mass) in told.estimates.items():
            if newest in self._requests:
                request_id, manager = self._requests[newest]
                manager.observe(request_id, blocks, mass, decay)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None

    # -- worker ------------------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before anything of a step is read."""
        assert isinstance(kv_connector_metadata, GsmStepMetadata)
        self.live.holes = kv_connector_metadata.holes
        self.live.judged.clear()

    def build_connector_worker_meta(self) -> GsmWorkerMetadata | None:
        estimates = {
            newest: (
                list(range(complete)) if columns is None else columns[:complete].tolist(),
                mass[:complete].tolist(),
            )
            for newest, (mass, columns, complete) in self.live.judged.items()
        }
        self.live.judged.clear()
        changed = self.live.epoch != self._told_epoch
        self._told_epoch = self.live.epoch
        if not estimates and not changed:
            return None
        return GsmWorkerMetadata(estimates, self.live.config.model_dump(mode="json") if changed else None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
