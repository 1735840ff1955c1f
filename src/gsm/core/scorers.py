"""How promising a page looks to a query, judged from a summary of its keys.

A scorer reduces the keys of a page to a `Summary` and turns a query and summaries into scores. All are pure tensor
functions, so that other runtimes can use them with their own page tables.

* `anchor`: estimates the page's share of the attention. Most keys of a page are told well enough by their mean and
  one number for their spread; what the mean hides is the odd key that draws much attention. Such keys are short
  (arXiv:2406.11430 uses this to evict), so the key with the smallest norm is kept as it is. The estimate is
  log(n exp(q.mean + c |q| radius) + exp(q.anchor)), normalised over all pages for each query head, then summed
  over the group. Half of the way from mean + 1.5 sigma to an oracle in output error (benchmarks/LOG.md).
* `mean_sigma`: q.mean + c * sqrt(sum q^2 var): the logits of a page are taken as normally distributed.
* `minmax`: an upper bound of q.k over the page, sum max(q * min, q * max) (Quest, arXiv:2406.10774).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Summary(NamedTuple):
    """`center [..., k_dim]`, `detail [..., k_dim]`, `radius [...]`; each scorer says what they hold. float32."""

    center: Tensor
    detail: Tensor
    radius: Tensor


class Scorer(ABC):
    """Contract: `summarise` sees complete pages only; `score` ranks the pages of one kv head (higher is better)."""

    name: str

    def __init__(self, sigma: float = 2.5) -> None:
        self.sigma = sigma

    @abstractmethod
    def summarise(self, keys: Tensor) -> Summary:
        """Summaries `[N]` of `keys [N, page_size, k_dim]`."""

    @abstractmethod
    def score(self, query: Tensor, pages: Summary, known: Tensor, page_size: int) -> Tensor:
        """Scores `[B, H, P]` for a softmax-scaled `query [B, H, G, d]` and `pages [B, H, P]`.

        `known [B, H, P]` is false where there is no page or its summary means nothing yet; the score is any there.
        """


class Anchor(Scorer):
    """Mean, radius (root of the mean variance) and the key of the smallest norm."""

    name = "anchor"

    def summarise(self, keys: Tensor) -> Summary:
        keys = keys.float()
        variance, mean = torch.var_mean(keys, dim=1, correction=0)
        shortest = keys.square().sum(-1).argmin(dim=1)
        anchor = keys[torch.arange(len(keys), device=keys.device), shortest]
        return Summary(mean, anchor, variance.mean(-1).sqrt())

    def score(self, query: Tensor, pages: Summary, known: Tensor, page_size: int) -> Tensor:
        query = query.float()
        bulk = query @ pages.center.transpose(-1, -2)
        bulk = bulk + self.sigma * query.norm(dim=-1, keepdim=True) * pages.radius.unsqueeze(2)
        total = torch.logaddexp(bulk + math.log(page_size), query @ pages.detail.transpose(-1, -2))
        share = total.masked_fill(~known.unsqueeze(2), -torch.inf).softmax(dim=-1)
        return share.nan_to_num(0.0).sum(dim=2)


class MeanSigma(Scorer):
    """Mean plus `sigma` standard deviations of the logits; `detail` is the standard deviation per channel."""

    name = "mean_sigma"

    def summarise(self, keys: Tensor) -> Summary:
        variance, mean = torch.var_mean(keys.float(), dim=1, correction=0)
        return Summary(mean, variance.sqrt(), variance.mean(-1).sqrt())

    def score(self, query: Tensor, pages: Summary, known: Tensor, page_size: int) -> Tensor:
        query = query.float()
        mean = query @ pages.center.transpose(-1, -2)
        deviation = (query.square() @ pages.detail.square().transpose(-1, -2)).sqrt()
        return (mean + self.sigma * deviation).amax(dim=2)


class MinMax(Scorer):
    """The largest logit any key inside the page's bounding box could have; `detail` is half the box."""

    name = "minmax"

    def summarise(self, keys: Tensor) -> Summary:
        keys = keys.float()
        low, high = keys.amin(dim=1), keys.amax(dim=1)
        return Summary((high + low) / 2, (high - low) / 2, (high - low).norm(dim=-1) / 2)

    def score(self, query: Tensor, pages: Summary, known: Tensor, page_size: int) -> Tensor:
        query = query.float()
        center, half = pages.center.transpose(-1, -2), pages.detail.transpose(-1, -2)
        return (query @ center + query.abs() @ half).amax(dim=2)


SCORERS: dict[str, type[Scorer]] = {scorer.name: scorer for scorer in (Anchor, MeanSigma, MinMax)}


def make_scorer(name: str, sigma: float) -> Scorer:
    """The scorer the configuration names (`cache.sparse.scorer`)."""
    return SCORERS[name](sigma)
