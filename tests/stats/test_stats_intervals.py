import numpy as np
import pytest

from gsm.errors import MeasurementError
from gsm.stats import Interval, bootstrap_mean_ci, paired_difference
from gsm.stats.intervals import _student_quantile


def test_the_interval_surrounds_the_mean_and_is_reproducible() -> None:
    samples = np.random.default_rng(5).normal(size=30).tolist()
    interval = bootstrap_mean_ci(samples)
    assert interval.mean == pytest.approx(np.mean(samples))
    assert interval.low < interval.mean < interval.high
    assert interval == bootstrap_mean_ci(samples)
    assert interval != bootstrap_mean_ci(samples, seed=1)


def test_more_confidence_is_wider_and_constant_samples_have_no_width() -> None:
    samples = np.random.default_rng(0).normal(size=30).tolist()
    narrow, wide = bootstrap_mean_ci(samples, 0.8), bootstrap_mean_ci(samples, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
    assert bootstrap_mean_ci([2.5] * 8) == (2.5, 2.5, 2.5)


def test_skewed_samples_keep_their_skew() -> None:
    samples = np.random.default_rng(3).exponential(size=40).tolist()
    interval = bootstrap_mean_ci(samples)
    assert interval.high - interval.mean > interval.mean - interval.low


def test_intervals_of_few_samples_cover_the_truth_nearly_as_often_as_they_claim() -> None:
    """The plain percentile bootstrap covers 82.5 % here, the expanded one 91 %."""
    generator = np.random.default_rng(7)
    trials = 400
    covered = 0
    for trial in range(trials):
        interval = bootstrap_mean_ci(generator.normal(1.0, size=8).tolist(), seed=trial)
        covered += interval.low <= 1.0 <= interval.high
    assert covered / trials >= 0.9


@pytest.mark.parametrize(
    ("degrees", "exact"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (15, 2.1314), (100, 1.9840)]
)
def test_student_quantiles_match_the_table(degrees: int, exact: float) -> None:
    assert _student_quantile(0.975, degrees) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("samples", [[], [1.0]])
def test_too_few_samples_have_no_interval(samples: list[float]) -> None:
    with pytest.raises(MeasurementError, match="at least 2 samples"):
        bootstrap_mean_ci(samples)


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_impossible_confidences_are_refused(confidence: float) -> None:
    with pytest.raises(MeasurementError, match="between 0 and 1"):
        bootstrap_mean_ci([1.0, 2.0], confidence)


def test_pairing_removes_what_both_arms_share() -> None:
    generator = np.random.default_rng(1)
    shared = generator.normal(100, 30, size=40)
    first, second = shared, shared + generator.normal(2, 0.5, size=40)
    result = paired_difference(first.tolist(), second.tolist())
    assert result.num_pairs == 40
    assert result.difference.low < 2 < result.difference.high
    assert result.difference.excludes_zero
    assert result.relative == pytest.approx(result.difference.mean / result.mean_a)
    assert result.mean_b - result.mean_a == pytest.approx(result.difference.mean)


def test_equal_arms_do_not_differ() -> None:
    result = paired_difference([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert result.difference == Interval(0.0, 0.0, 0.0)
    assert not result.difference.excludes_zero
    assert paired_difference([0.0, 0.0], [1.0, 1.0]).relative is None


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(MeasurementError, match="3 and 2"):
        paired_difference([1.0, 2.0, 3.0], [1.0, 2.0])


def test_many_samples_are_resampled_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(0).normal(size=200).tolist()
    whole = bootstrap_mean_ci(samples)
    monkeypatch.setattr("gsm.stats.intervals._MAX_DRAWS_AT_ONCE", 1000)
    assert bootstrap_mean_ci(samples) == whole
