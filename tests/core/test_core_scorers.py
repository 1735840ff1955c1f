"""Page scores against formulas written out token by token."""

from __future__ import annotations

import pytest
import torch

from gsm.core.scorers import MeanSigma, MinMax, Scorer, make_scorer

B, H, G, P, PAGE, D = 2, 3, 4, 5, 8, 16


def _keys_and_query(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(B, H, P, PAGE, D, generator=generator) + torch.randn(B, H, P, 1, D, generator=generator)
    return keys, torch.randn(B, H, G, D, generator=generator)


def _scores(scorer: Scorer, keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    center, spread = scorer.summarise(keys.flatten(0, 2))
    assert (spread >= 0).all()
    return scorer.score(query, center.view(B, H, P, D), spread.view(B, H, P, D))


@pytest.mark.parametrize("sigma", [0.0, 1.5, 3.0])
def test_mean_sigma_is_its_formula(sigma: float) -> None:
    keys, query = _keys_and_query(1)
    scores = _scores(MeanSigma(sigma), keys, query)
    for b in range(B):
        for h in range(H):
            for p in range(P):
                page = keys[b, h, p].double()
                mean = page.sum(0) / PAGE
                variance = (page - mean).square().sum(0) / PAGE
                best = max(
                    float(q @ mean) + sigma * float((q.square() * variance).sum()) ** 0.5
                    for q in query[b, h].double()
                )
                assert float(scores[b, h, p]) == pytest.approx(best, rel=1e-4, abs=1e-4)


def test_minmax_bounds_every_logit_and_is_tight_for_one_token() -> None:
    keys, query = _keys_and_query(2)
    scores = _scores(MinMax(), keys, query)
    logits = torch.einsum("bhgd,bhptd->bhpgt", query, keys)
    assert (scores >= logits.flatten(-2).amax(-1) - 1e-4).all()
    single = keys[:, :, :, :1].contiguous()
    exact = torch.einsum("bhgd,bhptd->bhpgt", query, single).flatten(-2).amax(-1)
    torch.testing.assert_close(_scores(MinMax(), single, query), exact, atol=1e-4, rtol=1e-4)


def test_mean_sigma_ranks_the_page_with_the_matching_key_first() -> None:
    keys, query = _keys_and_query(3)
    keys[:, :, 2, 4] = 6.0 * query[:, :, 0]
    assert (_scores(MeanSigma(1.5), keys, query).argmax(-1) == 2).all()


def test_the_configuration_names_a_scorer() -> None:
    assert isinstance(make_scorer("minmax", 1.5), MinMax)
    scorer = make_scorer("mean_sigma", 2.5)
    assert isinstance(scorer, MeanSigma)
    assert scorer.sigma == 2.5
