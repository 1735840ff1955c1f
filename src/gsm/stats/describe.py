"""Descriptions of one list of samples. An empty list has no median: the answer is None ("n/a"), never 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from gsm.errors import MeasurementError


class SpreadSummary(TypedDict):
    """Median with the smallest and largest sample; all None when there was no sample."""

    median: float | None
    min: float | None
    max: float | None


def as_samples(samples: Iterable[float]) -> NDArray[np.float64]:
    """The samples as a 1-D float64 array; raises MeasurementError when one of them is NaN or infinite."""
    values = np.asarray(list(samples), dtype=np.float64)
    if values.ndim != 1:
        raise MeasurementError(f"samples must be plain numbers, got an array of shape {values.shape}; flatten it first")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise MeasurementError(
            f"sample {bad[0]} of {values.size} is {values[bad[0]]}; a statistic of it would be meaningless, "
            "find out why it was measured"
        )
    return values


def mean(samples: Iterable[float]) -> float | None:
    """Arithmetic mean, or None without samples."""
    values = as_samples(samples)
    return float(values.mean()) if values.size else None


def percentile(samples: Iterable[float], q: float) -> float | None:
    """The `q`-th percentile (0 to 100) with linear interpolation between neighbours, or None without samples.

    The same rule as `numpy.percentile` and therefore as `vllm bench serve`.
    """
    if not 0 <= q <= 100:
        raise MeasurementError(f"a percentile lies between 0 and 100, got {q}")
    values = as_samples(samples)
    return float(np.percentile(values, q)) if values.size else None


def summary(samples: Iterable[float]) -> SpreadSummary:
    """Median with its spread: `{"median", "min", "max"}`, each None without samples."""
    values = as_samples(samples)
    if not values.size:
        return {"median": None, "min": None, "max": None}
    return {"median": float(np.median(values)), "min": float(values.min()), "max": float(values.max())}
