"""int8 products behind one small interface: fused kernels where numba is installed, torch's own operations elsewhere.

All routes use the same arithmetic: symmetric codes, one scale per row of x and one per output channel of w, exact int32
sums. They therefore agree to rounding of the final float32 product, whatever the number of rows. Where activations stay
as they are ("weight only") nothing forces a scale on a whole channel, and every `GROUP` weights have their own.

* CPU, few rows: one fused kernel per product (`gsm.smoothing.kernels`), on torch's own threads.
* CPU, many rows: `torch._int_mm` (oneDNN) with fused kernels before and after it.
* Without numba: the same steps as separate torch operations.
* CUDA: `torch._int_mm`, which wants more than 16 rows, so small batches are padded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gsm.errors import ModelError

SMALL_ROWS = 8  # up to here reading the weights dominates and the fused kernels win
_CUDA_MIN_ROWS, _CUDA_MULTIPLE = 32, 8
_WIDEN_ROWS = 32  # weight-only: more rows are worth widening the weights for a float32 product
_WIDEN_CHANNELS = 4096  # weights widened at a time, so that a large head never exists in float32
_MAX_CHUNK = 1024  # output channels that a thread takes at a time, at most
GROUP = 64  # weight-only: weights per scale; less than half the KL of one scale per channel, for 6 % more bytes
_BLOCK_ROWS = 512  # rows per product in a gated MLP: the int32 sums stay in the cache


@dataclass
class Int8Weight:
    """codes [out, in] int8, scale [out, groups] float32 and bias [out] float32 or None, with views for the kernels.

    More than one group per output channel is for `weight_only` alone.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None = None

    @staticmethod
    def quantise(weight: Tensor, bias: Tensor | None = None, group: int | None = None) -> Int8Weight:
        """Round ``weight`` [out, in] symmetrically, one scale per output channel. Zeros have scale 1.

        With ``group``, one scale per that many inputs where they divide evenly.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ModelError(
                f"a weight of dtype {weight.dtype} and shape {tuple(weight.shape)} cannot be rounded to int8; "
                "is the model quantised already? load it in float32, bfloat16 or float16"
            )
        w = weight.detach().float().contiguous()
        if group is None or w.shape[1] % group:
            group = w.shape[1]
        w = w.view(w.shape[0], -1, group)
        top = w.abs().amax(-1)
        if not bool(torch.isfinite(top).all()):
            raise ModelError("a weight holds NaN or infinity, so it cannot be rounded to int8; check the checkpoint")
        scale = torch.where(top > 0, top / 127, torch.ones_like(top))
        codes = (w / scale[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return Int8Weight(codes.view(weight.shape), scale, None if bias is None else bias.detach().float().clone())

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

    @property
    def groups(self) -> int:
        """Scales per output channel."""
        return self.scale.shape[1]

    def dequantise(self, channels: slice = slice(None)) -> Tensor:
        """[out, in] float32, of some output channels or of all."""
        codes, scale = self.codes[channels], self.scale[channels]
        return codes.float().view(*scale.shape, -1).mul_(scale[..., None]).view(codes.shape)

    @functools.cached_property
    def arguments(self) -> Any:
        """What every kernel is told of this weight; calls fill in the rest of a copy."""
        out, n = self.codes.shape
        return _arguments(w=self.codes, w_scale=self.scale, bias=self.bias, n=n, out=out, groups=self.groups)


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
    if x.shape[0] <= SMALL_ROWS and _fused(x):
        y = _floats(x.shape[0], weight.codes.shape[0])
        _over_channels("linear", weight, x=x, y=y, static=static_scale, block=block)
        return y
    q, s = quantise_rows(x, static_scale=static_scale, block=block)
    return dequantise(int_mm(q, weight.codes), s, weight)


def weight_only(x: Tensor, weight: Int8Weight) -> Tensor:
    """x w^T + b with int8 weights and activations as they are; ``x`` [rows, in] float32."""
    if x.shape[0] <= _WIDEN_ROWS and _fused(x):
        y = _floats(x.shape[0], weight.codes.shape[0])
        _over_channels("weight_only", weight, x=x, y=y)
        return y
    if x.device.type == "cpu" and x.shape[0] <= SMALL_ROWS and weight.groups == 1:
        # int8pack wants bfloat16 (with float32 it takes a path slower than float32 weights) and one scale per channel
        y = torch._weight_int8pack_mm(x.bfloat16(), weight.codes, weight.scale[:, 0].bfloat16()).float()
        return y if weight.bias is None else y + weight.bias
    starts = range(0, weight.codes.shape[0], _WIDEN_CHANNELS)
    parts = [functional.linear(x, weight.dequantise(slice(start, start + _WIDEN_CHANNELS))) for start in starts]
    y = torch.cat(parts, 1)
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
    static_x, static_h = static_scales
    if not _fused(x):
        gate, up = linear(x, gate_up, static_scale=static_x).chunk(2, -1)
        return linear(_activate(gate, activation) * up, down, static_scale=static_h, block=block)
    kind, inner = kernels().ACTIVATIONS[activation], down.codes.shape[1]
    if x.shape[0] <= SMALL_ROWS:
        hidden = _floats(x.shape[0], inner)
        _over_channels("gate_up", gate_up, x=x, y=hidden, static=static_x, kind=kind)
        return linear(hidden, down, static_scale=static_h, block=block)
    y = _floats(x.shape[0], down.codes.shape[0])
    for start in range(0, x.shape[0], _BLOCK_ROWS):
        q, s = quantise_rows(x[start : start + _BLOCK_ROWS], static_scale=static_x)
        total = int_mm(q, gate_up.codes)
        h, hs = _codes(len(q), inner), _floats(len(q))
        like = gate_up.arguments
        _over_rows(
            "gate_and_quantise", like, total=total, x=s, q=h, scale=hs, n=inner, static=static_h, kind=kind, block=block
        )
        y[start : start + len(q)] = dequantise(int_mm(h, down.codes), hs, down)
    return y


def quantise_rows(x: Tensor, *, static_scale: float = 0.0, block: int = 1) -> tuple[Tensor, Tensor]:
    """``x`` [rows, n] float32 to (codes [rows, n] int8, scale [rows] float32). A non-finite row gets a NaN scale."""
    if _fused(x):
        q, s = _codes(*x.shape), _floats(x.shape[0])
        _over_rows("quantise_rows", _arguments(n=x.shape[1]), x=x, q=q, scale=s, static=static_scale, block=block)
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
    if _fused(total):
        y = _floats(*total.shape)
        _over_rows("dequantise", weight.arguments, total=total, scale=scale, y=y)
        return y
    y = total.float().mul_(scale[:, None] * weight.scale[:, 0])
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


def _floats(*shape: int) -> Tensor:
    """Room for what a kernel writes: it knows neither torch's default dtype nor its default device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _codes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int8, device="cpu")


def _fused(x: Tensor) -> bool:
    return x.device.type == "cpu" and kernels() is not None


def _arguments(**fields: Any) -> Any:
    """A new record of kernel arguments with ``fields`` set: plain int64, because structured arrays are slow to fill."""
    import numpy as np

    return _fill(np.zeros(len(kernels().INDEX), np.int64), fields)


def _fill(record: Any, fields: dict[str, Any]) -> Any:
    """Tensors become addresses, None becomes 0, floats keep their bits."""
    index = kernels().INDEX
    for name, value in fields.items():
        if isinstance(value, float):
            record.view("f8")[index[name]] = value
        else:
            record[index[name]] = value.data_ptr() if isinstance(value, Tensor) else value or 0
    return record


def _over_channels(name: str, weight: Int8Weight, *, x: Tensor, y: Tensor, **fields: Any) -> None:
    """Run a kernel whose threads share the output channels of ``y`` for all rows of ``x``."""
    rows, out = y.shape
    chunk = min(_MAX_CHUNK, -(-out // (2 * torch.get_num_threads())))
    _call(name, weight.arguments, chunk=chunk, rows=rows, out=out, x=x, y=y, **fields)


def _over_rows(name: str, like: Any, **fields: Any) -> None:
    """Run a kernel whose threads share the rows; one or two rows are not worth waking a thread."""
    result: Tensor = fields["y"] if "y" in fields else fields["q"]
    rows = result.shape[0]
    chunk = max(1, min(16, rows // (2 * torch.get_num_threads())))
    _call(name, like, alone=rows <= 2, chunk=chunk, rows=rows, **fields)


def _call(name: str, like: Any, *, alone: bool = False, **fields: Any) -> None:
    """Run kernel ``name`` on a copy of the arguments ``like`` with ``fields`` set: calls must not share a counter."""
    record = _fill(like.copy(), fields)
    address = record.__array_interface__["data"][0]
    record[kernels().INDEX["at"]] = address
    function = kernels().entry_points()[name].address
    if alone:
        _as_function(function)(address)
    else:
        kernels().run_team(function, address)


@functools.cache
def _as_function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
