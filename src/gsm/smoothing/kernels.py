"""Fused int8 kernels for CPU (numba). Optional: without numba the same arithmetic runs on torch's own operations.

A decode step multiplies one row with every weight, so it is bound by reading weights and by the number of small
operations around each product. One kernel per projection (or per gated MLP) removes those operations: it quantises the
row, multiplies in int8 with int32 sums, and scales back. Prefill multiplies with `torch._int_mm` (oneDNN) and uses the
row-wise kernels here before and after it.

Shapes: x [rows, in] float32, w [out, in] int8, w_scale [out] float32; all C-contiguous. A row that holds a NaN or an
infinity gets a NaN scale, so that the damage stays visible in the output; fast-math is limited to what keeps it so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

# reassociation lets sums vectorise; "nnan" and "ninf" stay off, because they would let NaN pass for a number
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_inner: Any = njit(fastmath=_FAST, nogil=True, cache=True)
_outer: Any = njit(fastmath=_FAST, nogil=True, cache=True, parallel=True)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def _float_of_bits_impl(typingctx: Any, bits: Any) -> Any:
    """Reinterpret an int32 as a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    signature: Any = types.float32
    return signature(types.int32), codegen


_float_of_bits: Any = intrinsic(_float_of_bits_impl)


@_inner
def _exp(x: Any) -> Any:
    """e**x in float32 with a relative error of 2e-7; a polynomial, because calls into libm do not vectorise."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.rint(x * np.float32(1.4426950408889634))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + np.float32(1.0)
    return y * _float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


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
    """x[:n] to int8 codes; returns the scale. ``static_scale`` > 0 is used unless the row exceeds its range."""
    top = np.float32(0.0)
    poison = np.float32(0.0)
    for i in range(n):
        top = max(top, abs(x[i]))
        poison += x[i] * np.float32(0.0)
    scale = top / np.float32(127.0)
    if static_scale > np.float32(0.0) and scale <= static_scale:
        scale = static_scale
    inverse = np.float32(0.0)
    if scale > np.float32(0.0):
        inverse = np.float32(1.0) / scale
    for i in range(n):
        q[i] = np.int8(np.rint(x[i] * inverse))
    return scale + poison


@_inner
def hadamard(x: Any, n: Any, block: Any) -> None:
    """Multiply each run of ``block`` (a power of two) elements of x[:n] by the orthonormal Hadamard matrix."""
    norm = np.float32(1.0) / np.sqrt(np.float32(block))
    for start in range(0, n, block):
        half = 1
        while half < block:
            for i in range(start, start + block, 2 * half):
                for j in range(i, i + half):
                    a, b = x[j], x[j + half]
                    x[j], x[j + half] = a + b, a - b
            half *= 2
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
        for i in range(inner):
            gate = np.float32(total[r, i]) * (s * w_scale[i])
            up = np.float32(total[r, inner + i]) * (s * w_scale[inner + i])
            h[i] = _activate(gate, kind) * up
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
    """y = x w^T for a few float32 rows and int8 weights that are widened while they are read."""
    rows, n = x.shape
    out = w.shape[0]
    has_bias = bias.shape[0] == out
    for j in prange(out):
        for r in range(rows):
            total = np.float32(0.0)
            for i in range(n):
                total += x[r, i] * np.float32(w[j, i])
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
    for r in prange(rows):
        total = np.float32(0.0)
        for i in range(n):
            total += x[r, i] * x[r, i]
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(n) + epsilon)
        for i in range(n):
            y[r, i] = gain[i] * (x[r, i] * inverse)
