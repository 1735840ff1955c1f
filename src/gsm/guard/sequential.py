"""Sequential tests that may be looked at after every observation: an alarm is right at any time, not at one time only.

Every test is a bet against "the new config is no worse than the stable one plus a tolerance". Of paired differences d
in [low, 1] with E[d | past] <= tolerance, each wealth prod(1 + b (d_i - tolerance)) with a fixed 0 <= b and
b (tolerance - low) < 1 is a supermartingale that starts at 1, and so is the mean of several with different b. By
Ville's inequality it ever reaches 1 / alpha with probability at most alpha, however often we look.

Sources: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSSB 2024; Shekhar and
Ramdas, "Nonparametric two-sample testing by betting", IEEE Trans. Inf. Theory 2024 (paired bets of two streams); Ville
1939; the mixture over bets is Robbins' (1970).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gsm.errors import MeasurementError

_SHARES = (0.05, 0.15, 0.3, 0.5, 0.75, 0.95)  # of the largest bet that cannot go bankrupt


class PairedBets:
    """Evidence that differences in [low, 1] exceed `tolerance` on average. Raises MeasurementError for impossible ones.

    `evidence` may be compared with 1 / alpha after any observation.
    """

    def __init__(self, tolerance: float, low: float = -1.0) -> None:
        if not low < tolerance < 1.0:
            raise MeasurementError(f"a tolerance lies between {low:g} and 1, got {tolerance}; nothing could exceed it")
        self.tolerance = tolerance
        self.low = low
        self.num_observed = 0
        self._bets = tuple(share / (tolerance - low) for share in _SHARES)
        self._log_wealth = [0.0] * len(_SHARES)

    def add(self, difference: float) -> float:
        """Observe one difference; returns the evidence. Raises MeasurementError for one outside of [low, 1]."""
        if not self.low <= difference <= 1.0:
            raise MeasurementError(f"a difference lies in [{self.low:g}, 1], got {difference}; scale it first")
        surplus = difference - self.tolerance
        self._log_wealth = [w + math.log1p(b * surplus) for w, b in zip(self._log_wealth, self._bets, strict=True)]
        self.num_observed += 1
        return self.evidence

    def add_all(self, differences: Iterable[float]) -> float:
        for difference in differences:
            self.add(difference)
        return self.evidence

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the mean wealth: 0 is none."""
        most = max(self._log_wealth)
        return most + math.log(sum(math.exp(w - most) for w in self._log_wealth) / len(self._log_wealth))

    @property
    def evidence(self) -> float:
        """The mean wealth; 1 is none, 100 is enough for alpha = 0.01."""
        return math.exp(min(self.log_evidence, 700.0))


def signed(is_worse: bool, is_better: bool) -> float:
    """A pair of which only the order is known: worse 1, better -1, equal 0. With tolerance 0 `PairedBets` then tests
    whether the first is worse more often than better, whatever the distribution."""
    return float(is_worse) - float(is_better)
