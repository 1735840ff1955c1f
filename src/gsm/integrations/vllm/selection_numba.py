"""Scoring and choosing on a CPU as one compiled function: `clusters` summaries are read as they are stored.

Everything compiled lives in this file, as numba's on-disk cache requires. float16 arrives as its uint16 bits.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: C901

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gsm.integrations.vllm.pages import HeadPages
from gsm.integrations.vllm.selection import Rows
from gsm.integrations.vllm.summaries import Summaries

LOWEST = np.float32(-1e30)
_FAST = {"reassoc", "nsz", "arcp", "contract", "afn"}
_helper = numba.njit(fastmath=_FAST, cache=True, nogil=True, error_model="numpy")


@_helper
def _half(bits):
    """A float16 given by its bits, subnormals included."""
    magnitude = (np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13)
    value = np.uint32(magnitude).view(np.float32) * np.float32(5.192296858534828e33)  # 2**112: exponent bias
    return -value if bits & np.uint16(0x8000) else value


@_helper
def _exp(x):
    """exp(x) for x <= 0, relative error below 3e-7 (0 below -87); libm's does not vectorise."""
    t = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    whole = np.floor(t)
    f = t - whole
    p = np.float32(1.8775767e-3)
    p = p * f + np.float32(8.9893397e-3)
    p = p * f + np.float32(5.5826318e-2)
    p = p * f + np.float32(2.4015361e-1)
    p = p * f + np.float32(6.9315308e-1)
    p = p * f + np.float32(9.9999994e-1)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23))
    return p * power.view(np.float32)


@_helper
def _logits(query, sigma, table, head, num_known, center, center_scale, radius, size, out):
    """`out [C, G, P]`: logits of every center with its spread and size; `query [G, d]` is scaled."""
    group, dim = query.shape
    half = center.shape[-1]
    norms = np.zeros(group, np.float32)
    even = np.zeros((group, 2 * half), np.float32)
    for g in range(group):
        for d in range(dim):
            even[g, d] = query[g, d]
            norms[g] += query[g, d] * query[g, d]
        norms[g] = np.sqrt(norms[g]) * sigma
    row = np.empty(2 * half, np.float32)
    for p in range(num_known):
        block = table[p]
        for c in range(center.shape[2]):
            codes = center[block, head, c]
            for i in range(half):
                byte = np.uint8(codes[i])
                row[i] = np.float32(byte & np.uint8(15)) - np.float32(8)
                row[half + i] = np.float32(byte >> np.uint8(4)) - np.float32(8)
            scale, spread = _half(center_scale[block, head, c]), _half(radius[block, head, c])
            count = _half(size[block, head, c])
            log_size = np.float32(math.log(count)) if count > np.float32(0) else LOWEST
            for g in range(group):
                dot = np.float32(0)
                for d in range(2 * half):
                    dot += even[g, d] * row[d]
                out[c, g, p] = max(dot * scale + spread * norms[g] + log_size, LOWEST)


@_helper
def _shares(logits, num_known, joined):
    """Each query head's softmax over the known pages, summed over the group and added to `joined [P]`."""
    for g in range(logits.shape[1]):
        top = LOWEST
        for c in range(logits.shape[0]):
            for p in range(num_known):
                top = max(top, logits[c, g, p])
        total = np.float32(0)
        for p in range(num_known):
            share = np.float32(0)
            for c in range(logits.shape[0]):
                share += _exp(logits[c, g, p] - top)
            logits[0, g, p] = share
            total += share
        inverse = np.float32(1) / max(total, np.float32(1e-30))
        for p in range(num_known):
            joined[p] += logits[0, g, p] * inverse


@_helper
def _choose(scores, num_blocks, num_sinks, first_recent, count, chosen):
    """Logical blocks, ascending, into `chosen [count]`; the last one is always among them."""
    wanted = count
    low, high = np.float32(1e30), LOWEST
    num_older = 0
    for p in range(num_blocks):
        if p < num_sinks or p >= first_recent:
            wanted -= 1
        else:
            num_older += 1
            low, high = min(low, scores[p]), max(high, scores[p])
    exact = wanted >= num_older
    cut, surplus = LOWEST, 0
    if not exact and wanted > 0:  # bisection: the largest cut that leaves at least `wanted` pages at or above it
        for _ in range(64):
            middle = np.float32(0.5) * (low + high)
            if middle <= low or middle >= high:
                break
            above = 0
            for p in range(num_sinks, first_recent):
                above += scores[p] >= middle
            if above >= wanted:
                low = middle
                if above == wanted:
                    break
            else:
                high = middle
        cut = low
        for p in range(num_sinks, first_recent):
            surplus += scores[p] >= cut
        surplus -= wanted
    n = 0
    for p in range(num_blocks):
        older = num_sinks <= p < first_recent
        if older and not exact:
            if wanted <= 0 or scores[p] < cut:
                continue
            if scores[p] == cut and surplus > 0:
                surplus -= 1
                continue
        if n < count:
            chosen[n] = p
            n += 1


@_helper
def _select(
    query,
    scale,
    sigma,
    tables,
    lengths,
    counts,
    first_recent,
    num_sinks,
    block_size,
    center,
    center_scale,
    radius,
    size,
    per_block,
    per_head,
    shares,
    out,
):
    """Scores into `shares [B, H, P]`, the pages to read into `out [B, H, width]`."""
    batch, num_heads, group, dim = query.shape
    num_columns = tables.shape[1]
    logits = np.empty((center.shape[2], group, num_columns), np.float32)
    chosen = np.empty(out.shape[2], np.int64)
    scaled = np.empty((group, dim), np.float32)
    for b in range(batch):
        known = (lengths[b] - 1) // block_size
        for h in range(num_heads):
            joined = shares[b, h]
            joined[:] = 0
            for g in range(group):
                for d in range(dim):
                    scaled[g, d] = query[b, h, g, d] * scale
            _logits(scaled, sigma, tables[b], h, known, center, center_scale, radius, size, logits)
            _shares(logits, known, joined)
            _choose(joined, known + 1, num_sinks, first_recent[b], counts[b], chosen)
            for i in range(counts[b]):
                out[b, h, i] = tables[b, chosen[i]] * per_block + h * per_head


class CompiledSelection:
    """One layer's summaries as numpy arrays, and the compiled function over them."""

    def __init__(self, summaries: Summaries, pages: HeadPages) -> None:
        fields = summaries.fields
        bits = {name: fields[name].view(torch.uint16).numpy() for name in ("center_scale", "radius", "size")}
        self._fields = (fields["center"].numpy(), bits["center_scale"], bits["radius"], bits["size"])
        self._sigma = np.float32(summaries.scorer.sigma)
        self._pages = pages

    @staticmethod
    def serves(summaries: Summaries) -> bool:
        """Whether this is compiled: `clusters` on a CPU."""
        return summaries.scorer.name == "clusters" and summaries.fields["center"].device.type == "cpu"

    def __call__(self, query: Tensor, scale: float, rows: Rows, prepared: Prepared) -> None:
        """`query [B, H, G, d]` before scaling; writes `prepared.pages [B, H, width]` and `.shares [B, H, P]`."""
        _select(
            *(query.float().contiguous().numpy(), np.float32(scale), self._sigma, *prepared.arrays, rows.num_sinks),
            *(rows.block_size, *self._fields, self._pages.per_block, self._pages.per_head),
            *(prepared.shares_array, prepared.pages_array),
        )


class Prepared:
    """What the layers of a step share: rows as numpy arrays and room for results (one layer at a time)."""

    def __init__(self, rows: Rows, num_heads: int) -> None:
        batch = len(rows.lengths)
        self.pages = torch.zeros(batch, num_heads, rows.width, dtype=torch.int32)
        self.shares = torch.zeros(batch, num_heads, rows.tables.shape[1])
        self.pages_array: Any = self.pages.numpy()
        self.shares_array: Any = self.shares.numpy()
        tables = rows.tables.to(torch.int32).contiguous()
        self.arrays = (tables.numpy(), rows.lengths.numpy(), rows.counts.numpy(), rows.first_recent.numpy())
