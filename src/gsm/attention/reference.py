"""Decode attention the obvious way: one sequence, one head, one page at a time, in float64. The yardstick of tests."""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.attention.base import DecodeAttention, DecodeResult, check_query
from gsm.core.view import AttentionSpec, KVView, Selection


class ReferenceAttention(DecodeAttention):
    """Exact and slow."""

    name = "reference"

    def decode(self, query: Tensor, view: KVView, spec: AttentionSpec, selection: Selection | None) -> DecodeResult:
        group_size = check_query(query, view)
        batch, num_kv_heads = len(view.slots), view.table.shape[1]
        v_dim = spec.value_dims or view.hot["v"].shape[-1]
        out = torch.zeros(batch, query.shape[1], v_dim, dtype=torch.float64)
        read: list[list[list[int]]] = []
        masses: list[list[list[float]]] = []
        for b in range(batch):
            read.append([])
            masses.append([])
            for h in range(num_kv_heads):
                heads = slice(h * group_size, (h + 1) * group_size)
                pages = self._choose(query[b, heads].double().cpu(), view, b, h, selection, spec)
                k, v, page_of = self._tokens(view, b, h, pages, spec)
                weights = self._weights(query[b, heads].double().cpu() @ k.T, spec, heads)
                out[b, heads] = weights @ v
                read[b].append(pages)
                masses[b].append([float(weights[:, page_of == page].sum(-1).max()) for page in pages])
        return DecodeResult(out.to(query.dtype).to(query.device), _padded(read, -1).long(), _padded(masses, 0.0))

    def _choose(
        self, query: Tensor, view: KVView, b: int, h: int, selection: Selection | None, spec: AttentionSpec
    ) -> list[int]:
        length = int(view.seq_lens[b])
        num_pages = -(-length // view.page_size)
        table = view.table[int(view.slots[b]), h]
        oldest = _oldest(spec, length)
        present = [p for p in range(num_pages) if int(table[p]) >= 0 and (p + 1) * view.page_size > oldest]
        if selection is None:
            return present
        first_recent = max(0, length - selection.recent_tokens) // view.page_size
        always = [page for page in present if page < selection.num_sink_pages or page >= first_recent]
        older = [page for page in present if page not in always]
        budget = selection.budget_pages[b] - len(always)

        ids = table[:num_pages].long().view(1, 1, -1)
        known = (ids >= 0) & (torch.arange(num_pages, device=ids.device) < (length - 1) // view.page_size)
        scaled = query.float().view(1, 1, *query.shape).to(ids.device) * spec.scale
        promise = view.scorer.score(scaled, view.summaries(ids), known, view.page_size).flatten().tolist()
        return sorted([*always, *sorted(older, key=promise.__getitem__, reverse=True)[: max(0, budget)]])

    def _tokens(
        self, view: KVView, b: int, h: int, pages: list[int], spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        length = int(view.seq_lens[b])
        oldest = _oldest(spec, length)
        keys, values, page_of = [], [], []
        for page in pages:
            page_id = view.table[int(view.slots[b]), h, page].long().view(1)
            k, v = view.read(page_id)
            v = spec.values(k, v)
            for offset in range(int(view.records["skip"][page_id]), view.page_size):
                if oldest <= page * view.page_size + offset < length:
                    keys.append(k[offset].double().cpu())
                    values.append(v[offset].double().cpu())
                    page_of.append(page)
        if not keys:
            k_dim, v_dim = view.hot["k"].shape[-1], spec.value_dims or view.hot["v"].shape[-1]
            return torch.zeros(0, k_dim).double(), torch.zeros(0, v_dim).double(), torch.zeros(0)
        return torch.stack(keys), torch.stack(values), torch.tensor(page_of)

    def _weights(self, logits: Tensor, spec: AttentionSpec, heads: slice) -> Tensor:
        logits = logits * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if logits.shape[-1] == 0:
            return logits
        if spec.sink_logits is None:
            return logits.softmax(dim=-1)
        sink = spec.sink_logits[heads].double().cpu().unsqueeze(-1)
        return torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]


def _oldest(spec: AttentionSpec, length: int) -> int:
    """The first key that the newest of `length` tokens sees."""
    if spec.chunk is not None:
        return (length - 1) // spec.chunk * spec.chunk
    return 0 if spec.window is None else max(0, length - spec.window)


def _padded(nested: list[list[list[int]]] | list[list[list[float]]], fill: float) -> Tensor:
    width = max((len(row) for rows in nested for row in rows), default=0)
    return torch.tensor([[list(row) + [fill] * (width - len(row)) for row in rows] for rows in nested])
