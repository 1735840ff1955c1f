"""RMSNorm in one pass instead of six small operations.

Beside products that read weights at the memory's speed, the small operations of a decode step are what is left to save.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gsm.linear.products import call, has_kernel, is_plain

_CHUNK_ROWS = 16
_ALONE_ROWS = 2  # fewer are not worth waking a thread


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * gain over the last dimension; float32 on the CPU. Needs the kernel (`has_kernel`)."""
    x = x.detach().contiguous()
    y, n = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // n
    chunk = max(1, min(_CHUNK_ROWS, rows // (2 * torch.get_num_threads())))
    (bits,) = struct.unpack("q", struct.pack("d", epsilon))
    addresses = (x.data_ptr(), gain.data_ptr(), 0, y.data_ptr())
    call("rms_norm", (0, 0, chunk, rows, n, 0, *addresses, bits), alone=rows <= _ALONE_ROWS)
    return y


def norm_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A `forward` for ``module`` by the kernel, or None where it is not an RMSNorm that the kernel reproduces.

    Families spell it in many ways; instead of their names, what they compute decides: gains of ``weight`` and of
    ``1 + weight`` are tried on random numbers.
    """
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or not has_kernel() or not isinstance(epsilon, float) or not _is_gain(weight):
        return None
    x = torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    for offset in (0.0, 1.0):
        if _agrees(module, x, weight, offset, epsilon):
            return _forward(module, type(module).forward, offset, epsilon)
    return None


def _is_gain(weight: Tensor) -> bool:
    plain = weight.dim() == 1 and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.is_contiguous() and type(weight) in (Tensor, nn.Parameter)


@torch.no_grad()
def _agrees(module: nn.Module, x: Tensor, weight: Tensor, offset: float, epsilon: float) -> bool:
    try:
        theirs = type(module).forward(module, x)  # not the module itself: hooks are not asked
    except Exception:  # not a function of one tensor
        return False
    ours = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * (weight + offset)  # as the kernel, uncompiled
    return torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6)


def _forward(module: nn.Module, otherwise: Any, offset: float, epsilon: float) -> Callable[[Tensor], Tensor]:
    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = self._parameters["weight"]  # read at every call: a fold may replace it
        assert weight is not None
        if args or kwargs or x.dtype != torch.float32 or not is_plain(x):  # some norms take a gate as well
            y: Tensor = otherwise(self, x, *args, **kwargs)
            return y
        return rms_norm(x, weight + offset if offset else weight, epsilon)

    return MethodType(forward, module)  # bound, so that a deep copy of the model has one of its own
