"""Which older pages become cold. One small file each; all are pure functions of what is known about pages."""

from gsm.kv.policies.base import PageFacts, Policy, beyond
from gsm.kv.policies.factory import make_policy

__all__ = ["PageFacts", "Policy", "beyond", "make_policy"]
