"""Numbers for people, and ticks."""

from __future__ import annotations

import itertools
import math

import pytest

from gsm.report.numbers import interval, linear_ticks, log_ticks, number, spread


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (float("nan"), "n/a"), (0, "0"), (1234.5, "1,234"), (88.04, "88"), (0.0068, "0.0068"),
     (1.3e-5, "1.3e-5"), (0.5, "0.5")],
)  # fmt: skip
def test_numbers_are_readable(value: float | None, text: str) -> None:
    assert number(value) == text


def test_what_was_not_measured_is_not_a_number() -> None:
    assert spread({"median": None, "min": None, "max": None}) == "n/a"
    assert interval(None) == "n/a"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 88.3), (-3, 12), (1024, 7680), (0.2, 0.21)])
def test_linear_ticks_are_even_and_inside(low: float, high: float) -> None:
    ticks = linear_ticks(low, high, 6)
    assert 2 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    steps = {round(b - a, 9) for a, b in itertools.pairwise(ticks)}
    assert len(steps) == 1


@pytest.mark.parametrize(("low", "high"), [(1e-5, 0.02), (0.9, 1100), (3, 40)])
def test_log_ticks_are_inside_and_few(low: float, high: float) -> None:
    ticks = log_ticks(low, high, 6)
    assert 1 <= len(ticks) <= 7
    assert all(low * 0.99 <= tick <= high * 1.01 and math.isfinite(tick) for tick in ticks)
