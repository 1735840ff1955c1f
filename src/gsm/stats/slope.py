"""The slope of one quantity against another, robust against outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from gsm.errors import MeasurementError
from gsm.stats.describe import as_samples


class Slope(NamedTuple):
    """``y = intercept + slope * x`` with the ends of the slope's confidence interval, in the samples' units."""

    slope: float
    low: float
    high: float
    intercept: float

    def at(self, x: float) -> float:
        """The line's value at ``x``."""
        return self.intercept + self.slope * x

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval of the slope lies on one side of zero."""
        return self.low > 0 or self.high < 0


def theil_sen(x: Sequence[float], y: Sequence[float], confidence: float = 0.95) -> Slope:
    """The median of the slopes between all pairs of points: up to 29 % of outliers do not move it far.

    The interval is Sen's (1968): those pairwise slopes whose ranks lie as far from the middle as Kendall's statistic
    strays by chance. It assumes independent errors; average neighbours first where they are not. Raises
    MeasurementError for fewer than three points, unequal lengths, x without two distinct values, or a confidence
    outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise MeasurementError(f"a confidence lies between 0 and 1, got {confidence}")
    if len(x) != len(y):
        raise MeasurementError(f"a slope needs pairs, got {len(x)} x and {len(y)} y; drop the unpaired ones")
    xs, ys = as_samples(x), as_samples(y)
    if xs.size < 3:
        raise MeasurementError(f"a slope with an interval needs at least 3 points, got {xs.size}; measure more")
    first, second = np.triu_indices(xs.size, k=1)
    run = xs[second] - xs[first]
    known = run != 0
    if not known.any():
        raise MeasurementError(f"all {xs.size} points share one x; a slope needs at least two")
    slopes = np.sort((ys[second] - ys[first])[known] / run[known])
    slope = float(np.median(slopes))
    low, high = _rank_interval(slopes.size, xs.size, confidence)
    return Slope(slope, float(slopes[low]), float(slopes[high]), float(np.median(ys - slope * xs)))


def _rank_interval(num_slopes: int, num_points: int, confidence: float) -> tuple[int, int]:
    """Indices into the sorted slopes; Kendall's statistic without ties has variance n (n - 1) (2 n + 5) / 18."""
    spread = math.sqrt(num_points * (num_points - 1) * (2 * num_points + 5) / 18)
    strays = NormalDist().inv_cdf((1 + confidence) / 2) * spread
    low = max(0, math.floor((num_slopes - strays) / 2))
    return low, num_slopes - 1 - low
