"""The contract of a policy.

A policy sees the pages of one sequence that are neither sinks nor inside the hot zone and says which are cold. It
changes nothing. Its answer is valid until the sequence grows. The store then drops cold pages or keeps them,
as `cache.cold` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What is known about the older pages of one sequence."""

    present: Tensor  # bool [layers, H, pages]: not dropped yet
    num_tokens: int  # length of the sequence
    page_size: int


class Policy(ABC):
    """Decides which older pages are cold."""

    name: str
    needs_mass = False

    @abstractmethod
    def cold(self, facts: PageFacts) -> Tensor | None:
        """bool `[layers, H, pages]`, true = cold; None means that nothing is."""
