"""The compiled part of `numba_cpu`: page scores, selection, attention with split softmax, page mass.

Everything compiled lives in this file and uses only module-level helpers of it: numba's on-disk cache would be stale or
miss otherwise, and the first request would wait for the compiler. Float16 and bfloat16 arrive as their uint16 bits,
because numba has neither type on a CPU.

Work items are (sequence, kv head, chunk of pages). A softmax is split over the chunks of a head and joined at the
end, so that two threads are busy although a model has an odd number of kv heads. All threads of a team enter the same
function with the same `ARGUMENTS` and take items from a shared counter: a thread that the system holds up holds up
nobody else, and whoever finishes a head's last chunk joins it.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: C901

from __future__ import annotations

import math
from functools import lru_cache

import numba
import numpy as np
from numba import carray, types

from gsm.core.team import add_to, pointer, prefetch

# How pages are chosen, and how warm pages are stored: plain integers, as numba wants them.
ALL, ANCHOR, MEAN_SIGMA, MINMAX, CLUSTERS = 0, 1, 2, 3, 4
NONE, INT8, INT4 = 0, 1, 2
LOWEST = np.float32(-1e30)  # stands for -inf, which fastmath may not meet

# fastmath without the flags that assume that NaN and infinity do not occur
_FAST = {"reassoc", "nsz", "arcp", "contract", "afn"}
_helper = numba.njit(fastmath=_FAST, cache=True, nogil=True, error_model="numpy")

# What a call is told, as one record: sizes, flags and the addresses of arrays (shapes in the comments).
_SIZES = ("batch", "num_kv_heads", "group", "k_dim", "v_dim", "page_size", "max_pages", "width", "num_chunks")
_FLAGS = ("mode", "num_parts", "num_sinks", "recent_tokens", "codec", "is_bfloat16")
_CODES = ("k_bytes", "v_bytes", "k_scales", "v_scales", "v_groups")  # per warm page: rows of `warm_*`, `*_scale`
_INDEX = ("slots", "seq_lens", "budgets", "table", "table_slot_stride", "table_head_stride")  # int64 [B], int32 table
_RECORDS = (
    "hot_row",
    "warm_row",
    "center",
    "center_scale",
    "detail",
    "detail_scale",
    "radius",
    "size",
)  # [records, ...]
_POOLS = ("hot_k", "hot_v", "warm_k", "warm_v", "k_scale", "k_offset", "v_scale", "v_offset")  # [units, ...]
_WORK = ("counters", "scores", "counts", "partial", "state", "sums")  # scratch
_RESULT = ("query", "out", "pages", "mass")  # [B, Hq, k_dim], [B, Hq, v_dim], [B, H, width] int64, the same float32
_INT64 = (*_SIZES, *_FLAGS, *_CODES, *_INDEX, *_RECORDS, *_POOLS, *_WORK, *_RESULT)
ARGUMENTS = np.dtype([*((name, np.int64) for name in _INT64), ("scale", np.float32), ("sigma", np.float32)])


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
def _low_nibble(code):
    """As float32. Through int32, because numba computes with 64-bit integers, of which half as many fit a vector."""
    return np.float32(np.int32(np.uint8(code) & np.uint8(15)))


@_helper
def _high_nibble(code):
    return np.float32(np.int32(np.uint8(code) >> np.uint8(4)))


@_helper
def _load_bfloat16(source, count, out):
    """Tokens of a page given as bfloat16 bits into `out [page_size, dim]` float32."""
    bits = out.view(np.uint32)
    for t in range(count):
        for d in range(out.shape[1]):
            bits[t, d] = np.uint32(source[t, d]) << np.uint32(16)


@_helper
def _load_float32(source, count, out):
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
            out[t, i] = _low_nibble(codes[t, i])
            out[t, half_dim + i] = _high_nibble(codes[t, i])
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
            out[t, i] = _low_nibble(codes[t, i])
            out[t, half_dim + i] = _high_nibble(codes[t, i])
        for g in range(num_groups):
            scale, offset = _half(scales[t, g]), _half(offsets[t, g])
            for d in range(g * size, (g + 1) * size):
                out[t, d] = out[t, d] * scale + offset


@_helper
def _float32(address, shape):
    return carray(pointer(address), shape, np.float32)


@_helper
def _uint16(address, shape):
    return carray(pointer(address), shape, np.uint16)


@_helper
def _int8(address, shape):
    return carray(pointer(address), shape, np.int8)


@_helper
def _int32(address, shape):
    return carray(pointer(address), shape, np.int32)


@_helper
def _int64(address, shape):
    return carray(pointer(address), shape, np.int64)


@_helper
def _heads(a, stream):
    """The scaled query heads of a stream `[G, d]`, as an array the compiler knows to be contiguous."""
    source = _float32(a.query + 4 * stream * a.group * a.k_dim, (a.group, a.k_dim))
    heads = np.empty((a.group, a.k_dim), np.float32)
    for g in range(a.group):
        for d in range(a.k_dim):
            heads[g, d] = source[g, d] * a.scale
    return heads


@_helper
def _seq_len(a, stream):
    return _int64(a.seq_lens, (a.batch,))[stream // a.num_kv_heads]


@_helper
def _num_pages(a, stream):
    return (_seq_len(a, stream) + a.page_size - 1) // a.page_size


@_helper
def _table_row(a, stream):
    """Page ids of a stream, int32 `[max_pages]`."""
    slot, head = _int64(a.slots, (a.batch,))[stream // a.num_kv_heads], stream % a.num_kv_heads
    return _int32(a.table + 4 * (slot * a.table_slot_stride + head * a.table_head_stride), (a.max_pages,))


@_helper
def _score_pages(a, query, table, first, last, scores):
    """Raw scores `[parts, G, pages]` of pages [first, last) of a stream; `query [G, d]` is scaled.

    anchor: logits of the bulk of the page and of the anchor. Others: the score.
    """
    num_heads, dim = query.shape
    mode, sigma = a.mode, a.sigma
    log_page_size = np.float32(math.log(a.page_size))
    weighted = np.empty((num_heads, dim), np.float32)  # what `detail` is multiplied with
    norms = np.zeros(num_heads, np.float32)
    for g in range(num_heads):
        for d in range(dim):
            q = query[g, d]
            norms[g] += q * q
            weighted[g, d] = q if mode == ANCHOR else q * q if mode == MEAN_SIGMA else abs(q)
        norms[g] = np.sqrt(norms[g])
    row_c = np.empty(dim, np.float32)
    row_d = np.empty(dim, np.float32)
    for p in range(first, last):
        page_id = table[p]
        if page_id < 0:
            scores[:, :, p] = LOWEST
            continue
        center, detail = _int8(a.center + page_id * dim, (dim,)), _int8(a.detail + page_id * dim, (dim,))
        c_scale = _half(_uint16(a.center_scale + 2 * page_id, (1,))[0])
        d_scale = _half(_uint16(a.detail_scale + 2 * page_id, (1,))[0])
        spread = _half(_uint16(a.radius + 2 * page_id, (1,))[0]) * sigma
        for d in range(dim):
            row_c[d] = np.float32(center[d])
        for d in range(dim):
            row_d[d] = np.float32(detail[d])
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
                scores[0, g, p] = dot_c * c_scale + spread * norms[g] + log_page_size
                scores[1, g, p] = dot_d * d_scale
            elif mode == MEAN_SIGMA:
                scores[0, g, p] = dot_c * c_scale + sigma * np.sqrt(dot_d) * d_scale
            else:
                scores[0, g, p] = dot_c * c_scale + dot_d * d_scale


@_helper
def _score_clusters(a, query, table, first, last, scores):
    """The same for `clusters`: logits `[clusters, G, pages]` of every center, its spread and its size included."""
    num_heads, dim = query.shape
    half_dim, clusters, fours = (dim + 1) // 2, a.num_parts, (num_heads + 3) // 4 * 4
    # A code is a center's channel plus 8, two in a byte: channel i in the low nibble, half_dim + i in the high one.
    low, high = np.zeros((fours, half_dim), np.float32), np.zeros((fours, half_dim), np.float32)
    for g in range(num_heads):
        for d in range(dim):
            if d < half_dim:
                low[g, d] = query[g, d]
            else:
                high[g, d - half_dim] = query[g, d]
    for p in range(first, last):
        if p + 8 < last and table[p + 8] >= 0:
            ahead = a.center + table[p + 8] * clusters * half_dim
            for offset in range(0, clusters * half_dim, 64):
                prefetch(ahead + offset)
        if table[p] < 0:
            continue
        codes = _int8(a.center + table[p] * clusters * half_dim, (clusters, half_dim))
        for c in range(clusters):
            for g in range(0, num_heads, 4):
                w = x = y = z = np.float32(0)
                for i in range(half_dim):
                    even, odd = _low_nibble(codes[c, i]), _high_nibble(codes[c, i])
                    w += low[g, i] * even + high[g, i] * odd
                    x += low[g + 1, i] * even + high[g + 1, i] * odd
                    y += low[g + 2, i] * even + high[g + 2, i] * odd
                    z += low[g + 3, i] * even + high[g + 3, i] * odd
                scores[c, g, p] = w
                if g + 1 < num_heads:
                    scores[c, g + 1, p] = x
                if g + 2 < num_heads:
                    scores[c, g + 2, p] = y
                if g + 3 < num_heads:
                    scores[c, g + 3, p] = z
    _finish_clusters(a, query, table, first, last, scores)


@_helper
def _finish_clusters(a, query, table, first, last, scores):
    """Turn dots with codes into logits, page after page in one vector: the scalars of a page would cost more than
    its dots. A page that was dropped scores lowest."""
    num_heads, clusters, count = query.shape[0], a.num_parts, last - first
    log_size = np.empty(a.page_size + 1, np.float32)
    log_size[0] = LOWEST
    for n in range(1, a.page_size + 1):
        log_size[n] = np.float32(math.log(n))
    offset, norm = np.zeros(num_heads, np.float32), np.zeros(num_heads, np.float32)
    for g in range(num_heads):
        for d in range(query.shape[1]):
            offset[g] += np.float32(8) * query[g, d]
            norm[g] += query[g, d] * query[g, d]
        norm[g] = np.sqrt(norm[g]) * a.sigma
    bits = np.zeros((clusters, 2, count), np.uint16)
    size = np.empty((clusters, count), np.float32)
    for p in range(count):
        page_id = np.int64(table[first + p])
        for c in range(clusters):
            if page_id >= 0:
                row = 2 * (page_id * clusters + c)
                bits[c, 0, p] = _uint16(a.center_scale + row, (1,))[0]
                bits[c, 1, p] = _uint16(a.radius + row, (1,))[0]
                size[c, p] = log_size[np.int64(_half(_uint16(a.size + row, (1,))[0]))]
            else:
                size[c, p] = LOWEST
    scale, spread = np.empty(count, np.float32), np.empty(count, np.float32)
    for c in range(clusters):
        for p in range(count):
            scale[p] = _half(bits[c, 0, p])
        for p in range(count):
            spread[p] = _half(bits[c, 1, p])
        for g in range(num_heads):
            logits = scores[c, g, first:last]
            for p in range(count):
                logit = (logits[p] - offset[g]) * scale[p] + spread[p] * norm[g] + size[c, p]
                logits[p] = max(logit, LOWEST) if size[c, p] > LOWEST else LOWEST


@_helper
def _join_group(mode, scores, num_known, joined):
    """One score per page, into `joined [pages]`: the summed shares of the query heads, or the best head's score."""
    num_parts, num_heads, _ = scores.shape
    shares = mode in (ANCHOR, CLUSTERS)
    for p in range(num_known):
        joined[p] = np.float32(0) if shares else LOWEST
    for g in range(num_heads):
        if not shares:
            for p in range(num_known):
                joined[p] = max(joined[p], scores[0, g, p])
            continue
        top = LOWEST
        for part in range(num_parts):
            for p in range(num_known):
                top = max(top, scores[part, g, p])
        total = np.float32(0)
        share = np.zeros(num_known, np.float32)
        for part in range(num_parts):
            logits = scores[part, g]
            for p in range(num_known):
                share[p] += _exp(logits[p] - top)
        for p in range(num_known):
            total += share[p]
        inverse = np.float32(1) / max(total, np.float32(1e-30))
        for p in range(num_known):
            joined[p] += share[p] * inverse


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
def _find_pages(a, table, pages, hot, warm):
    """Where pages lie, -1 = not there: the cache misses of all of them overlap."""
    for i in range(pages.shape[0]):
        hot[i] = _int32(a.hot_row + 4 * np.int64(table[pages[i]]), (1,))[0]
        warm[i] = _int32(a.warm_row + 4 * np.int64(table[pages[i]]), (1,))[0]


@_helper
def _k_page(a, hot, warm, count, buffer):
    """K of a page as float32 `[page_size, k_dim]`: in place where it is stored so and complete, else in `buffer`."""
    tokens, dim = a.page_size, a.k_dim
    if hot >= 0 and a.is_bfloat16:
        _load_bfloat16(_uint16(a.hot_k + 2 * hot * tokens * dim, (tokens, dim)), count, buffer)
    elif hot >= 0:
        stored = _float32(a.hot_k + 4 * hot * tokens * dim, (tokens, dim))
        if count == buffer.shape[0]:
            return stored
        _load_float32(stored, count, buffer)
    else:
        codes = _int8(a.warm_k + warm * tokens * a.k_bytes, (tokens, a.k_bytes))
        scales = _uint16(a.k_scale + 2 * warm * a.k_scales, (a.k_scales,))
        if a.codec == INT8:
            _load_int8(codes, scales, count, buffer)
        else:
            _load_int4_k(codes, scales, _uint16(a.k_offset + 2 * warm * a.k_scales, (a.k_scales,)), count, buffer)
    return buffer


@_helper
def _v_page(a, hot, warm, count, buffer):
    """The same for V, `[page_size, v_dim]`."""
    tokens, dim = a.page_size, a.v_dim
    if hot >= 0 and a.is_bfloat16:
        _load_bfloat16(_uint16(a.hot_v + 2 * hot * tokens * dim, (tokens, dim)), count, buffer)
    elif hot >= 0:
        stored = _float32(a.hot_v + 4 * hot * tokens * dim, (tokens, dim))
        if count == buffer.shape[0]:
            return stored
        _load_float32(stored, count, buffer)
    else:
        codes = _int8(a.warm_v + warm * tokens * a.v_bytes, (tokens, a.v_bytes))
        if a.codec == INT8:
            _load_int8(codes, _uint16(a.v_scale + 2 * warm * a.v_scales, (a.v_scales,)), count, buffer)
        else:
            shape = tokens, a.v_groups
            scales = _uint16(a.v_scale + 2 * warm * a.v_scales, shape)
            _load_int4_v(codes, scales, _uint16(a.v_offset + 2 * warm * a.v_scales, shape), count, buffer)
    return buffer


@_helper
def _fetch(start, size):
    """Ask for cache lines that are needed soon: pages lie scattered, which hardware does not foresee."""
    for offset in range(0, size, 64):
        prefetch(start + offset)


@_helper
def _fetch_page(a, hot, warm, hot_pool, dim, warm_pool, code_bytes, scale_pool, num_scales):
    if hot >= 0:
        size = a.page_size * dim * (2 if a.is_bfloat16 else 4)
        _fetch(hot_pool + hot * size, size)
    else:
        _fetch(warm_pool + warm * a.page_size * code_bytes, a.page_size * code_bytes)
        _fetch(scale_pool + 2 * warm * num_scales, 2 * num_scales)


@_helper
def _attend_pages(a, query, length, table, pages, out, page_sum, state):
    """Unnormalised attention of `query [G, d]` over `pages`: `out [G, v_dim]`, `page_sum [G, pages]`, and
    `state [G, 2]` = (largest logit, sum of exponentials)."""
    num_heads, num_pages, page_size = query.shape[0], pages.shape[0], a.page_size
    rows = (page_size + 3) // 4 * 4  # four tokens at a time; those beyond the page weigh nothing
    k_buffer = np.zeros((rows, query.shape[1]), np.float32)
    v_buffer = np.zeros((rows, out.shape[1]), np.float32)
    logits = np.empty((num_heads, num_pages * rows), np.float32)
    hot, warm = np.empty(num_pages, np.int64), np.empty(num_pages, np.int64)
    _find_pages(a, table, pages, hot, warm)
    for g in range(num_heads):
        state[g, 0] = LOWEST
        state[g, 1] = 0
        for d in range(out.shape[1]):
            out[g, d] = 0
    for i in range(num_pages):
        if i + 2 < num_pages:
            h, w = hot[i + 2], warm[i + 2]
            _fetch_page(a, h, w, a.hot_k, a.k_dim, a.warm_k, a.k_bytes, a.k_scale, a.k_scales)
        count = min(page_size, length - pages[i] * page_size)
        _dots(query, _k_page(a, hot[i], warm[i], count, k_buffer), count, logits, i * rows, state)
    for g in range(num_heads):
        top = state[g, 0]
        for j in range(num_pages * rows):
            logits[g, j] = _exp(logits[g, j] - top)
    for i in range(num_pages):
        if i + 2 < num_pages:
            h, w = hot[i + 2], warm[i + 2]
            _fetch_page(a, h, w, a.hot_v, a.v_dim, a.warm_v, a.v_bytes, a.v_scale, a.v_scales)
        count = min(page_size, length - pages[i] * page_size)
        v_page = _v_page(a, hot[i], warm[i], count, v_buffer)
        for g in range(num_heads):
            page_sum[g, i] = _weigh(logits[g], i * rows, v_page, out[g])
            state[g, 1] += page_sum[g, i]


# -- work items ------------------------------------------------------------------------------------------------


@_helper
def _scores(a, stream):
    """Raw scores of a stream, `[parts, G, pages]`."""
    size = a.num_parts * a.group * a.max_pages
    return _float32(a.scores + 4 * stream * size, (a.num_parts, a.group, a.max_pages))


@_helper
def _score_item(a, stream, chunk):
    known = (_seq_len(a, stream) - 1) // a.page_size  # pages of earlier steps have summaries
    first, last = known * chunk // a.num_chunks, known * (chunk + 1) // a.num_chunks
    if a.mode == CLUSTERS:
        _score_clusters(a, _heads(a, stream), _table_row(a, stream), first, last, _scores(a, stream))
    else:
        _score_pages(a, _heads(a, stream), _table_row(a, stream), first, last, _scores(a, stream))


@_helper
def _choose_item(a, stream, joined):
    """Choose the pages of a stream whose scores are complete; `joined [num_pages]` takes one score per page."""
    length = _seq_len(a, stream)
    num_pages, known = _num_pages(a, stream), (length - 1) // a.page_size
    first_recent = np.int64(0)
    if a.mode != ALL:
        _join_group(a.mode, _scores(a, stream), known, joined)
        first_recent = max(np.int64(0), length - a.recent_tokens) // a.page_size
    budget = _int64(a.budgets, (a.batch,))[stream // a.num_kv_heads]
    pages = _int64(a.pages + 8 * stream * a.width, (a.width,))
    n = _choose(_table_row(a, stream), num_pages, known, a.num_sinks, first_recent, budget, joined, pages)
    for i in range(n, a.width):
        pages[i] = -1
    _int64(a.counts + 8 * stream, (1,))[0] = n


@_helper
def _attend_item(a, stream, chunk):
    item = stream * a.num_chunks + chunk
    n = _int64(a.counts + 8 * stream, (1,))[0]
    first, last = n * chunk // a.num_chunks, n * (chunk + 1) // a.num_chunks
    pages = _int64(a.pages + 8 * stream * a.width, (a.width,))
    partial = _float32(a.partial + 4 * item * a.group * a.v_dim, (a.group, a.v_dim))
    state = _float32(a.state + 4 * item * a.group * 2, (a.group, 2))
    sums = _float32(a.sums + 4 * stream * a.group * a.width, (a.group, a.width))
    _attend_pages(
        *(a, _heads(a, stream), _seq_len(a, stream), _table_row(a, stream), pages[first:last]),
        *(partial, sums[:, first:last], state),
    )


@_helper
def _join_item(a, stream):
    """Join the chunks of a stream into its output and the mass of its pages."""
    n = _int64(a.counts + 8 * stream, (1,))[0]
    chunks = a.num_chunks
    partial = _float32(a.partial + 4 * stream * chunks * a.group * a.v_dim, (chunks, a.group, a.v_dim))
    state = _float32(a.state + 4 * stream * chunks * a.group * 2, (chunks, a.group, 2))
    sums = _float32(a.sums + 4 * stream * a.group * a.width, (a.group, a.width))
    out = _float32(a.out + 4 * stream * a.group * a.v_dim, (a.group, a.v_dim))
    mass = _float32(a.mass + 4 * stream * a.width, (a.width,))
    for i in range(a.width):
        mass[i] = 0
    for g in range(a.group):
        top = LOWEST
        for chunk in range(chunks):
            top = max(top, state[chunk, g, 0])
        for d in range(a.v_dim):
            out[g, d] = 0
        if top <= LOWEST:
            continue
        total = np.float32(0)
        for chunk in range(chunks):
            if state[chunk, g, 0] > LOWEST:
                weight = np.float32(math.exp(state[chunk, g, 0] - top))
                total += weight * state[chunk, g, 1]
                for d in range(a.v_dim):
                    out[g, d] += weight * partial[chunk, g, d]
        inverse = np.float32(1) / total
        for d in range(a.v_dim):
            out[g, d] *= inverse
        for chunk in range(chunks):
            if state[chunk, g, 0] > LOWEST:
                weight = np.float32(math.exp(state[chunk, g, 0] - top)) * inverse
                for i in range(n * chunk // chunks, n * (chunk + 1) // chunks):
                    mass[i] = max(mass[i], sums[g, i] * weight)


# -- what a team enters ----------------------------------------------------------------------------------------


def _decode(arguments):
    """Selection items first, then attention items, both from one counter.

    `counters` int64 [1 + 2 * streams]: the next item; per stream the chunks that are not scored yet, -1 once its pages
    are chosen; per stream the chunks that are not attended yet. Items are claimed in order, so whoever waits for a
    choice waits for a thread that is at work on it.
    """
    a = carray(arguments, 1)[0]
    streams = a.batch * a.num_kv_heads
    num_items = streams * a.num_chunks
    unscored, unattended = a.counters + 8, a.counters + 8 * (1 + streams)
    while True:
        item = add_to(a.counters, 1)
        if item >= 2 * num_items:
            break
        if item < num_items:
            stream = item // a.num_chunks
            if a.mode != ALL:
                _score_item(a, stream, item % a.num_chunks)
            if add_to(unscored + 8 * stream, -1) == 1:
                _choose_item(a, stream, np.empty(_num_pages(a, stream), np.float32))
                add_to(unscored + 8 * stream, -1)
        else:
            item -= num_items
            stream = item // a.num_chunks
            while add_to(unscored + 8 * stream, 0) >= 0:
                pass
            _attend_item(a, stream, item % a.num_chunks)
            if add_to(unattended + 8 * stream, -1) == 1:
                _join_item(a, stream)


def _select(arguments):
    """Scores and choices alone, for a runtime that attends by itself: one thread, one chunk, no counters.

    `mass` float32 [B, H, max_pages] takes the score of every page instead.
    """
    a = carray(arguments, 1)[0]
    for stream in range(a.batch * a.num_kv_heads):
        _score_item(a, stream, 0)
        _choose_item(a, stream, _float32(a.mass + 4 * stream * a.max_pages, (a.max_pages,)))


@lru_cache(maxsize=1)
def entry_point():
    """The compiled `_decode`, whose `address` a team enters. Compiles it, or loads it from numba's cache."""
    return _compiled(_decode)


@lru_cache(maxsize=1)
def selection_entry_point():
    """The same for `_select`, which one thread enters."""
    return _compiled(_select)


def _compiled(function):
    signature = types.void(types.CPointer(numba.from_dtype(ARGUMENTS)))
    return numba.cfunc(signature, cache=True, fastmath=_FAST, error_model="numpy")(function)
