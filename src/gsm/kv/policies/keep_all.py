"""Nothing is ever cold."""

from __future__ import annotations

from torch import Tensor

from gsm.kv.policies.base import PageFacts, Policy


class KeepAll(Policy):
    name = "keep_all"

    def cold(self, facts: PageFacts) -> Tensor | None:
        return None
