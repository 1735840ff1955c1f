"""Fused int8 kernels for CPU (numba). Optional: without numba the same arithmetic runs on torch's own operations.

A decode step multiplies one row with every weight, so it is bound by reading weights and by the number of small
operations around each product. One kernel per projection (two per gated MLP) removes those operations: it quantises the
row, multiplies in int8 with int32 sums, and scales back. Prefill multiplies with `torch._int_mm` (oneDNN) and uses the
row-wise kernels here before and after it.

All threads of torch's own team enter the same function with the same `ARGUMENTS` (`gsm.core.team`) and take chunks of
output channels, or of rows, from a shared counter. Quantising the few rows of a decode step is done by every thread for
itself: that is cheaper than waiting for each other.

Arrays: x [rows, n] float32, w [out, n] int8, w_scale [out] float32 ([out, groups] for `weight_only`); all C-contiguous.
A row that holds a NaN or an infinity gets a NaN scale, so that the damage stays visible in the output; fast-math is
limited to what keeps it so.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from gsm.core.team import add_to, pointer, run_team

# reassociation lets sums vectorise; "nnan" and "ninf" stay off, because they would let NaN pass for a number. The numpy
# error model matters: Python's raises on division by zero, and that check alone keeps a loop from vectorising.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_inner: Any = njit(fastmath=_FAST, nogil=True, cache=True, error_model="numpy")

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_INFINITY_BITS = np.int32(0x7F800000)

# What a call is told, 8 bytes each. `at` is the address of `counter`; addresses that a kernel does not read may be 0.
_SIZES = ("counter", "at", "chunk", "rows", "n", "out", "groups", "kind", "block")
_ADDRESSES = ("x", "q", "scale", "w", "w_scale", "bias", "total", "y")
_FLOATS = ("static",)
ARGUMENTS = np.dtype([*((f, np.int64) for f in (*_SIZES, *_ADDRESSES)), *((f, np.float64) for f in _FLOATS)])
INDEX = {name: index for index, name in enumerate(ARGUMENTS.names or ())}


def _intrinsic(result: Any, arguments: tuple[Any, ...], build: Callable[[Any, Any, Any], Any]) -> Any:
    """A function of fixed types that becomes the few LLVM instructions of ``build(builder, types, arguments)``.

    numba widens integer arithmetic to 64 bits and checks float conversions, and either keeps loops from vectorising.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return build(builder, lambda kind: context.get_value_type(kind), args)

    if len(arguments) == 1:
        return intrinsic(lambda typingctx, a: (result(*arguments), codegen))
    return intrinsic(lambda typingctx, a, b: (result(*arguments), codegen))


_int_of: Any = _intrinsic(types.int32, (types.float32,), lambda b, t, a: b.fptosi(a[0], t(types.int32)))
_int8_of: Any = _intrinsic(
    types.int8, (types.float32,), lambda b, t, a: b.trunc(b.fptosi(a[0], t(types.int32)), t(types.int8))
)
_float_of_bits: Any = _intrinsic(types.float32, (types.int32,), lambda b, t, a: b.bitcast(a[0], t(types.float32)))
_magnitude_bits: Any = _intrinsic(
    types.int32,
    (types.float32,),
    lambda b, t, a: b.and_(b.bitcast(a[0], t(types.int32)), t(types.int32)(0x7FFFFFFF)),
)
_larger: Any = _intrinsic(
    types.int32, (types.int32, types.int32), lambda b, t, a: b.select(b.icmp_signed(">", a[0], a[1]), a[0], a[1])
)
_power_of_two: Any = _intrinsic(
    types.float32,
    (types.int32,),
    lambda b, t, a: b.bitcast(b.shl(b.add(a[0], t(types.int32)(127)), t(types.int32)(23)), t(types.float32)),
)
_multiply_add: Any = intrinsic(
    lambda typingctx, total, a, b: (
        types.int32(types.int32, types.int16, types.int8),
        lambda context, builder, signature, args: builder.add(
            args[0],
            builder.mul(
                builder.sext(args[1], context.get_value_type(types.int32)),
                builder.sext(args[2], context.get_value_type(types.int32)),
            ),
        ),
    )
)


@_inner
def _exp(x):
    """e**x in float32 with a relative error of 3e-7; a polynomial, because calls into libm do not vectorise."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.rint(x * np.float32(1.4426950408889634))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1.0)) * _power_of_two(_int_of(n))


@_inner
def _activate(x, kind):
    """silu(x), or the tanh form of gelu, which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))."""
    z = x
    if kind == 1:
        z = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)
    return x / (np.float32(1.0) + _exp(-z))


@_inner
def _dot(a, w, n):
    """Exact int32 product of an int16 row with an int8 row; becomes vpmaddwd.

    One weight row at a time: several at once halve the speed, because memory is read fastest in one stream.
    """
    total = np.int32(0)
    for i in range(n):
        total = _multiply_add(total, a[i], w[i])
    return total


@_inner
def _dot_float(x, w, n):
    """Product of a float32 row with one of float32 or int8."""
    total = np.float32(0.0)
    for i in range(n):
        total += x[i] * np.float32(w[i])
    return total


@_inner
def _widen(w, scale, wide, size, groups):
    """int8 codes to float32, ``size`` of them per scale."""
    for g in range(groups):
        codes, to, s = w[g * size : (g + 1) * size], wide[g * size : (g + 1) * size], scale[g]
        for i in range(size):
            to[i] = np.float32(codes[i]) * s


@_inner
def _quantise(x, q, n, static_scale):
    """x[:n] to int8 codes; returns the scale. ``static_scale`` > 0 is used unless the row exceeds its range.

    Magnitudes are compared as bit patterns, which order like the numbers and put NaN above infinity: the largest one
    shows both the range and whether the row is finite.
    """
    top = np.int32(0)
    for i in range(n):
        top = _larger(top, _magnitude_bits(x[i]))
    if top >= _INFINITY_BITS:
        q[:n] = 0
        return np.float32(np.nan)
    scale = _float_of_bits(top) / np.float32(127.0)
    if static_scale > np.float32(0.0) and scale <= static_scale:
        scale = static_scale
    inverse = np.float32(0.0)
    if scale > np.float32(1e-38):
        inverse = np.float32(1.0) / scale
    for i in range(n):
        q[i] = _int8_of(np.rint(x[i] * inverse))
    return scale


@_inner
def hadamard(x, n, block):
    """Multiply x[:n], seen as [block, n / block], by the orthonormal Hadamard matrix of ``block`` (a power of two).

    Elements n / block apart are mixed, so that every step works on contiguous runs.
    """
    width = n // block
    while width < n:
        for start in range(0, n, 2 * width):
            upper = x[start : start + width]
            lower = x[start + width : start + 2 * width]
            for j in range(width):
                a, b = upper[j], lower[j]
                upper[j] = a + b
                lower[j] = a - b
        width *= 2
    norm = np.float32(1.0) / np.sqrt(np.float32(block))
    for i in range(n):
        x[i] *= norm


@_inner
def _quantise_all(x, rows, n, static_scale, block):
    """Every row's codes as int16, ready to be multiplied, and its scale."""
    codes = np.empty((rows, n), np.int16)
    scale = np.empty(rows, np.float32)
    for r in range(rows):
        if block > 1:
            rotated = x[r].copy()
            hadamard(rotated, n, block)
            scale[r] = _quantise(rotated, codes[r], n, static_scale)
        else:
            scale[r] = _quantise(x[r], codes[r], n, static_scale)
    return codes, scale


def _linear(args):
    """y = x w^T for a few rows, quantised per row."""
    a = carray(args, 1)[0]
    rows, n, out = a.rows, a.n, a.out
    w = carray(pointer(a.w), (out, n), np.int8)
    w_scale = carray(pointer(a.w_scale), out, np.float32)
    y = carray(pointer(a.y), (rows, out), np.float32)
    codes, scale = _quantise_all(carray(pointer(a.x), (rows, n), np.float32), rows, n, np.float32(a.static), a.block)
    start = add_to(a.at, a.chunk)
    while start < out:
        end = min(start + a.chunk, out)
        for r in range(rows):
            c, s, to = codes[r], scale[r], y[r]
            for j in range(start, end):
                to[j] = np.float32(_dot(c, w[j], n)) * (s * w_scale[j])
            if a.bias:
                bias = carray(pointer(a.bias), out, np.float32)
                for j in range(start, end):
                    to[j] += bias[j]
        start = add_to(a.at, a.chunk)


def _gate_up(args):
    """y = act(x gate^T) * (x up^T) for a few rows; ``w`` [2 * out, n] holds the gate's channels, then those of up."""
    a = carray(args, 1)[0]
    rows, n, out = a.rows, a.n, a.out
    w = carray(pointer(a.w), (2 * out, n), np.int8)
    w_scale = carray(pointer(a.w_scale), 2 * out, np.float32)
    y = carray(pointer(a.y), (rows, out), np.float32)
    codes, scale = _quantise_all(carray(pointer(a.x), (rows, n), np.float32), rows, n, np.float32(a.static), a.block)
    start = add_to(a.at, a.chunk)
    while start < out:
        end = min(start + a.chunk, out)
        for r in range(rows):
            c, s, to = codes[r], scale[r], y[r]
            for j in range(start, end):
                gate = np.float32(_dot(c, w[j], n)) * (s * w_scale[j])
                to[j] = _activate(gate, a.kind) * (np.float32(_dot(c, w[out + j], n)) * (s * w_scale[out + j]))
        start = add_to(a.at, a.chunk)


def _weight_only(args):
    """y = x w^T for float32 rows; each weight row is widened once and used by all rows of x.

    A single row of x and one scale per channel need no widened copy.
    """
    a = carray(args, 1)[0]
    rows, n, out, groups = a.rows, a.n, a.out, a.groups
    x = carray(pointer(a.x), (rows, n), np.float32)
    w = carray(pointer(a.w), (out, n), np.int8)
    w_scale = carray(pointer(a.w_scale), (out, groups), np.float32)
    y = carray(pointer(a.y), (rows, out), np.float32)
    wide = np.empty(n, np.float32)
    start = add_to(a.at, a.chunk)
    while start < out:
        end = min(start + a.chunk, out)
        for j in range(start, end):
            if rows == 1 and groups == 1:
                y[0, j] = w_scale[j, 0] * _dot_float(x[0], w[j], n)
            else:
                _widen(w[j], w_scale[j], wide, n // groups, groups)
                for r in range(rows):
                    y[r, j] = _dot_float(x[r], wide, n)
        if a.bias:
            bias = carray(pointer(a.bias), out, np.float32)
            for r in range(rows):
                for j in range(start, end):
                    y[r, j] += bias[j]
        start = add_to(a.at, a.chunk)


def _quantise_rows(args):
    """Rows of x to int8 codes ``q`` and ``scale`` [rows], each run of ``block`` > 1 elements rotated first."""
    a = carray(args, 1)[0]
    rows, n = a.rows, a.n
    x = carray(pointer(a.x), (rows, n), np.float32)
    q = carray(pointer(a.q), (rows, n), np.int8)
    scale = carray(pointer(a.scale), rows, np.float32)
    rotated = np.empty(n, np.float32)
    start = add_to(a.at, a.chunk)
    while start < rows:
        for r in range(start, min(start + a.chunk, rows)):
            if a.block > 1:
                rotated[:] = x[r]
                hadamard(rotated, n, a.block)
                scale[r] = _quantise(rotated, q[r], n, np.float32(a.static))
            else:
                scale[r] = _quantise(x[r], q[r], n, np.float32(a.static))
        start = add_to(a.at, a.chunk)


def _dequantise(args):
    """y = total * scale * w_scale + bias, ``total`` [rows, out] int32."""
    a = carray(args, 1)[0]
    rows, out = a.rows, a.out
    total = carray(pointer(a.total), (rows, out), np.int32)
    scale = carray(pointer(a.scale), rows, np.float32)
    w_scale = carray(pointer(a.w_scale), out, np.float32)
    y = carray(pointer(a.y), (rows, out), np.float32)
    start = add_to(a.at, a.chunk)
    while start < rows:
        for r in range(start, min(start + a.chunk, rows)):
            _scale_back(total[r], scale[r], w_scale, y[r], out)
            if a.bias:
                bias = carray(pointer(a.bias), out, np.float32)
                for j in range(out):
                    y[r, j] += bias[j]
        start = add_to(a.at, a.chunk)


@_inner
def _scale_back(total, s, w_scale, y, n):
    for j in range(n):
        y[j] = np.float32(total[j]) * (s * w_scale[j])


def _gate_and_quantise(args):
    """Between the two products of a gated MLP: scale back, activate the gate, multiply, rotate, quantise.

    ``total`` [rows, 2 * n] int32 holds gate then up, ``x`` [rows] their rows' scales; ``q`` [rows, n] and ``scale``
    [rows] receive the result.
    """
    a = carray(args, 1)[0]
    rows, n = a.rows, a.n
    total = carray(pointer(a.total), (rows, 2 * n), np.int32)
    x_scale = carray(pointer(a.x), rows, np.float32)
    w_scale = carray(pointer(a.w_scale), 2 * n, np.float32)
    q = carray(pointer(a.q), (rows, n), np.int8)
    scale = carray(pointer(a.scale), rows, np.float32)
    h = np.empty(n, np.float32)
    start = add_to(a.at, a.chunk)
    while start < rows:
        for r in range(start, min(start + a.chunk, rows)):
            if a.kind == 0:
                _gate(total[r, :n], total[r, n:], x_scale[r], w_scale[:n], w_scale[n:], h, n, 0)
            else:
                _gate(total[r, :n], total[r, n:], x_scale[r], w_scale[:n], w_scale[n:], h, n, 1)
            if a.block > 1:
                hadamard(h, n, a.block)
            scale[r] = _quantise(h, q[r], n, np.float32(a.static))
        start = add_to(a.at, a.chunk)


@_inner
def _gate(gates, ups, s, gate_scale, up_scale, h, n, kind):
    for i in range(n):
        h[i] = _activate(np.float32(gates[i]) * (s * gate_scale[i]), kind) * (np.float32(ups[i]) * (s * up_scale[i]))


__all__ = ["ACTIVATIONS", "INDEX", "entry_points", "hadamard", "run_team"]
_ENTRIES = (_linear, _gate_up, _weight_only, _quantise_rows, _dequantise, _gate_and_quantise)


@lru_cache(maxsize=1)
def entry_points() -> dict[str, Any]:
    """The compiled functions by name; their `address` goes to `run_team`. Compiles them, or loads numba's cache."""
    signature = types.void(types.CPointer(numba.from_dtype(ARGUMENTS)))
    compile_entry = numba.cfunc(signature, cache=True, fastmath=_FAST, error_model="numpy")
    return {function.__name__.lstrip("_"): compile_entry(function) for function in _ENTRIES}
