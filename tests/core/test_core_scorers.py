"""Page scores against formulas written out token by token."""

from __future__ import annotations

import pytest
import torch

from gsm.core.scorers import Anchor, Clusters, ClusterSummary, MeanSigma, MinMax, Scorer, Summary, make_scorer

B, H, G, P, PAGE, D = 2, 3, 4, 5, 8, 16


def _keys_and_query(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(B, H, P, PAGE, D, generator=generator) + torch.randn(B, H, P, 1, D, generator=generator)
    return keys, torch.randn(B, H, G, D, generator=generator)


def _scores(scorer: Scorer, keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    summary = scorer.summarise(keys.flatten(0, 2))
    assert (summary.radius >= 0).all()
    pages = Summary(*(field.unflatten(0, (B, H, P)) for field in summary))
    return scorer.score(query, pages, torch.ones(B, H, P, dtype=torch.bool), keys.shape[3])


def test_anchor_estimates_the_share_of_attention() -> None:
    keys, query = _keys_and_query(4)
    query = query / D**0.5
    keys[:, :, 1, 3] *= 0.1
    scores = _scores(Anchor(1.0), keys, query)
    for b in range(B):
        for h in range(H):
            shares = torch.zeros(P).double()
            for q in query[b, h].double():
                logs = []
                for page in keys[b, h].double():
                    mean = page.mean(0)
                    radius = (page - mean).square().mean().sqrt()
                    anchor = min(page, key=lambda key: float(key.norm()))
                    bulk = PAGE * torch.exp(q @ mean + q.norm() * radius)
                    logs.append(torch.log(bulk + torch.exp(q @ anchor)))
                shares += torch.stack(logs).softmax(0)
            torch.testing.assert_close(scores[b, h].double(), shares, atol=1e-4, rtol=1e-4)


def test_anchor_ignores_pages_without_a_summary() -> None:
    keys, query = _keys_and_query(5)
    scorer = Anchor(1.0)
    pages = Summary(*(field.unflatten(0, (B, H, P)) for field in scorer.summarise(keys.flatten(0, 2))))
    known = torch.ones(B, H, P, dtype=torch.bool)
    known[:, :, -1] = False
    for field in pages:
        field[:, :, -1] = torch.nan
    scores = scorer.score(query, pages, known, PAGE)
    fewer = scorer.score(query, Summary(*(field[:, :, :-1] for field in pages)), known[:, :, :-1], PAGE)
    torch.testing.assert_close(scores[..., :-1], fewer)


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
                    float(q @ mean) + sigma * float((q.square() * variance).sum()) ** 0.5 for q in query[b, h].double()
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


def test_clusters_estimate_the_share_of_attention() -> None:
    keys, query = _keys_and_query(6)
    query = query / D**0.5
    scorer = Clusters(1.0)
    summary = scorer.summarise(keys.flatten(0, 2))
    pages = ClusterSummary(*(field.unflatten(0, (B, H, P)) for field in summary))
    assert (pages.size.sum(-1) == PAGE).all()
    # centers times sizes is the sum of the keys, whatever the clusters are
    torch.testing.assert_close((pages.center * pages.size.unsqueeze(-1)).sum(-2), keys.sum(-2), atol=1e-4, rtol=1e-4)
    scores = scorer.score(query, pages, torch.ones(B, H, P, dtype=torch.bool), PAGE)
    for b in range(B):
        for h in range(H):
            shares = torch.zeros(P).double()
            for q in query[b, h].double():
                logits = pages.center[b, h].double() @ q + q.norm() * pages.radius[b, h].double()
                shares += (pages.size[b, h].double() * logits.exp()).sum(-1).log().softmax(0)
            torch.testing.assert_close(scores[b, h].double(), shares, atol=1e-4, rtol=1e-4)


def test_clusters_find_separate_groups_exactly() -> None:
    centers = torch.eye(D)[:4] * 10
    keys = centers.repeat_interleave(2, 0)[torch.randperm(PAGE, generator=torch.Generator().manual_seed(0))]
    summary = Clusters().summarise(keys.unsqueeze(0))
    assert summary.size.flatten().tolist() == [2.0] * 4
    assert summary.radius.abs().max() == 0
    assert {tuple(row) for row in summary.center[0].tolist()} == {tuple(row) for row in centers.tolist()}


@pytest.mark.parametrize("dim", [16, 15])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_clusters_survive_storage_and_small_pages(dim: int, page_size: int) -> None:
    keys = torch.randn(5, page_size, dim, generator=torch.Generator().manual_seed(1))
    scorer = Clusters()
    summary = scorer.summarise(keys)
    stored = scorer.encode(summary)
    for name, (shape, dtype) in scorer.fields(dim).items():
        assert stored[name].shape == (5, *shape)
        assert stored[name].dtype == dtype
    restored = scorer.decode(stored)
    step = summary.center.abs().amax(-1, keepdim=True) / 7
    assert ((restored.center[..., :dim] - summary.center).abs() <= 0.51 * step + 1e-6).all()
    assert torch.equal(restored.size, summary.size)
    query = torch.randn(1, 1, 2, dim)
    pages = ClusterSummary(*(field.unflatten(0, (1, 1, 5)) for field in restored))
    scores = scorer.score(query, pages, torch.ones(1, 1, 5, dtype=torch.bool), page_size)
    assert scores.isfinite().all()
    assert scores.sum() == pytest.approx(2.0, rel=1e-5)  # shares of two query heads
