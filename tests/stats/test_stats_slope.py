from __future__ import annotations

import numpy as np
import pytest

from gsm.errors import MeasurementError
from gsm.stats import theil_sen


def test_an_exact_line() -> None:
    line = theil_sen([0, 1, 2, 5], [3, 5, 7, 13])
    assert (line.slope, line.low, line.high, line.intercept) == (2, 2, 2, 3)
    assert line.at(10) == 23
    assert line.excludes_zero


def test_a_quarter_of_wild_points_moves_it_little() -> None:
    x = np.arange(40.0)
    y = 2 * x + np.random.default_rng(0).normal(0, 0.5, 40)
    y[::4] += 500
    assert theil_sen(x, y).slope == pytest.approx(2, abs=0.2)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    x = np.arange(20.0)
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        line = theil_sen(x, 0.3 * x + generator.standard_t(3, 20))
        hits += line.low <= 0.3 <= line.high
    assert 0.92 <= hits / 400 <= 0.99


def test_noise_around_a_flat_line_does_not_exclude_zero() -> None:
    assert not theil_sen(range(30), np.random.default_rng(2).normal(5, 1, 30)).excludes_zero


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [([1, 2], [1, 2], "at least 3"), ([1, 1, 1], [1, 2, 3], "share one x"), ([1, 2, 3], [1, 2], "pairs")],
)
def test_what_has_no_slope_is_refused(x, y, message) -> None:
    with pytest.raises(MeasurementError, match=message):
        theil_sen(x, y)
    with pytest.raises(MeasurementError, match="confidence"):
        theil_sen([1, 2, 3], [1, 2, 3], confidence=1.0)
