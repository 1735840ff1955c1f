"""Streaming moments per channel: maximum, mean, variance and kurtosis in O(channels) memory.

Batches are merged with the pairwise formulas of Pébay ("Formulas for Robust, One-Pass Parallel Computation of
Covariances and Arbitrary-Order Statistical Moments", 2008), which subtract means before taking powers and therefore
stay exact for a million tokens with outliers, where plain power sums do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """Number of values, mean and central power sums per channel; all float64 on the CPU."""

    num_values: int
    mean: Tensor
    m2: Tensor
    m3: Tensor
    m4: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Sums:
        return Sums(self.num_values, *(function(part) for part in self[1:]))

    def combine(self, other: Sums) -> Sums:
        """The sums of both streams together."""
        na, mean_a, a2, a3, a4 = self
        nb, mean_b, b2, b3, b4 = other
        n = na + nb
        d = mean_b - mean_a
        return Sums(
            n,
            mean_a + d * (nb / n),
            a2 + b2 + d**2 * (na * nb / n),
            a3 + b3 + d**3 * (na * nb * (na - nb) / n**2) + 3 * d * (na * b2 - nb * a2) / n,
            a4
            + b4
            + d**4 * (na * nb * (na**2 - na * nb + nb**2) / n**3)
            + 6 * d**2 * (na**2 * b2 + nb**2 * a2) / n**2
            + 4 * d * (na * b3 - nb * a3) / n,
        )


class Moments:
    """Moments of every channel of a stream of rows."""

    def __init__(self, num_channels: int) -> None:
        self.sums = Sums(0, *torch.zeros(4, num_channels, dtype=torch.float64).unbind())
        self.absmax = torch.zeros(num_channels, dtype=torch.float64)

    @property
    def count(self) -> int:
        return self.sums.num_values

    @property
    def num_channels(self) -> int:
        return self.absmax.numel()

    def add(self, rows: Tensor) -> None:
        """Take in ``rows`` [n, channels] of any float dtype; an empty batch changes nothing."""
        if rows.shape[0] == 0:
            return
        x = rows.detach().float()
        self.sums = self.sums.combine(_batch_sums(x))
        self.absmax = torch.maximum(self.absmax, x.abs().amax(0).double().cpu())

    def merge(self, other: Moments) -> None:
        """Take in everything ``other`` has seen."""
        if other.count:
            self.sums = self.sums.combine(other.sums)
            self.absmax = torch.maximum(self.absmax, other.absmax)

    def sum_of_squares(self) -> Tensor:
        """Per channel, about zero, float64."""
        return self.sums.m2 + self.count * self.sums.mean**2

    def pooled(self) -> tuple[float, float, float]:
        """(mean, variance, excess kurtosis) over all channels taken together; a constant stream has kurtosis 0."""
        if not self.count:
            return 0.0, 0.0, 0.0
        total = _fold_channels(self.sums)
        mean, m2, m4 = float(total.mean), float(total.m2), float(total.m4)
        if m2 <= 0.0:
            return mean, 0.0, 0.0
        variance = m2 / total.num_values
        return mean, variance, m4 / total.num_values / variance**2 - 3.0


def _batch_sums(x: Tensor) -> Sums:
    """Sums of one float32 batch [n, channels]; only the sums themselves are float64."""
    n = x.shape[0]
    mean = x.mean(0, dtype=torch.float64)
    centred = x - mean.float()
    square = centred * centred
    s2 = square.sum(0, dtype=torch.float64)
    s3 = (square * centred).sum(0, dtype=torch.float64)
    s4 = (square * square).sum(0, dtype=torch.float64)
    d = mean - mean.float().double()  # the float32 mean is a little off: move the sums to the exact one
    return Sums(
        n,
        mean,
        s2 - n * d**2,
        s3 - 3 * d * s2 + 2 * n * d**3,
        s4 - 4 * d * s3 + 6 * d**2 * s2 - 3 * n * d**4,
    ).map(Tensor.cpu)


def _fold_channels(sums: Sums) -> Sums:
    """All channels merged into one by halves, so that a thousand channels take ten vector steps."""
    rest: list[Sums] = []
    while (width := sums.mean.numel()) > 1:
        if width % 2:
            rest.append(sums.map(lambda part: part[-1:]))
        half = width // 2
        sums = sums.map(lambda part, h=half: part[:h]).combine(sums.map(lambda part, h=half: part[h : 2 * h]))  # type: ignore[misc]
    for channel in rest:
        sums = sums.combine(channel)
    return sums
