"""Streaming moments against float64 on everything at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gsm.smoothing.moments import Moments


def exact(x: torch.Tensor) -> tuple[float, float, float]:
    d = x.double()
    centred = d - d.mean()
    variance = (centred**2).mean()
    return float(d.mean()), float(variance), float((centred**4).mean() / variance**2 - 3)


def test_a_million_tokens_with_a_sink_and_a_large_offset() -> None:
    generator = torch.Generator().manual_seed(0)
    moments, parts = Moments(8), []
    for _ in range(100):
        x = torch.randn(10_000, 8, generator=generator) * torch.arange(1, 9) + 50.0
        x[0, 3] = 30_000.0
        moments.add(x)
        parts.append(x)
    whole = torch.cat(parts)
    mean, variance, kurtosis = moments.pooled()
    assert moments.count == 1_000_000
    assert (mean, variance, kurtosis) == pytest.approx(exact(whole), rel=1e-5)
    assert torch.equal(moments.absmax, whole.abs().amax(0).double())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6), channels=st.integers(1, 9))
def test_cutting_and_merging_in_any_way_gives_the_same(seed: int, cuts: list[int], channels: int) -> None:
    x = torch.randn(sum(cuts), channels, generator=torch.Generator().manual_seed(seed)) ** 3
    whole, merged = Moments(channels), Moments(channels)
    whole.add(x)
    for part in x.split(cuts):
        piece = Moments(channels)
        piece.add(part)
        merged.merge(piece)
    assert merged.count == whole.count
    for a, b in zip(merged.sums[1:], whole.sums[1:], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
    assert torch.allclose(whole.sum_of_squares(), x.double().pow(2).sum(0), rtol=1e-5)


def test_nothing_and_constants_have_no_kurtosis() -> None:
    moments = Moments(3)
    assert moments.pooled() == (0.0, 0.0, 0.0)
    moments.add(torch.empty(0, 3))
    assert moments.count == 0
    moments.add(torch.full((10, 3), 2.0))
    assert moments.pooled() == (2.0, 0.0, 0.0)
