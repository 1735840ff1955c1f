"""Choosing the pages of a decode step: sinks, recent tokens, and the best older pages of each kv head."""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.core.view import AttentionSpec, KVView, Selection


def select_pages(query: Tensor, view: KVView, selection: Selection, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Logical pages and page ids, int64 `[B, H, S]` each; -1 pads sequences with fewer pages.

    `query [B, H, G, k_dim]`. Sinks and pages that hold the last `recent_tokens` tokens always come first.
    """
    ids = view.page_ids()
    page = torch.arange(view.max_pages, device=ids.device)
    complete = page < ((view.seq_lens - 1) // view.page_size).view(-1, 1, 1)  # pages of earlier steps have summaries
    scores = view.scorer.score(query.float() * spec.scale, view.summaries(ids), complete & (ids >= 0), view.page_size)
    first_recent = (view.seq_lens - selection.recent_tokens).clamp_min(0) // view.page_size
    always = (page < selection.num_sink_pages) | (page >= first_recent.unsqueeze(-1))
    scores = scores.masked_fill(always.unsqueeze(1), torch.inf).masked_fill(ids < 0, -torch.inf)
    if spec.most_visible is not None:
        hidden = (page + 1) * view.page_size <= spec.oldest(view.seq_lens - 1).unsqueeze(-1)
        scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    width = min(max(selection.budget_pages), view.max_pages)
    best, pages = scores.topk(width, dim=-1)
    budget = torch.tensor(selection.budget_pages, device=ids.device).view(-1, 1, 1)
    rank = torch.arange(width, device=ids.device)
    unused = (best == -torch.inf) | (rank >= budget)
    pages = pages.masked_fill(unused, -1)
    return pages, ids.gather(-1, pages.clamp_min(0)).masked_fill(unused, -1)


def all_pages(view: KVView, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Every page that is still there and that the newest query may see, in the form `select_pages` returns."""
    ids = view.page_ids()
    page = torch.arange(view.max_pages, device=ids.device).expand_as(ids)
    if spec.most_visible is not None:  # the visible pages are neighbours: no need to look at the others
        first = spec.oldest(view.seq_lens - 1).clamp_min(0) // view.page_size
        page = first.view(-1, 1, 1) + page[..., : view.max_pages - int(first.min())]
        ids = ids.gather(-1, page.clamp_max(view.max_pages - 1)).masked_fill(page >= view.max_pages, -1)
    if view.has_holes:  # put what is left in front, so that a sequence that dropped much does not read air
        order = (ids < 0).to(torch.int8).argsort(dim=-1, stable=True)
        width = int((ids >= 0).sum(-1).max())
        page, ids = page.gather(-1, order)[..., :width], ids.gather(-1, order)[..., :width]
    return page.masked_fill(ids < 0, -1), ids


def visible_tokens(pages: Tensor, view: KVView, spec: AttentionSpec | None = None) -> Tensor:
    """bool `[B, H, S * page_size]`: which token slots of logical pages `[B, H, S]` the newest query may see.

    Without a spec, which slots hold a token.
    """
    offset = torch.arange(view.page_size, device=pages.device)
    position = (pages.unsqueeze(-1) * view.page_size + offset).flatten(-2)
    length = view.seq_lens.view(-1, 1, 1)
    visible = (position < length) & (pages >= 0).repeat_interleave(view.page_size, dim=-1)
    if view.has_skips:
        ids = view.page_ids().gather(-1, pages.clamp_min(0)).clamp_min(0)
        visible &= (offset >= view.records["skip"][ids].unsqueeze(-1)).flatten(-2)
    if spec is None or spec.most_visible is None:
        return visible
    return visible & (position >= spec.oldest(length - 1))
