"""A cache manager that gives back blocks of running requests and caches exact content only.

The scheduler asks every manager, before it allocates, which blocks a request no longer needs; that is where policies
drop blocks here. The connector tells the workers in the same step, so nobody reads a block that is somebody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from gsm.integrations.vllm.live import Live, any_live, evicts, judges_by_mass
from gsm.kv.policies import PageFacts, beyond, make_policy


@dataclass(frozen=True, kw_only=True)
class GsmFullAttentionSpec(FullAttentionSpec):
    """`FullAttentionSpec` for our manager; same memory, same groups."""


def customize_spec(cls: Any, spec: Any) -> Any:
    """A back end's `customize_spec`: layers that see their whole past get our manager where GSM is configured."""
    if type(spec) is not FullAttentionSpec or not any_live():
        return spec
    return GsmFullAttentionSpec(**{f.name: getattr(spec, f.name) for f in fields(spec)})


@dataclass
class RequestFacts:
    """What is known of a request that holds blocks."""

    gone: list[int] = field(default_factory=list)  # logical blocks that were dropped
    exact_tokens: int | None = None  # tokens computed before the first drop
    judged_blocks: int = 0  # complete blocks when the policy was last asked
    mass: list[float] = field(default_factory=list)  # decayed attention per logical block; NaN = never judged


class GsmFullAttentionManager(FullAttentionManager):
    """Drops blocks by the policy of the live config, which the connector binds; without a connector nothing drops.

    What decode steps produce under a selection, and whatever is computed after a drop, never enters the prefix cache:
    it holds prompts, computed densely, and nothing else. So a hot reload leaves it valid.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gsm: Live | None = None
        self.facts: dict[str, RequestFacts] = {}
        self.num_dropped_blocks = 0

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        facts = self.facts.get(request.request_id)
        exact = request.num_prompt_tokens
        if facts is not None and facts.exact_tokens is not None:
            exact = min(exact, facts.exact_tokens)
        num_tokens = min(num_tokens, exact)
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        if self.gsm is None or not evicts(self.gsm.config) or request_id not in self.req_to_blocks:
            return
        facts = self.facts.setdefault(request_id, RequestFacts())
        complete = processed_computed_tokens // self.block_size
        if complete <= facts.judged_blocks or num_prompt_tokens is None:
            return
        if processed_computed_tokens < num_prompt_tokens:
            return  # chunks of a prompt depend on its company: what they see must not
        if judges_by_mass(self.gsm.config) and not facts.mass:
            return  # no decode step has been seen yet, or none since a preemption
        policy = make_policy(self.gsm.config.cache)
        facts.judged_blocks = complete
        self._drop(request_id, facts, self._cold(policy, request_id, facts, processed_computed_tokens))
        if facts.gone and facts.exact_tokens is None:
            facts.exact_tokens = processed_computed_tokens

    def _cold(self, policy: Any, request_id: str, facts: RequestFacts, num_tokens: int) -> list[int]:
        """Logical blocks the policy gives up: complete ones between the sinks and the hot zone."""
        assert self.gsm is not None
        cache = self.gsm.config.cache
        blocks = self.req_to_blocks[request_id]
        first, last = -(-cache.sink_tokens // self.block_size), max(0, num_tokens - cache.hot_size) // self.block_size
        if last <= first:
            return []
        present = torch.tensor([first <= i and not blocks[i].is_null for i in range(last)])
        mass = None
        if judges_by_mass(self.gsm.config):
            mass = torch.tensor((facts.mass + [float("nan")] * last)[:last]).view(1, 1, -1)
        known = PageFacts(present.view(1, 1, -1), mass, num_tokens, self.block_size)
        cold = policy.cold(known)
        if cold is None:
            cold = torch.zeros_like(known.present)
        if cache.warm_size is not None:
            cold = cold | beyond(known, cache.warm_size)
        if mass is not None and cache.sink_mass is not None:
            cold = cold & ~(mass >= cache.sink_mass)
        gone: list[int] = (cold.flatten() & present).nonzero().flatten().tolist()
        return gone

    def _drop(self, request_id: str, facts: RequestFacts, cold: list[int]) -> None:
        if not cold:
            return
        blocks = self.req_to_blocks[request_id]
        freed = [blocks[i] for i in reversed(cold)]
        for i in cold:
            blocks[i] = self._null_block
        facts.gone = sorted({*facts.gone, *cold})
        self.num_dropped_blocks += len(cold)
        self.block_pool.free_blocks(freed)

    def observe(self, request_id: str, blocks: list[int], mass: list[float], decay: float) -> None:
        """Take in what a step estimated for logical `blocks`: a decayed average of attention shares."""
        facts = self.facts.get(request_id)
        if facts is None:
            return
        facts.mass += [float("nan")] * (max(blocks, default=-1) + 1 - len(facts.mass))
        for block, new in zip(blocks, mass, strict=True):
            old = facts.mass[block]
            facts.mass[block] = new if old != old else decay * old + (1 - decay) * new

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self.facts.pop(request_id, None)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return [block for block in blocks if not block.is_null]


def register_spec() -> None:
    """Make vLLM know the spec and its manager. May be called again."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        GsmFullAttentionSpec, GsmFullAttentionManager, uniform_type_base_spec=FullAttentionSpec
    )
