"""Sinks and the newest tokens stay, all else is cold (StreamingLLM, arXiv:2309.17453).

The newest are the hot zone and, as codes, `warm_size` tokens before it.
"""

from __future__ import annotations

from torch import Tensor

from gsm.kv.policies.base import PageFacts, Policy, beyond


class Recent(Policy):
    name = "recent"

    def __init__(self, warm_size: int = 0) -> None:
        self.warm_size = warm_size

    def cold(self, facts: PageFacts) -> Tensor | None:
        return beyond(facts, self.warm_size) if self.warm_size else facts.present
