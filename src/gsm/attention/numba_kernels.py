"""The compiled part of `numba_cpu`: page scores, selection, attention with split softmax, page mass.

Everything compiled lives in this file and uses only module-level helpers of it: numba's on-disk cache would be stale or
miss otherwise, and the first request would wait for the compiler. Float16 and bfloat16 arrive as their uint16 bits,
because numba has neither type on a CPU.

Work items are (sequence, kv head, chunk of pages). A softmax is split over the chunks of a head and joined at the
end, so that two threads are busy although a model has an odd number of kv heads.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: C901

from __future__ import annotations

import math

import numba
import numpy as np

# How pages are chosen, and how warm pages are stored: plain integers, as numba wants them.
ALL, ANCHOR, MEAN_SIGMA, MINMAX = 0, 1, 2, 3
NONE, INT8, INT4 = 0, 1, 2
LOWEST = np.float32(-1e30)  # stands for -inf, which fastmath may not meet

# fastmath without the flags that assume that NaN and infinity do not occur
_FAST = {"reassoc", "nsz", "arcp", "contract", "afn"}
_helper = numba.njit(fastmath=_FAST, cache=True, nogil=True, error_model="numpy")
_parallel = numba.njit(parallel=True, fastmath=_FAST, cache=True, nogil=True, error_model="numpy")


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
def _load_plain(source, is_bfloat16, count, out):
    """Tokens of a float32 or (uint16 bits of a) bfloat16 page into `out [page_size, dim]` float32."""
    if is_bfloat16:
        bits = out.view(np.uint32)
        for t in range(count):
            for d in range(out.shape[1]):
                bits[t, d] = np.uint32(source[t, d]) << np.uint32(16)
    else:
        for t in range(count):
            for d in range(out.shape[1]):
                out[t, d] = source[t, d]


@_helper
def _load_int8(codes, scales, count, out):
    for t in range(count):
        scale = _half(scales[t])
        for d in range(out.shape[1]):
            out[t, d] = np.float32(codes[t, d]) * scale


@_helper
def _load_int4_k(codes, scales, offsets, count, out):
    half_dim = out.shape[1] // 2
    for t in range(count):
        for i in range(half_dim):
            byte = np.uint8(codes[t, i])
            out[t, i] = np.float32(byte & np.uint8(15))
            out[t, half_dim + i] = np.float32(byte >> np.uint8(4))
    for d in range(out.shape[1]):
        scale, offset = _half(scales[d]), _half(offsets[d])
        for t in range(count):
            out[t, d] = out[t, d] * scale + offset


@_helper
def _load_int4_v(codes, scales, offsets, count, out):
    half_dim = out.shape[1] // 2
    num_groups = scales.shape[1]
    size = out.shape[1] // num_groups
    for t in range(count):
        for i in range(half_dim):
            byte = np.uint8(codes[t, i])
            out[t, i] = np.float32(byte & np.uint8(15))
            out[t, half_dim + i] = np.float32(byte >> np.uint8(4))
        for g in range(num_groups):
            scale, offset = _half(scales[t, g]), _half(offsets[t, g])
            for d in range(g * size, (g + 1) * size):
                out[t, d] = out[t, d] * scale + offset


@_helper
def _heads(query, first, count):
    """Rows [first, first + count) as an array the compiler knows to be contiguous: a slice would not vectorise."""
    heads = np.empty((count, query.shape[1]), np.float32)
    for g in range(count):
        for d in range(query.shape[1]):
            heads[g, d] = query[first + g, d]
    return heads


@_helper
def _score_pages(
    mode, sigma, query, norms, table, first, last, center, center_scale, detail, detail_scale, radius, scores
):
    """Raw scores `[2, G, pages]` of pages [first, last) of a kv head; `query [G, d]` is scaled, `norms [G]` its norms.

    anchor: logit of the bulk of the page, logit of the anchor. Others: the score, nothing.
    """
    num_heads, dim = query.shape
    weighted = np.empty((num_heads, dim), np.float32)  # what `detail` is multiplied with
    for g in range(num_heads):
        for d in range(dim):
            q = query[g, d]
            weighted[g, d] = q if mode == ANCHOR else q * q if mode == MEAN_SIGMA else abs(q)
    row_c = np.empty(dim, np.float32)
    row_d = np.empty(dim, np.float32)
    for p in range(first, last):
        page_id = table[p]
        if page_id < 0:
            for g in range(num_heads):
                scores[0, g, p] = LOWEST
                scores[1, g, p] = LOWEST
            continue
        c_scale, d_scale = _half(center_scale[page_id]), _half(detail_scale[page_id])
        spread = _half(radius[page_id]) * sigma
        for d in range(dim):
            row_c[d] = np.float32(center[page_id, d])
        for d in range(dim):
            row_d[d] = np.float32(detail[page_id, d])
        if mode == MEAN_SIGMA:
            for d in range(dim):
                row_d[d] *= row_d[d]
        for g in range(num_heads):
            dot_c = np.float32(0)
            dot_d = np.float32(0)
            for d in range(dim):
                dot_c += query[g, d] * row_c[d]
                dot_d += weighted[g, d] * row_d[d]
            if mode == ANCHOR:
                scores[0, g, p] = dot_c * c_scale + spread * norms[g]
                scores[1, g, p] = dot_d * d_scale
            elif mode == MEAN_SIGMA:
                scores[0, g, p] = dot_c * c_scale + sigma * np.sqrt(dot_d) * d_scale
            else:
                scores[0, g, p] = dot_c * c_scale + dot_d * d_scale


@_helper
def _join_group(mode, page_size, scores, num_known, joined):
    """One score per page, into `joined [pages]`: the summed shares of the query heads (anchor) or the best head."""
    for p in range(num_known):
        joined[p] = np.float32(0) if mode == ANCHOR else LOWEST
    for g in range(scores.shape[1]):
        if mode != ANCHOR:
            for p in range(num_known):
                joined[p] = max(joined[p], scores[0, g, p])
            continue
        top = LOWEST
        for p in range(num_known):
            top = max(top, max(scores[0, g, p], scores[1, g, p]))
        total = np.float32(0)
        size = np.float32(page_size)
        for p in range(num_known):
            share = size * _exp(scores[0, g, p] - top) + _exp(scores[1, g, p] - top)
            scores[0, g, p] = share
            total += share
        inverse = np.float32(1) / max(total, np.float32(1e-30))
        for p in range(num_known):
            joined[p] += scores[0, g, p] * inverse


@_helper
def _choose(table, num_pages, num_known, num_sinks, first_recent, budget, scores, pages):
    """Write the chosen logical pages, ascending, into `pages`; returns how many."""
    wanted = budget
    num_older = 0
    low, high = -LOWEST, LOWEST
    for p in range(num_pages):
        if table[p] < 0:
            continue
        if p < num_sinks or p >= first_recent:
            wanted -= 1
        else:
            num_older += 1
            low, high = min(low, scores[p]), max(high, scores[p])
    cut = LOWEST
    exact = wanted >= num_older
    if not exact and wanted > 0:  # bisection: the largest cut that leaves at least `wanted` pages at or above it
        for _ in range(64):
            middle = np.float32(0.5) * (low + high)
            if middle <= low or middle >= high:
                break
            count = 0
            for p in range(num_sinks, first_recent):
                count += (table[p] >= 0) & (scores[p] >= middle)
            if count >= wanted:
                low = middle
                if count == wanted:
                    break
            else:
                high = middle
        cut = low
    surplus = 0  # pages that tie at the cut beyond what fits
    if not exact and wanted > 0:
        for p in range(num_sinks, first_recent):
            surplus += (table[p] >= 0) & (scores[p] >= cut)
        surplus -= wanted
    n = 0
    for p in range(num_pages):
        if table[p] < 0 or n >= pages.shape[0]:
            continue
        older = num_sinks <= p < first_recent
        if older and not exact:
            if wanted <= 0 or scores[p] < cut:
                continue
            if scores[p] == cut and surplus > 0:
                surplus -= 1
                continue
        pages[n] = p
        n += 1
    return n


@_helper
def _dots(query, k_page, count, logits, first, state):
    """logits[g, first + t] = query[g] . k_page[t], lowest beyond `count`; keeps the largest in `state[g, 0]`."""
    for g in range(query.shape[0]):
        for t in range(0, k_page.shape[0], 4):
            a = b = c = e = np.float32(0)
            for d in range(query.shape[1]):
                q = query[g, d]
                a += q * k_page[t, d]
                b += q * k_page[t + 1, d]
                c += q * k_page[t + 2, d]
                e += q * k_page[t + 3, d]
            logits[g, first + t] = a
            logits[g, first + t + 1] = b
            logits[g, first + t + 2] = c
            logits[g, first + t + 3] = e
        top = state[g, 0]
        for t in range(count):
            top = max(top, logits[g, first + t])
        state[g, 0] = top
        for t in range(count, k_page.shape[0]):
            logits[g, first + t] = LOWEST


@_helper
def _weigh(weights, first, v_page, out):
    """out += sum of weights[first + t] * v_page[t]; returns the sum of the weights."""
    total = np.float32(0)
    for t in range(0, v_page.shape[0], 4):
        a, b, c, e = weights[first + t], weights[first + t + 1], weights[first + t + 2], weights[first + t + 3]
        total += (a + b) + (c + e)
        for d in range(out.shape[0]):
            out[d] += (a * v_page[t, d] + b * v_page[t + 1, d]) + (c * v_page[t + 2, d] + e * v_page[t + 3, d])
    return total


@_helper
def _attend_chunk(
    query,
    length,
    page_size,
    table,
    pages,
    hot_row,
    warm_row,
    hot_k,
    hot_v,
    is_bfloat16,
    codec,
    warm_k,
    warm_v,
    k_scale,
    k_offset,
    v_scale,
    v_offset,
    out,
    page_sum,
    state,
):
    """Unnormalised attention of `query [G, d]` over `pages`: `out [G, v_dim]`, `page_sum [G, pages]`, and
    `state [G, 2]` = (largest logit, sum of exponentials)."""
    num_heads, num_pages = query.shape[0], pages.shape[0]
    rows = (page_size + 3) // 4 * 4  # four tokens at a time; those beyond the page weigh nothing
    k_page = np.zeros((rows, query.shape[1]), np.float32)
    v_page = np.zeros((rows, out.shape[1]), np.float32)
    logits = np.empty((num_heads, num_pages * rows), np.float32)
    for g in range(num_heads):
        state[g, 0] = LOWEST
        state[g, 1] = 0
        for d in range(out.shape[1]):
            out[g, d] = 0
    for i in range(num_pages):
        count = min(page_size, length - pages[i] * page_size)
        page_id = table[pages[i]]
        hot, warm = hot_row[page_id], warm_row[page_id]
        if hot >= 0:
            _load_plain(hot_k[hot], is_bfloat16, count, k_page)
        elif codec == INT8:
            _load_int8(warm_k[warm], k_scale[warm], count, k_page)
        else:
            _load_int4_k(warm_k[warm], k_scale[warm], k_offset[warm], count, k_page)
        _dots(query, k_page, count, logits, i * rows, state)
    for g in range(num_heads):
        top = state[g, 0]
        for j in range(num_pages * rows):
            logits[g, j] = _exp(logits[g, j] - top)
    for i in range(num_pages):
        count = min(page_size, length - pages[i] * page_size)
        page_id = table[pages[i]]
        hot, warm = hot_row[page_id], warm_row[page_id]
        if hot >= 0:
            _load_plain(hot_v[hot], is_bfloat16, count, v_page)
        elif codec == INT8:
            _load_int8(warm_v[warm], v_scale[warm, :, 0], count, v_page)
        else:
            _load_int4_v(warm_v[warm], v_scale[warm], v_offset[warm], count, v_page)
        for g in range(num_heads):
            page_sum[g, i] = _weigh(logits[g], i * rows, v_page, out[g])
            state[g, 1] += page_sum[g, i]


@_parallel
def decode(
    query,
    table,
    slots,
    seq_lens,
    hot_row,
    warm_row,
    center,
    center_scale,
    detail,
    detail_scale,
    radius,
    hot_k,
    hot_v,
    is_bfloat16,
    codec,
    warm_k,
    warm_v,
    k_scale,
    k_offset,
    v_scale,
    v_offset,
    mode,
    sigma,
    num_sinks,
    recent_tokens,
    budgets,
    num_chunks,
    out,
    pages,
    mass,
):
    """One layer of decode attention for a batch.

    `query [B, Hq, d]` float32, already scaled; `out [B, Hq, v_dim]`; `pages [B, H, S]` int64 and `mass [B, H, S]`
    float32 are written, -1 and 0 where a head reads fewer pages. `budgets [B]` in pages.
    """
    batch, num_kv_heads, width = pages.shape
    group = query.shape[1] // num_kv_heads
    page_size = hot_k.shape[1]
    num_streams = batch * num_kv_heads
    num_items = num_streams * num_chunks
    counts = np.zeros(num_streams, np.int64)
    if mode != ALL:
        max_pages = 0
        for b in range(batch):
            max_pages = max(max_pages, (seq_lens[b] + page_size - 1) // page_size)
        scores = np.empty((num_streams, 2, group, max_pages), np.float32)
        for item in numba.prange(num_items):
            stream, chunk = item // num_chunks, item % num_chunks
            b, h = stream // num_kv_heads, stream % num_kv_heads
            known = (seq_lens[b] - 1) // page_size  # pages of earlier steps have summaries
            heads = _heads(query[b], h * group, group)
            norms = np.empty(group, np.float32)
            for g in range(group):
                total = np.float32(0)
                for d in range(heads.shape[1]):
                    total += heads[g, d] * heads[g, d]
                norms[g] = np.sqrt(total)
            _score_pages(
                mode,
                sigma,
                heads,
                norms,
                table[slots[b], h],
                known * chunk // num_chunks,
                known * (chunk + 1) // num_chunks,
                center,
                center_scale,
                detail,
                detail_scale,
                radius,
                scores[stream],
            )
    for stream in numba.prange(num_streams):
        b, h = stream // num_kv_heads, stream % num_kv_heads
        num_pages = (seq_lens[b] + page_size - 1) // page_size
        known = (seq_lens[b] - 1) // page_size
        row = table[slots[b], h]
        joined = np.empty(max(num_pages, 1), np.float32)
        if mode != ALL:
            _join_group(mode, page_size, scores[stream], known, joined)
        first_recent = max(0, seq_lens[b] - recent_tokens) // page_size if mode != ALL else 0
        n = _choose(row, num_pages, known, num_sinks, first_recent, budgets[b], joined, pages[b, h])
        counts[stream] = n
        for i in range(n, width):
            pages[b, h, i] = -1
            mass[b, h, i] = 0
    partial = np.empty((num_items, group, out.shape[2]), np.float32)
    state = np.empty((num_items, group, 2), np.float32)
    sums = np.empty((num_streams, group, width), np.float32)
    for item in numba.prange(num_items):
        stream, chunk = item // num_chunks, item % num_chunks
        b, h = stream // num_kv_heads, stream % num_kv_heads
        first, last = counts[stream] * chunk // num_chunks, counts[stream] * (chunk + 1) // num_chunks
        _attend_chunk(
            _heads(query[b], h * group, group),
            seq_lens[b],
            page_size,
            table[slots[b], h],
            pages[b, h, first:last],
            hot_row,
            warm_row,
            hot_k,
            hot_v,
            is_bfloat16,
            codec,
            warm_k,
            warm_v,
            k_scale,
            k_offset,
            v_scale,
            v_offset,
            partial[item],
            sums[stream, :, first:last],
            state[item],
        )
    for stream in range(num_streams):
        b, h = stream // num_kv_heads, stream % num_kv_heads
        n = counts[stream]
        for i in range(n):
            mass[b, h, i] = 0
        for g in range(group):
            top = LOWEST
            for chunk in range(num_chunks):
                top = max(top, state[stream * num_chunks + chunk, g, 0])
            total = np.float32(0)
            for d in range(out.shape[2]):
                out[b, h * group + g, d] = 0
            if top <= LOWEST:
                continue
            for chunk in range(num_chunks):
                item = stream * num_chunks + chunk
                if state[item, g, 0] > LOWEST:
                    weight = np.float32(math.exp(state[item, g, 0] - top))
                    total += weight * state[item, g, 1]
                    for d in range(out.shape[2]):
                        out[b, h * group + g, d] += weight * partial[item, g, d]
            inverse = np.float32(1) / total
            for d in range(out.shape[2]):
                out[b, h * group + g, d] *= inverse
            for chunk in range(num_chunks):
                item = stream * num_chunks + chunk
                first, last = n * chunk // num_chunks, n * (chunk + 1) // num_chunks
                if state[item, g, 0] > LOWEST:
                    weight = np.float32(math.exp(state[item, g, 0] - top)) * inverse
                    for i in range(first, last):
                        mass[b, h, i] = max(mass[b, h, i], sums[stream, g, i] * weight)
