"""Bets: an alarm is rare when nothing is wrong, however often one looks, and soon when something is."""

from __future__ import annotations

import random

import pytest

from gsm.errors import MeasurementError
from gsm.guard.sequential import PairedBets, signed


def first_alarm(bets: PairedBets, differences: list[float], needed: float) -> int | None:
    return next((i for i, d in enumerate(differences, 1) if bets.add(d) >= needed), None)


@pytest.mark.parametrize("spread", [0.02, 0.3, 0.9])
def test_false_alarms_stay_below_alpha_at_every_look(spread: float) -> None:
    order = random.Random(1)
    alarms = 0
    for _ in range(600):  # the mean is exactly the tolerance: the worst case that is still harmless
        d = [0.1 + order.uniform(-spread, spread) for _ in range(300)]
        alarms += first_alarm(PairedBets(0.1), d, 1 / 0.05) is not None
    assert alarms / 600 <= 0.05 + 3 * (0.05 * 0.95 / 600) ** 0.5


def test_a_large_excess_is_found_within_a_few_observations() -> None:
    order = random.Random(2)
    found = [
        first_alarm(PairedBets(0.1), [min(1.0, order.expovariate(1 / 0.6)) for _ in range(60)], 300) for _ in range(200)
    ]
    assert sum(n is not None for n in found) / 200 >= 0.99


def test_evidence_is_the_mean_wealth_and_does_not_overflow() -> None:
    assert PairedBets(0.1).evidence == pytest.approx(1.0)
    bets = PairedBets(0.0)
    assert bets.add_all([1.0] * 5000) > 1e300
    assert bets.num_observed == 5000
    assert PairedBets(0.0).add_all([-1.0] * 2000) < 1e-10
    order = [signed(True, False), signed(False, True), signed(False, False)]
    assert order == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("difference", [1.01, -1.5, float("nan")])
def test_what_is_out_of_bounds_is_refused(difference: float) -> None:
    with pytest.raises(MeasurementError, match="difference"):
        PairedBets(0.1).add(difference)


@pytest.mark.parametrize("tolerance", [1.0, -1.0, 2.0])
def test_a_tolerance_that_nothing_exceeds_is_refused(tolerance: float) -> None:
    with pytest.raises(MeasurementError, match="tolerance"):
        PairedBets(tolerance)
