"""Bisection on made-up units: exactly the guilty are named, and not many questions are asked."""

from __future__ import annotations

import random

import pytest

from gsm.guard import find_culprits, smallest_retreat


@pytest.mark.parametrize("num_culprits", [0, 1, 3, 9])
def test_exactly_the_guilty_are_found_with_few_evaluations(num_culprits: int) -> None:
    for seed in range(50):
        order = random.Random(seed)
        units = [f"m{i}" for i in range(200)]
        guilty = set(order.sample(units, num_culprits))
        asked = 0

        def passes(active: frozenset[str], guilty: set[str] = guilty) -> bool:
            nonlocal asked
            asked += 1
            return not active & guilty

        assert set(find_culprits(units, passes)) == guilty
        assert asked <= 1 + num_culprits * 2 * 8


def test_damage_that_adds_up_is_undone_by_the_shortest_prefix() -> None:
    units = [f"m{i}" for i in range(37)]
    weights = dict(zip(units, range(37, 0, -1), strict=True))
    for limit in (0, 1, 30, 300, 10_000):

        def passes(active: frozenset[str], limit: int = limit) -> bool:
            return sum(weights[unit] for unit in active) <= limit

        retreat = smallest_retreat(units, passes)
        assert retreat is not None
        k = len(retreat)
        assert retreat == units[:k]
        assert passes(frozenset(units[k:]))
        assert k == 0 or not passes(frozenset(units[k - 1 :]))


def test_no_retreat_when_even_the_original_fails() -> None:
    assert smallest_retreat(["a", "b"], lambda active: False) is None
