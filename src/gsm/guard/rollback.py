"""Find the modules that do the damage, by bisection, and the smallest retreat that passes when no one is to blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Passes = Callable[[frozenset[str]], bool]


def find_culprits(units: Sequence[str], passes: Passes) -> list[str]:
    """The units that fail even when they are the only changed ones, in the order of ``units``.

    ``passes(active)`` says whether the model is good enough with only ``active`` changed. Halves that pass are cleared
    at once, so k culprits among n units take about 2 k log2(n / k) evaluations. Order ``units`` with the most
    suspicious first: neighbours share evaluations.
    """
    if not units or passes(frozenset(units)):
        return []
    if len(units) == 1:
        return list(units)
    half = len(units) // 2
    return find_culprits(units[:half], passes) + find_culprits(units[half:], passes)


def smallest_retreat(units: Sequence[str], passes: Passes) -> list[str] | None:
    """The shortest prefix of ``units`` whose roll-back lets the rest pass, or None when even none active fails.

    For damage that adds up from many small parts, where no single unit fails alone. Assumes that rolling back more
    never hurts, which makes the search a bisection.
    """
    if not passes(frozenset()):
        return None
    low, high = 0, len(units)  # rolling back `high` units is known to pass
    while low < high:
        middle = (low + high) // 2
        if passes(frozenset(units[middle:])):
            high = middle
        else:
            low = middle + 1
    return list(units[:high])
