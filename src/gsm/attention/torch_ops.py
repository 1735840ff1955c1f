"""Decode attention by batched torch operations: gather the chosen pages, multiply, softmax. Runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.attention.base import DecodeAttention, DecodeResult, check_query
from gsm.attention.select import all_pages, select_pages, visible_tokens
from gsm.core.view import AttentionSpec, KVView, Selection


class TorchAttention(DecodeAttention):
    """All requests and heads of a step in one batched call."""

    name = "torch"

    def decode(self, query: Tensor, view: KVView, spec: AttentionSpec, selection: Selection | None) -> DecodeResult:
        group_size = check_query(query, view)
        grouped = query.unflatten(1, (-1, group_size))  # [B, H, G, d]
        pages, ids = select_pages(grouped, view, selection, spec) if selection else all_pages(view, spec)
        k, v = view.read(ids)
        v = spec.values(k, v)
        visible = visible_tokens(pages, view, spec)
        v.masked_fill_(~visible.unsqueeze(-1), 0.0)  # 0 * NaN from an unused slot would be NaN
        logits = (grouped @ k.transpose(-1, -2)).float() * spec.scale
        if spec.softcap is not None:
            logits = torch.tanh(logits / spec.softcap) * spec.softcap
        weights = masked_softmax(logits.masked_fill(~visible.unsqueeze(2), -torch.inf), spec.sink_logits)
        out = weights.to(v.dtype) @ v
        mass = weights.unflatten(-1, (-1, view.page_size)).sum(-1).amax(dim=2)
        return DecodeResult(out.flatten(1, 2), pages, mass)


def masked_softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Softmax over the last axis of `logits [B, H, G, S]`; rows without any key become zeros, not NaN."""
    top = logits.amax(dim=-1, keepdim=True)
    sink = None
    if sink_logits is not None:
        sink = sink_logits.float().view(1, *logits.shape[1:3], 1)
        top = torch.maximum(top, sink)
    weights = torch.exp(logits - top.clamp_min(torch.finfo(torch.float32).min))
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    return weights / total.clamp_min(torch.finfo(torch.float32).tiny)
