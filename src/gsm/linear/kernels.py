"""The compiled product of a few float32 rows with a weight matrix in float32 or bfloat16, and RMSNorm (numba).

A decode step reads every weight once and does little with it, so what counts is how fast memory is read. All threads of
torch's own team (`gsm.core.team`) take chunks of output channels from a shared counter and go through their weights in
one stream; up to four rows of x share each pass. Sums are reassociated so that they vectorise; NaN and infinity stay
what they are.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from gsm.core.team import add_to, pointer

_FAST = {"reassoc", "contract", "nsz", "arcp"}
_inner = numba.njit(fastmath=_FAST, nogil=True, cache=True, error_model="numpy")

# What a call is told: sizes and addresses, int64 each. `at` is the address of `counter`; `bias` may be 0.
# `epsilon` is a float64 in the same 8 bytes.
FIELDS = ("counter", "at", "chunk", "rows", "n", "out", "x", "w", "bias", "y", "epsilon")
_ARGUMENTS = np.dtype([(name, np.float64 if name == "epsilon" else np.int64) for name in FIELDS])


@intrinsic
def _value(typingctx, stored):
    """A stored weight as float32; a bfloat16 (numba has none) arrives as its bits, the upper half of a float32's."""
    if stored == types.float32:
        return types.float32(types.float32), lambda context, builder, signature, args: args[0]

    def widen(context, builder, signature, args):
        integer = context.get_value_type(types.uint32)
        bits = builder.shl(builder.zext(args[0], integer), integer(16))
        return builder.bitcast(bits, context.get_value_type(types.float32))

    return types.float32(types.uint16), widen


@_inner
def _dot(x, w, n):
    total = np.float32(0.0)
    for i in range(n):
        total += x[i] * _value(w[i])
    return total


@_inner
def _dot4(x0, x1, x2, x3, w, n):
    a = b = c = d = np.float32(0.0)
    for i in range(n):
        v = _value(w[i])
        a += x0[i] * v
        b += x1[i] * v
        c += x2[i] * v
        d += x3[i] * v
    return a, b, c, d


@_inner
def _product(a, w):
    """y = x w^T + bias for x [rows, n], w [out, n], bias [out] and y [rows, out], C-contiguous; all but w float32."""
    rows, n, out = a.rows, a.n, a.out
    x = carray(pointer(a.x), (rows, n), np.float32)
    y = carray(pointer(a.y), (rows, out), np.float32)
    start = add_to(a.at, a.chunk)
    while start < out:
        end = min(start + a.chunk, out)
        for j in range(start, end):
            row = w[j]
            for r in range(0, rows, 4):
                # always four, the last row again where fewer are left: then sums have one order for any number of rows
                r1, r2, r3 = min(r + 1, rows - 1), min(r + 2, rows - 1), min(r + 3, rows - 1)
                y[r, j], y[r1, j], y[r2, j], y[r3, j] = _dot4(x[r], x[r1], x[r2], x[r3], row, n)
        if a.bias:
            bias = carray(pointer(a.bias), out, np.float32)
            for r in range(rows):
                for j in range(start, end):
                    y[r, j] += bias[j]
        start = add_to(a.at, a.chunk)


def _float32(args):
    a = carray(args, 1)[0]
    _product(a, carray(pointer(a.w), (a.out, a.n), np.float32))


def _bfloat16(args):
    a = carray(args, 1)[0]
    _product(a, carray(pointer(a.w), (a.out, a.n), np.uint16))


def _rms_norm(args):
    """y = x / rms(x) * w, row by row: x and y [rows, n], w [n]."""
    a = carray(args, 1)[0]
    rows, n = a.rows, a.n
    x = carray(pointer(a.x), (rows, n), np.float32)
    w = carray(pointer(a.w), n, np.float32)
    y = carray(pointer(a.y), (rows, n), np.float32)
    start = add_to(a.at, a.chunk)
    while start < rows:
        for r in range(start, min(start + a.chunk, rows)):
            inverse = np.float32(1.0) / np.sqrt(_dot(x[r], x[r], n) / np.float32(n) + np.float32(a.epsilon))
            _scale(x[r], inverse, w, y[r], n)
        start = add_to(a.at, a.chunk)


@_inner
def _scale(x, factor, w, y, n):
    for i in range(n):
        y[i] = w[i] * (x[i] * factor)


_ENTRIES = (_float32, _bfloat16, _rms_norm)


@lru_cache(maxsize=1)
def entry_points() -> dict[str, Any]:
    """The compiled functions by name (of the weight's dtype, or "rms_norm"); their `address` is for `run_team`."""
    signature = types.void(types.CPointer(numba.from_dtype(_ARGUMENTS)))
    compile_entry = numba.cfunc(signature, cache=True, fastmath=_FAST, error_model="numpy")
    return {function.__name__.lstrip("_"): compile_entry(function) for function in _ENTRIES}
