"""Think segments go down by age: early finished steps first, later ones later (SPEC K10).

Not one of the policies that judge by attention mass: it is told what tokens are. Of a thought's finished tokens the
newest `running` (a share) can be read while it runs, of which the newest `int8` (a share) are not int4 yet. When the
thought is over its pages go one tier down: out of the hot zone, from int8 to int4, and from int4 away but for the
newest `keep` (a share). Tokens outside of thoughts are protected; a page goes as far down as its best protected token
allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HOT, WARM, COLD, REMOVED = range(4)  # the order of gsm.kv.positions.TIERS


@dataclass(frozen=True, slots=True)
class Thinking:
    """One think segment: token ranges of its finished steps, oldest first, and whether it is over."""

    steps: tuple[tuple[int, int], ...]
    is_over: bool


def graded_tiers(
    thoughts: Sequence[Thinking],
    keep: float,
    int8: float,
    min_tokens: int,
    num_tokens: int,
    page_size: int,
    running: float = 1.0,
) -> Tensor:
    """The tier each page of a sequence may rest in at most, int8 `[num_tokens // page_size]`; HOT means: as it is."""
    tiers = torch.zeros(num_tokens, dtype=torch.int8)
    for thought in thoughts:
        if thought.is_over:
            _grade(tiers, thought, keep, 0.0, 0)
        else:
            _grade(tiers, thought, running, int8, min_tokens)
    return page_tiers(tiers, page_size)


def range_tiers(ranges: Sequence[tuple[int, int]], tier: int, num_tokens: int, page_size: int) -> Tensor:
    """The same for token ranges that all go to one tier: old turns."""
    tiers = torch.zeros(num_tokens, dtype=torch.int8)
    for start, end in ranges:
        tiers[start:end] = tier
    return page_tiers(tiers, page_size)


def page_tiers(tiers: Tensor, page_size: int) -> Tensor:
    """From tokens to full pages: a page rests where its most protected token does."""
    num_pages = len(tiers) // page_size
    return tiers[: num_pages * page_size].view(num_pages, page_size).amin(dim=1)


def _grade(tiers: Tensor, thought: Thinking, keep: float, int8: float, min_tokens: int) -> None:
    total = sum(end - start for start, end in thought.steps)
    kept, warm = max(keep * total, min(min_tokens, total)), int8 * total
    age = 0  # tokens of finished steps that are newer
    for start, end in reversed(thought.steps):
        length = end - start
        # a step that lies across a border is split there: steps may be as long as the share itself
        for share, tier in ((warm, WARM), (kept, COLD), (float("inf"), REMOVED)):
            size = int(min(length, max(0.0, share - age)))
            if size > 0:
                tiers[start + length - size : start + length] = tier
                length, age = length - size, age + size
            if length == 0:
                break
