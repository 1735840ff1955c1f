"""How promising a page looks to a query, judged from a summary of its keys.

A scorer reduces the keys of a page to a summary, and turns a query and summaries into scores. All are pure tensor
functions, so that other runtimes can use them with their own page tables.

* `clusters`: estimates the page's share of the attention from four centers of its keys, stored in four bits: what one
  mean hides (the odd key that draws much attention, two topics in one page) gets a center of its own. The estimate is
  log(sum over clusters of size exp(q.center + c |q| radius)), normalised over all pages for each query head, then
  summed over the group. Closer to an oracle in KL than the others (benchmarks/LOG.md).
* `anchor`: estimates the page's share of the attention. Most keys of a page are told well enough by their mean and
  one number for their spread; what the mean hides is the odd key that draws much attention. Such keys are short
  (arXiv:2406.11430 uses this to evict), so the key with the smallest norm is kept as it is. The estimate is
  log(n exp(q.mean + c |q| radius) + exp(q.anchor)), normalised and summed as above.
* `mean_sigma`: q.mean + c * sqrt(sum q^2 var): the logits of a page are taken as normally distributed.
* `minmax`: an upper bound of q.k over the page, sum max(q * min, q * max) (Quest, arXiv:2406.10774).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsm.core.codec import Fields, FieldSpec, pack_nibbles, quantise_symmetric, unpack_nibbles

NUM_CLUSTERS = 4


class Summary(NamedTuple):
    """`center [..., k_dim]`, `detail [..., k_dim]`, `radius [...]`; each scorer says what they hold. float32."""

    center: Tensor
    detail: Tensor
    radius: Tensor


class ClusterSummary(NamedTuple):
    """`center [..., C, k_dim]`, `radius [..., C]` (root of the mean variance), `size [..., C]` in keys. float32."""

    center: Tensor
    radius: Tensor
    size: Tensor


class Scorer(ABC):
    """Contract: `summarise` sees complete pages only; `score` ranks the pages of one kv head (higher is better).

    A summary is a tuple of tensors whose leading dimensions are those of the pages. `encode` gives it as it is stored.
    """

    name: str

    def __init__(self, sigma: float = 2.5) -> None:
        self.sigma = sigma

    @abstractmethod
    def fields(self, k_dim: int) -> FieldSpec:
        """Shape and dtype of what is stored per page."""

    @abstractmethod
    def encode(self, summary: Any) -> Fields:
        """A summary `[N]` as stored."""

    @abstractmethod
    def decode(self, fields: Fields) -> Any:
        """The summary from its stored fields, whatever their leading dimensions."""

    @abstractmethod
    def summarise(self, keys: Tensor) -> Any:
        """Summaries `[N]` of `keys [N, page_size, k_dim]`."""

    @abstractmethod
    def score(self, query: Tensor, pages: Any, known: Tensor, page_size: int) -> Tensor:
        """Scores `[B, H, P]` for a softmax-scaled `query [B, H, G, d]` and summaries `[B, H, P]`.

        `known [B, H, P]` is false where there is no page or its summary means nothing yet; the score is any there.
        """


class Clusters(Scorer):
    """Four centers of the page's keys in int4, with the spread around each and how many keys it stands for."""

    name = "clusters"

    def fields(self, k_dim: int) -> FieldSpec:
        return {
            "center": ((NUM_CLUSTERS, (k_dim + 1) // 2), torch.int8),
            "center_scale": ((NUM_CLUSTERS,), torch.float16),
            "radius": ((NUM_CLUSTERS,), torch.float16),
            "size": ((NUM_CLUSTERS,), torch.float16),
        }

    def encode(self, summary: ClusterSummary) -> Fields:
        codes, scale = quantise_symmetric(summary.center, levels=7)
        codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
        packed = pack_nibbles((codes + 8).to(torch.uint8)).view(torch.int8)
        return {
            "center": packed,
            "center_scale": scale,
            "radius": summary.radius.half(),
            "size": summary.size.half(),
        }

    def decode(self, fields: Fields) -> ClusterSummary:
        codes = unpack_nibbles(fields["center"].view(torch.uint8)) - 8
        center = codes * fields["center_scale"].float().unsqueeze(-1)
        return ClusterSummary(center, fields["radius"].float(), fields["size"].float())

    def summarise(self, keys: Tensor) -> ClusterSummary:
        """Start from the shortest key and keys far from the chosen ones, then one step of k-means: more do not help."""
        keys = keys.float()
        center = _far_apart(keys, NUM_CLUSTERS)
        member = _membership(keys, center)
        size = member.sum(1)
        center = torch.einsum("ntc,ntd->ncd", member, keys) / size.clamp_min(1).unsqueeze(-1)
        member = _membership(keys, center)
        size = member.sum(1)
        own_center = torch.einsum("ntc,ncd->ntd", member, center)
        distance = (keys - own_center).square().mean(-1)
        radius = (torch.einsum("ntc,nt->nc", member, distance) / size.clamp_min(1)).sqrt()
        return ClusterSummary(center, radius, size)

    def score(self, query: Tensor, pages: ClusterSummary, known: Tensor, page_size: int) -> Tensor:
        query = query.float()[..., : pages.center.shape[-1]]
        logits = torch.einsum("bhgd,bhpcd->bhgpc", query, pages.center[..., : query.shape[-1]])
        spread = self.sigma * query.norm(dim=-1)[..., None, None] * pages.radius.unsqueeze(2)
        total = (logits + spread + pages.size.log().unsqueeze(2)).logsumexp(-1)
        return _summed_shares(total, known)


class _TwoVectors(Scorer):
    """Scorers that keep two vectors and a number per page, the vectors in int8."""

    def fields(self, k_dim: int) -> FieldSpec:
        return {
            "center": ((k_dim,), torch.int8),
            "detail": ((k_dim,), torch.int8),
            "center_scale": ((), torch.float16),
            "detail_scale": ((), torch.float16),
            "radius": ((), torch.float16),
        }

    def encode(self, summary: Summary) -> Fields:
        center, center_scale = quantise_symmetric(summary.center)
        detail, detail_scale = quantise_symmetric(summary.detail)
        scales = {"center_scale": center_scale, "detail_scale": detail_scale}
        return {"center": center, "detail": detail, "radius": summary.radius.half()} | scales

    def decode(self, fields: Fields) -> Summary:
        return Summary(
            fields["center"].float() * fields["center_scale"].float().unsqueeze(-1),
            fields["detail"].float() * fields["detail_scale"].float().unsqueeze(-1),
            fields["radius"].float(),
        )


class Anchor(_TwoVectors):
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
        return _summed_shares(total, known)


class MeanSigma(_TwoVectors):
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


class MinMax(_TwoVectors):
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


def _far_apart(keys: Tensor, count: int) -> Tensor:
    """`count` keys of each page `[N, T, d]`: the shortest, then always the one farthest from those chosen."""
    rows = torch.arange(len(keys), device=keys.device)
    chosen = [keys[rows, keys.square().sum(-1).argmin(dim=1)]]
    distance = torch.full(keys.shape[:2], torch.inf, device=keys.device)
    while len(chosen) < count:
        distance = torch.minimum(distance, (keys - chosen[-1].unsqueeze(1)).square().sum(-1))
        chosen.append(keys[rows, distance.argmax(dim=1)])
    return torch.stack(chosen, dim=1)


def _membership(keys: Tensor, center: Tensor) -> Tensor:
    """`[N, T, C]`: 1 where the center is the nearest one of the key, else 0."""
    nearest = torch.cdist(keys, center).argmin(dim=-1)
    return torch.nn.functional.one_hot(nearest, center.shape[1]).float()


def _summed_shares(logits: Tensor, known: Tensor) -> Tensor:
    """Each query head's softmax over the known pages, `[B, H, G, P]`, summed over the group."""
    share = logits.masked_fill(~known.unsqueeze(2), -torch.inf).softmax(dim=-1)
    return share.nan_to_num(0.0).sum(dim=2)


SCORERS: dict[str, type[Scorer]] = {scorer.name: scorer for scorer in (Clusters, Anchor, MeanSigma, MinMax)}


def make_scorer(name: str, sigma: float) -> Scorer:
    """The scorer the configuration names (`cache.sparse.scorer`)."""
    return SCORERS[name](sigma)
