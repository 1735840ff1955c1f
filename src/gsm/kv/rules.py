"""What the pages of one sequence are judged by. Sequences of one store may differ in it, their layout may not."""

from __future__ import annotations

from dataclasses import dataclass

from gsm.config import CacheConfig
from gsm.kv.policies import Policy, make_policy


@dataclass(frozen=True, slots=True)
class Rules:
    """Size of the hot zone, policy, thresholds, and what becomes of cold pages."""

    config: CacheConfig
    policy: Policy

    @property
    def needs_mass(self) -> bool:
        return self.policy.needs_mass or self.config.sink_mass is not None


def make_rules(config: CacheConfig) -> Rules:
    return Rules(config, make_policy(config))
