import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsm.errors import MeasurementError
from gsm.stats import mean, percentile, summary

finite = st.floats(min_value=-1e6, max_value=1e6)


def test_nothing_measured_is_none_and_never_zero() -> None:  # CASES.md E7
    assert percentile([], 50) is None
    assert mean([]) is None
    assert summary([]) == {"median": None, "min": None, "max": None}


def test_percentiles_interpolate_between_neighbours() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3, 4], 0) == 1
    assert percentile([1, 2, 3, 4], 100) == 4
    assert percentile(range(101), 99) == 99
    assert percentile([7.0], 99) == 7.0


def test_summary_is_the_median_with_its_extremes() -> None:
    assert summary(x for x in (5.0, 1.0, 9.0)) == {"median": 5.0, "min": 1.0, "max": 9.0}


@given(st.lists(finite, min_size=1, max_size=50), st.floats(min_value=0, max_value=100))
def test_percentile_follows_numpy_and_stays_within_the_samples(samples: list[float], q: float) -> None:
    value = percentile(samples, q)
    assert value is not None
    assert value == pytest.approx(float(np.percentile(samples, q)))
    assert min(samples) <= value <= max(samples)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(MeasurementError, match="sample 1 of 2"):
        percentile([1.0, bad], 50)


@pytest.mark.parametrize("q", [-1, 100.5, math.nan])
def test_percentiles_outside_their_range_are_refused(q: float) -> None:
    with pytest.raises(MeasurementError, match="between 0 and 100"):
        percentile([1.0], q)
