"""Attention of many new tokens of one sequence over its stored history and themselves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gsm.attention.select import all_pages, visible_tokens
from gsm.attention.torch_ops import masked_softmax
from gsm.core.view import AttentionSpec, KVView


def prefill_attention(query: Tensor, k: Tensor, v: Tensor, history: KVView | None, spec: AttentionSpec) -> Tensor:
    """Causal attention of the new tokens.

    `query [num_query_heads, T, k_dim]`, `k [H, T, k_dim]`, `v [H, T, v_dim]`; `history` shows the sequence before
    these tokens, or is None. Returns `[num_query_heads, T, v_dim]`.
    """
    mask: Tensor | None = None
    if history is not None and history.max_pages > 0:
        past_k, past_v, seen, position = _past(history, spec)
        num_past = int(history.seq_lens[0])
        mask = _history_mask(seen, position, num_past, query.shape[1], spec)
        k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, spec.values(k, v)), dim=1)
    else:
        v = spec.values(k, v)
        if spec.most_visible is not None and query.shape[1] > spec.most_visible:
            mask = _new_mask(0, query.shape[1], spec, query.device).unsqueeze(0)
    if spec.softcap is None and spec.sink_logits is None:
        return _fused(query, k, v, mask, spec.scale)
    return _explicit(query, k, v, mask, spec)


def prefill_page_mass(
    query: Tensor,
    k: Tensor,
    history: KVView | None,
    spec: AttentionSpec,
    queries: slice,
    num_observations: int,
    page_size: int,
) -> Tensor:
    """Attention mass of every logical page for some of the new tokens, float32 `[N, H, pages]`, N <= num_observations.

    Arguments as in `prefill_attention`; `queries` names the new tokens that are observed. The mass of one token is the
    largest sum of softmax weights over the query heads of a kv head; neighbouring tokens are averaged into N
    observations, oldest first.
    """
    length, num_past = k.shape[1], 0
    new_position = torch.arange(length, device=k.device).expand(k.shape[0], -1)
    past = torch.zeros(k.shape[0], 0, dtype=torch.bool, device=k.device)
    if history is not None and history.max_pages > 0:
        past_k, _, past, past_position = _past(history, spec)
        num_past = int(history.seq_lens[0])
        k = torch.cat((past_k, k), dim=1)
        new_position = torch.cat((past_position, new_position + num_past), dim=1)
    rows = torch.arange(length, device=k.device)[queries]
    allowed = _allowed((num_past + rows).view(1, -1, 1), new_position.unsqueeze(1), spec)  # [H, Q, S + T]
    allowed[..., : past.shape[1]] &= past.unsqueeze(1)
    logits = _logits(query[:, queries].unflatten(0, (k.shape[0], -1)), k, spec)
    logits = logits.masked_fill(~allowed.unsqueeze(1), -torch.inf)
    sinks = spec.sink_logits.repeat_interleave(len(rows)) if spec.sink_logits is not None else None
    weights = masked_softmax(logits.flatten(1, 2).unsqueeze(0), sinks)[0].view_as(logits)  # [H, G, Q, S + T]
    num_pages = -(-(num_past + length) // page_size)
    by_page = weights.new_zeros(*weights.shape[:3], num_pages)
    page = (new_position // page_size).clamp_(0, num_pages - 1)
    by_page.scatter_add_(-1, page.view(page.shape[0], 1, 1, -1).expand_as(weights), weights)
    mass = by_page.amax(dim=1)  # [H, Q, pages]
    groups = mass.tensor_split(min(num_observations, len(rows)), dim=1)
    return torch.stack([group.mean(dim=1) for group in groups])


def _past(history: KVView, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stored `k [H, S, k_dim]`, `v [H, S, v_dim]`, bool `[H, S]`: a token is there, and its position `[H, S]`."""
    pages, ids = all_pages(history, spec)
    k, v = (x[0] for x in history.read(ids))
    seen = visible_tokens(pages, history)[0]
    k.masked_fill_(~seen.unsqueeze(-1), 0.0)
    v.masked_fill_(~seen.unsqueeze(-1), 0.0)
    return k, spec.values(k, v), seen, _positions(pages, history.page_size)[0]


def _positions(pages: Tensor, page_size: int) -> Tensor:
    return (pages.unsqueeze(-1) * page_size + torch.arange(page_size, device=pages.device)).flatten(-2)


def _allowed(query_position: Tensor, key_position: Tensor, spec: AttentionSpec) -> Tensor:
    """bool of the broadcast shape: which keys which queries see."""
    allowed = key_position <= query_position
    return allowed if spec.most_visible is None else allowed & (key_position >= spec.oldest(query_position))


def _new_mask(num_past: int, length: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """bool `[T, T]`: new query i sees new key j."""
    position = num_past + torch.arange(length, device=device)
    return _allowed(position.unsqueeze(1), position, spec)


def _history_mask(seen: Tensor, position: Tensor, num_past: int, length: int, spec: AttentionSpec) -> Tensor:
    """bool `[H or 1, T, S + T]`."""
    if bool((seen == seen[:1]).all()):
        seen, position = seen[:1], position[:1]
    past = seen.unsqueeze(1).expand(-1, length, -1)
    if spec.most_visible is not None:
        query_position = num_past + torch.arange(length, device=seen.device)
        past = past & _allowed(query_position.view(1, -1, 1), position.unsqueeze(1), spec)
    new = _new_mask(num_past, length, spec, seen.device).expand(past.shape[0], -1, -1)
    return torch.cat((past, new), dim=-1)


def _fused(query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    group_size = query.shape[0] // k.shape[0]
    if mask is not None and mask.shape[0] > 1:
        mask = mask.repeat_interleave(group_size, dim=0)
    out = F.scaled_dot_product_attention(
        query.unsqueeze(0),
        _for_every_query_head(k, group_size).unsqueeze(0),
        _for_every_query_head(v, group_size).unsqueeze(0),
        attn_mask=mask.unsqueeze(0) if mask is not None else None,
        is_causal=mask is None and query.shape[1] > 1,
        scale=scale,
    )
    return out.squeeze(0)


def _for_every_query_head(x: Tensor, group_size: int) -> Tensor:
    return x.expand(group_size, -1, -1) if x.shape[0] == 1 else x.repeat_interleave(group_size, dim=0)


def _explicit(query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """For soft-caps and sink logits, which torch's fused kernel does not know."""
    length = query.shape[1]
    logits = _logits(query.unflatten(0, (k.shape[0], -1)), k, spec)
    allowed = mask
    if allowed is None:  # no bound reached: plainly causal
        allowed = torch.ones(1, length, length, dtype=torch.bool, device=query.device).tril()
    logits = logits.masked_fill(~allowed.unsqueeze(1), -torch.inf)
    sinks = spec.sink_logits.repeat_interleave(length) if spec.sink_logits is not None else None
    weights = masked_softmax(logits.flatten(1, 2).unsqueeze(0), sinks)[0].view_as(logits)
    return (weights.to(v.dtype) @ v.unsqueeze(1)).flatten(0, 1)


def _logits(grouped: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """float32 `[H, G, T, S]` of `grouped [H, G, T, d]` and `k [H, S, d]`."""
    logits = (grouped @ k.unsqueeze(1).transpose(-1, -2)).float() * spec.scale
    return logits if spec.softcap is None else torch.tanh(logits / spec.softcap) * spec.softcap
