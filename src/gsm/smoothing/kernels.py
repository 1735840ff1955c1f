"""Fused int8 kernels for CPU (numba). Optional: without numba the same arithmetic runs on torch's own operations.

A decode step multiplies one row with every weight, so it is bound by reading weights and by the number of small
operations around each product. One kernel per projection (or per gated MLP) removes those operations: it quantises the
row, multiplies in int8 with int32 sums, and scales back. Prefill multiplies with `torch._int_mm` (oneDNN) and uses the
row-wise kernels here before and after it.

Shapes: x [rows, in] float32, w [out, in] int8, w_scale [out] float32; all C-contiguous. A row that holds a NaN or an
infinity gets a NaN scale, so that the damage stays visible in the output; fast-math is limited to what keeps it so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

# reassociation lets sums vectorise; "nnan" and "ninf" stay off, because they would let NaN pass for a number. The numpy
# error model matters: Python's raises on division by zero, and that check alone keeps a loop from vectorising.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_inner: Any = njit(fastmath=_FAST, nogil=True, cache=True, error_model="numpy")
_outer: Any = njit(fastmath=_FAST, nogil=True, cache=True, error_model="numpy", parallel=True)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_INFINITY_BITS = np.int32(0x7F800000)


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


@_inner
def _exp(x: Any) -> Any:
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
def _activate(x: Any, kind: Any) -> Any:
    """silu(x), or the tanh form of gelu, which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))."""
    z = x
    if kind == 1:
        z = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)
    return x / (np.float32(1.0) + _exp(-z))


@_inner
def _dot(a: Any, b: Any, n: Any) -> Any:
    """Exact int32 dot product of two int8 rows; products in int16 and sums in int32 become vpmaddwd."""
    total = np.int32(0)
    for i in range(n):
        total = np.int32(total + np.int32(np.int16(a[i]) * np.int16(b[i])))
    return total


@_inner
def _quantise(x: Any, q: Any, n: Any, static_scale: Any) -> Any:
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
def hadamard(x: Any, n: Any, block: Any) -> None:
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


@_outer
def quantise_rows(x: Any, q: Any, scale: Any, static_scale: Any, block: Any) -> None:
    """Rows of x to int8 codes ``q`` and ``scale`` [rows], each run of ``block`` > 1 elements rotated first."""
    rows, n = x.shape
    for r in prange(rows):
        if block > 1:
            rotated = x[r].copy()
            hadamard(rotated, n, block)
            scale[r] = _quantise(rotated, q[r], n, static_scale)
        else:
            scale[r] = _quantise(x[r], q[r], n, static_scale)


@_outer
def dequantise(total: Any, scale: Any, w_scale: Any, bias: Any, y: Any) -> None:
    """y = total * scale * w_scale + bias; ``bias`` is empty when there is none."""
    rows, n = total.shape
    has_bias = bias.shape[0] == n
    for r in prange(rows):
        s = scale[r]
        for j in range(n):
            y[r, j] = np.float32(total[r, j]) * (s * w_scale[j])
        if has_bias:
            for j in range(n):
                y[r, j] += bias[j]


@_outer
def gate_and_quantise(
    total: Any, scale: Any, w_scale: Any, kind: Any, q: Any, h_scale: Any, static_scale: Any, block: Any
) -> None:
    """Between the two products of a gated MLP: scale back, activate the gate, multiply, rotate, quantise.

    ``total`` [rows, 2 * inner] holds gate then up; ``q`` [rows, inner] and ``h_scale`` [rows] receive the result.
    """
    rows, inner = q.shape
    for r in prange(rows):
        s = scale[r]
        h = np.empty(inner, np.float32)
        gates, ups = total[r, :inner], total[r, inner:]
        gate_scale, up_scale = w_scale[:inner], w_scale[inner:]
        if kind == 0:
            for i in range(inner):
                gate = np.float32(gates[i]) * (s * gate_scale[i])
                h[i] = _activate(gate, 0) * (np.float32(ups[i]) * (s * up_scale[i]))
        else:
            for i in range(inner):
                gate = np.float32(gates[i]) * (s * gate_scale[i])
                h[i] = _activate(gate, 1) * (np.float32(ups[i]) * (s * up_scale[i]))
        if block > 1:
            hadamard(h, inner, block)
        h_scale[r] = _quantise(h, q[r], inner, static_scale)


@_outer
def linear_small(x: Any, w: Any, w_scale: Any, bias: Any, y: Any, static_scale: Any, block: Any) -> None:
    """y = x w^T for a few rows, quantised per row, in one call."""
    rows, n = x.shape
    out = w.shape[0]
    has_bias = bias.shape[0] == out
    q = np.empty((rows, n), np.int8)
    scale = np.empty(rows, np.float32)
    for r in range(rows):
        if block > 1:
            rotated = x[r].copy()
            hadamard(rotated, n, block)
            scale[r] = _quantise(rotated, q[r], n, static_scale)
        else:
            scale[r] = _quantise(x[r], q[r], n, static_scale)
    for j in prange(out):
        for r in range(rows):
            value = np.float32(_dot(q[r], w[j], n)) * (scale[r] * w_scale[j])
            if has_bias:
                value += bias[j]
            y[r, j] = value


@_outer
def weight_only_small(x: Any, w: Any, w_scale: Any, bias: Any, y: Any) -> None:
    """y = x w^T for float32 rows and int8 weights; each weight row is widened once and used by all rows of x."""
    rows, n = x.shape
    out = w.shape[0]
    has_bias = bias.shape[0] == out
    for j in prange(out):
        wide = np.empty(n, np.float32)
        codes = w[j]
        for i in range(n):
            wide[i] = np.float32(codes[i])
        for r in range(rows):
            row = x[r]
            total = np.float32(0.0)
            for i in range(n):
                total += row[i] * wide[i]
            value = total * w_scale[j]
            if has_bias:
                value += bias[j]
            y[r, j] = value


@_outer
def gated_mlp_small(
    x: Any, w1: Any, w1_scale: Any, w2: Any, w2_scale: Any, kind: Any, y: Any, static1: Any, static2: Any, block: Any
) -> None:
    """down(act(gate(x)) * up(x)) for a few rows, in one call. ``w1`` [2 * inner, in] holds gate then up."""
    rows, n = x.shape
    inner = w1.shape[0] // 2
    out = w2.shape[0]
    q = np.empty((rows, n), np.int8)
    scale = np.empty(rows, np.float32)
    for r in range(rows):
        scale[r] = _quantise(x[r], q[r], n, static1)
    h = np.empty((rows, inner), np.float32)
    for i in prange(inner):
        for r in range(rows):
            gate = np.float32(_dot(q[r], w1[i], n)) * (scale[r] * w1_scale[i])
            up = np.float32(_dot(q[r], w1[inner + i], n)) * (scale[r] * w1_scale[inner + i])
            h[r, i] = _activate(gate, kind) * up
    hq = np.empty((rows, inner), np.int8)
    for r in range(rows):
        if block > 1:
            hadamard(h[r], inner, block)
        scale[r] = _quantise(h[r], hq[r], inner, static2)
    for j in prange(out):
        for r in range(rows):
            y[r, j] = np.float32(_dot(hq[r], w2[j], inner)) * (scale[r] * w2_scale[j])


@_outer
def rms_norm(x: Any, gain: Any, epsilon: Any, y: Any) -> None:
    """y = x / rms(x) * gain, row by row."""
    rows, n = x.shape
    if rows == 1:
        _rms_norm(x[0], gain, epsilon, y[0], n)
        return
    for r in prange(rows):
        _rms_norm(x[r], gain, epsilon, y[r], n)


@_inner
def _rms_norm(x: Any, gain: Any, epsilon: Any, y: Any, n: Any) -> None:
    total = np.float32(0.0)
    for i in range(n):
        total += x[i] * x[i]
    inverse = np.float32(1.0) / np.sqrt(total / np.float32(n) + epsilon)
    for i in range(n):
        y[i] = gain[i] * (x[i] * inverse)
