"""The contract of a policy.

A policy sees the pages of one sequence that are neither sinks nor inside the hot zone and says which are cold. It
changes nothing. Its answer is valid until the sequence grows or a page is observed again. The store then drops cold
pages or keeps them, as `cache.cold` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What is known about the older pages of one sequence."""

    present: Tensor  # bool [layers, H, pages]: up for judgement: not dropped, not a sink, not hot
    mass: Tensor | None  # float32 [layers, H, pages], NaN = never observed; None when the policy does not need it
    num_tokens: int  # length of the sequence
    page_size: int


class Policy(ABC):
    """Decides which older pages are cold."""

    name: str
    needs_mass = False
    """Whether attention mass must be recorded. Such a policy judges while decoding only: before the end of a prompt
    nobody has asked anything yet, and what one chunk ignores the question may need."""

    @abstractmethod
    def cold(self, facts: PageFacts) -> Tensor | None:
        """bool `[layers, H, pages]`, true = cold; None means that nothing is. Pages not present may get any value."""


def beyond(facts: PageFacts, max_tokens: int) -> Tensor:
    """bool `[layers, H, pages]`: present pages that are not among the best `max_tokens` tokens of their head.

    The best have the largest mass, those never observed first; without mass, the newest are best.
    """
    num_pages = facts.present.shape[-1]
    num_kept = min(max_tokens // facts.page_size, num_pages)
    if facts.mass is not None:
        rank = facts.mass.nan_to_num(torch.inf)
    else:
        rank = torch.arange(num_pages, device=facts.present.device).expand(facts.present.shape).float()
    rank = rank.masked_fill(~facts.present, -torch.inf)
    kept = torch.zeros_like(facts.present)
    kept.scatter_(-1, rank.topk(num_kept, dim=-1).indices, True)
    return facts.present & ~kept
