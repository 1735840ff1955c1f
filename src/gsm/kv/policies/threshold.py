"""Pages whose attention mass is below a threshold are cold.

Absolute: mass < threshold; with `page_size: 1` it is the documents' token rule (SPEC K4). Relative: mass < c *
page_size / n, a share of what a page would get if attention were uniform over the n tokens, so that the same number
means the same at every length. A page that nobody looked at is not cold.
"""

from __future__ import annotations

from torch import Tensor

from gsm.kv.policies.base import PageFacts, Policy


class Threshold(Policy):
    name = "threshold"
    needs_mass = True

    def __init__(self, absolute: float | None = None, relative: float | None = None) -> None:
        self.absolute = absolute
        self.relative = relative

    def cold(self, facts: PageFacts) -> Tensor | None:
        assert facts.mass is not None
        return facts.mass < self.limit(facts.num_tokens, facts.page_size)  # NaN compares false

    def limit(self, num_tokens: int, page_size: int) -> float:
        """The smallest mass a page may have at a length of `num_tokens`."""
        if self.absolute is not None:
            return self.absolute
        assert self.relative is not None
        return self.relative * page_size / num_tokens
