"""Sinks and the hot zone stay, all else is cold (StreamingLLM, arXiv:2309.17453)."""

from __future__ import annotations

from torch import Tensor

from gsm.kv.policies.base import PageFacts, Policy


class Recent(Policy):
    name = "recent"

    def cold(self, facts: PageFacts) -> Tensor | None:
        return facts.present
