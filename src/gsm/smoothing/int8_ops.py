"""int8 products behind one small interface: fused kernels where numba is installed, torch's own operations elsewhere.

All routes use the same arithmetic: symmetric codes, one scale per row of x and one per output channel of w, exact int32
sums. They therefore agree to rounding of the final float32 product, whatever the number of rows.

* CPU, few rows: one fused kernel per product (`gsm.smoothing.kernels`).
* CPU, many rows: `torch._int_mm` (oneDNN) with fused kernels before and after it.
* Without numba: the same steps as separate torch operations.
* CUDA: `torch._int_mm`, which wants more than 16 rows, so small batches are padded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gsm.errors import ModelError

SMALL_ROWS = 4  # up to here reading the weights dominates and the fused kernels win
_CUDA_MIN_ROWS, _CUDA_MULTIPLE = 32, 8
_WIDEN_ROWS = 32  # weight-only: more rows are worth widening the weights for a float32 product
_WIDEN_CHANNELS = 4096  # weights widened at a time, so that a large head never exists in float32
_BLOCK_ROWS = 512  # rows per product in a gated MLP: the int32 sums stay in the cache


@dataclass
class Int8Weight:
    """codes [out, in] int8, scale [out] float32 and bias [out] float32 or None, with views for the kernels."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None = None

    @staticmethod
    def quantise(weight: Tensor, bias: Tensor | None = None) -> Int8Weight:
        """Round ``weight`` [out, in] symmetrically, one scale per output channel. A channel of zeros has scale 1."""
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ModelError(
                f"a weight of dtype {weight.dtype} and shape {tuple(weight.shape)} cannot be rounded to int8; "
                "is the model quantised already? load it in float32, bfloat16 or float16"
            )
        w = weight.detach().float()
        top = w.abs().amax(1)
        if not bool(torch.isfinite(top).all()):
            raise ModelError("a weight holds NaN or infinity, so it cannot be rounded to int8; check the checkpoint")
        scale = torch.where(top > 0, top / 127, torch.ones_like(top))
        codes = (w / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return Int8Weight(codes, scale, None if bias is None else bias.detach().float().clone())

    @staticmethod
    def concatenate(parts: list[Int8Weight]) -> Int8Weight:
        """Output channels of all ``parts`` one below the other. Either all parts have a bias or none has."""
        biases = [part.bias for part in parts if part.bias is not None]
        if biases and len(biases) != len(parts):
            raise ModelError("projections with and without a bias cannot be fused")
        return Int8Weight(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat(biases) if biases else None,
        )

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def dequantise(self) -> Tensor:
        """[out, in] float32."""
        return self.codes.float() * self.scale[:, None]

    @functools.cached_property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The same memory as numpy arrays (codes, scale, bias); an empty bias means none."""
        bias = torch.empty(0) if self.bias is None else self.bias
        return self.codes.numpy(), self.scale.numpy(), bias.numpy()


@functools.cache
def kernels() -> Any:
    """The fused kernels, or None where numba is missing."""
    try:
        from gsm.smoothing import kernels as module
    except ImportError:
        return None
    return module


def linear(x: Tensor, weight: Int8Weight, *, static_scale: float = 0.0, block: int = 1) -> Tensor:
    """x w^T + b in int8 for ``x`` [rows, in] float32 contiguous; returns [rows, out] float32.

    ``static_scale`` > 0 is the scale of every row that fits in it; larger rows (attention sinks) take their own.
    ``block`` > 1 rotates the inputs first (`hadamard`).
    """
    fused = kernels() if x.device.type == "cpu" else None
    if fused is not None and x.shape[0] <= SMALL_ROWS:
        y = torch.empty(x.shape[0], weight.codes.shape[0])
        codes, scale, bias = weight.arrays
        _with_threads(fused.linear_small, x.numpy(), codes, scale, bias, y.numpy(), _f32(static_scale), block)
        return y
    q, s = quantise_rows(x, static_scale=static_scale, block=block)
    return dequantise(int_mm(q, weight.codes), s, weight)


def weight_only(x: Tensor, weight: Int8Weight) -> Tensor:
    """x w^T + b with int8 weights and activations as they are; ``x`` [rows, in] float32."""
    fused = kernels() if x.device.type == "cpu" else None
    if fused is not None and x.shape[0] <= _WIDEN_ROWS:
        y = torch.empty(x.shape[0], weight.codes.shape[0])
        _with_threads(fused.weight_only_small, x.numpy(), *weight.arrays, y.numpy())
        return y
    if x.device.type == "cpu" and x.shape[0] <= SMALL_ROWS:
        # int8pack wants bfloat16 (with float32 it takes a path slower than float32 weights)
        y = torch._weight_int8pack_mm(x.bfloat16(), weight.codes, weight.scale.bfloat16()).float()
        return y if weight.bias is None else y + weight.bias
    parts = [functional.linear(x, codes.float()) for codes in weight.codes.split(_WIDEN_CHANNELS)]
    y = torch.cat(parts, 1).mul_(weight.scale)
    return y if weight.bias is None else y.add_(weight.bias)


def gated_mlp(
    x: Tensor,
    gate_up: Int8Weight,
    down: Int8Weight,
    activation: str,
    *,
    static_scales: tuple[float, float] = (0.0, 0.0),
    block: int = 1,
) -> Tensor:
    """down(act(gate(x)) * up(x)) without biases, for ``x`` [rows, in] float32 contiguous; returns [rows, out] float32.

    ``activation`` is "silu" or "gelu_tanh"; ``gate_up`` holds the gate's channels, then those of up.
    """
    fused = kernels() if x.device.type == "cpu" else None
    static_x, static_h = (_f32(scale) for scale in static_scales)
    if fused is None:
        gate, up = linear(x, gate_up, static_scale=static_scales[0]).chunk(2, -1)
        return linear(_activate(gate, activation) * up, down, static_scale=static_scales[1], block=block)
    kind = fused.ACTIVATIONS[activation]
    y = torch.empty(x.shape[0], down.codes.shape[0])
    w1, s1, _ = gate_up.arrays
    w2, s2, _ = down.arrays
    if x.shape[0] <= SMALL_ROWS:
        _with_threads(fused.gated_mlp_small, x.numpy(), w1, s1, w2, s2, kind, y.numpy(), static_x, static_h, block)
        return y
    for start in range(0, x.shape[0], _BLOCK_ROWS):
        q, s = quantise_rows(x[start : start + _BLOCK_ROWS], static_scale=static_scales[0])
        total = int_mm(q, gate_up.codes)
        h, hs = torch.empty(len(q), down.codes.shape[1], dtype=torch.int8), torch.empty(len(q))
        _with_threads(
            fused.gate_and_quantise, total.numpy(), s.numpy(), s1, kind, h.numpy(), hs.numpy(), static_h, block
        )
        y[start : start + len(q)] = dequantise(int_mm(h, down.codes), hs, down)
    return y


def quantise_rows(x: Tensor, *, static_scale: float = 0.0, block: int = 1) -> tuple[Tensor, Tensor]:
    """``x`` [rows, n] float32 to (codes [rows, n] int8, scale [rows] float32). A non-finite row gets a NaN scale."""
    fused = kernels() if x.device.type == "cpu" else None
    if fused is not None:
        q, s = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])
        _with_threads(fused.quantise_rows, x.numpy(), q.numpy(), s.numpy(), _f32(static_scale), block)
        return q, s
    if block > 1:
        x = hadamard(x, block)
    s = x.abs().amax(-1) / 127
    if static_scale > 0:
        s = torch.where(s <= static_scale, static_scale, s)
    q = (x / torch.where(s > 0, s, 1.0)[:, None]).round_().nan_to_num_(0.0).to(torch.int8)
    return q, torch.where(s.isfinite(), s, torch.nan)


def dequantise(total: Tensor, scale: Tensor, weight: Int8Weight) -> Tensor:
    """int32 sums [rows, out] to float32, with the bias added."""
    fused = kernels() if total.device.type == "cpu" else None
    if fused is not None:
        y = torch.empty(total.shape)
        _, w_scale, bias = weight.arrays
        _with_threads(fused.dequantise, total.numpy(), scale.numpy(), w_scale, bias, y.numpy())
        return y
    y = total.float().mul_(scale[:, None] * weight.scale)
    return y if weight.bias is None else y.add_(weight.bias)


def int_mm(q: Tensor, codes: Tensor) -> Tensor:
    """Exact int32 q codes^T for ``q`` [rows, in] and ``codes`` [out, in], both int8."""
    if q.device.type != "cuda":
        return torch._int_mm(q, codes.t())
    rows, (out, n) = q.shape[0], codes.shape
    if out % _CUDA_MULTIPLE or n % _CUDA_MULTIPLE:
        raise ModelError(
            f"a weight of shape {(out, n)} has no int8 product on CUDA, which needs multiples of {_CUDA_MULTIPLE}; "
            "name the module in smoothing.keep_precision"
        )
    return torch._int_mm(functional.pad(q, (0, 0, 0, cuda_padding(rows))), codes.t())[:rows]


def cuda_padding(rows: int) -> int:
    """Rows to add so that CUDA's int8 product accepts the batch: at least 32, and a multiple of 8."""
    padded = max(_CUDA_MIN_ROWS, -(-rows // _CUDA_MULTIPLE) * _CUDA_MULTIPLE)
    return padded - rows


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * gain over the last dimension; float32 on the CPU, with the fused kernels."""
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    y = torch.empty(rows.shape)
    _with_threads(kernels().rms_norm, rows.numpy(), gain.numpy(), _f32(epsilon), y.numpy())
    return y.view(x.shape)


def hadamard(x: Tensor, block: int) -> Tensor:
    """The last dimension, seen as [block, n / block], times the orthonormal Hadamard matrix of ``block`` (2^k).

    Elements n / block apart are mixed: every step then works on contiguous runs.
    """
    y, shape = x, x.shape
    width = shape[-1] // block
    while width < shape[-1]:
        y = y.reshape(-1, shape[-1] // (2 * width), 2, width)
        y = torch.stack((y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]), 2)
        width *= 2
    return y.reshape(shape) * block**-0.5


def _activate(x: Tensor, activation: str) -> Tensor:
    return functional.silu(x) if activation == "silu" else functional.gelu(x, approximate="tanh")


def _f32(value: float) -> Any:
    import numpy as np

    return np.float32(value)


@functools.cache
def _most_threads() -> int:
    from numba import config

    most: int = vars(config)["NUMBA_NUM_THREADS"]
    return most


def _with_threads(kernel: Any, *args: Any) -> None:
    """Call a parallel kernel with as many threads as torch uses."""
    import numba

    threads = min(torch.get_num_threads(), _most_threads())
    if numba.get_num_threads() != threads:
        numba.set_num_threads(threads)
    kernel(*args)
