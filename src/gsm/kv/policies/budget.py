"""All but the `max_tokens` older tokens of each head with the largest attention mass are cold.

The rule of SnapKV (arXiv:2404.14469) and H2O (arXiv:2306.14048), at page granularity and per kv head.
"""

from __future__ import annotations

from torch import Tensor

from gsm.kv.policies.base import PageFacts, Policy, beyond


class Budget(Policy):
    name = "budget"
    needs_mass = True

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def cold(self, facts: PageFacts) -> Tensor | None:
        return beyond(facts, self.max_tokens)
