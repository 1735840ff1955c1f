"""Numbers for people, and axis ticks."""

from __future__ import annotations

import math

NA = "n/a"


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, never fewer than the integer part has; thousands are grouped."""
    if value is None or not math.isfinite(value):
        return NA
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.{digits}g}"


def share(value: float | None) -> str:
    return NA if value is None else f"{100 * value:.1f} %"


def signed_share(value: float | None) -> str:
    return NA if value is None else f"{100 * value:+.1f} %"


def mebibytes(value: float | None) -> str:
    return NA if value is None else number(value / 2**20)


def interval(ends: tuple[float, float] | list[float] | None) -> str:
    return NA if not ends else f"{number(ends[0], 2)} to {number(ends[1], 2)}"


def spread(record: dict[str, float | None] | None) -> str:
    """The median with the smallest and largest value."""
    if not record or record.get("median") is None:
        return NA
    return f"{number(record['median'])} ({number(record['min'])} to {number(record['max'])})"


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most about ``most`` round numbers from ``low`` to ``high``."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, most)
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**d for d in decades for f in factors if low * 0.999 <= f * 10.0**d <= high * 1.001]
        if len(ticks) <= most:
            return ticks
    return ticks[:: -(-len(ticks) // most)]
