"""x w^T + b on a CPU, by whichever code reads the weights fastest.

torch hands float32 products to MKL, which on processors other than Intel's reads weights at a quarter of the memory's
speed, and a few bfloat16 rows to code that is at half of it. Two ways around; neither copies or packs a weight:

* a few rows (decode steps): the compiled kernel of `gsm.linear.kernels`;
* more float32 rows (prefill), where MKL takes its slow path: oneDNN, which torch has inside and uses for other dtypes.

Results differ from torch's in the order of float32 sums, as they do between two builds of torch.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gsm.core.team import run_alone, run_team

# Up to so many rows the kernel wins. Two cores, all weights of the demo model, kernel against torch (oneDNN):
# float32 1 row 21 / 56 (37) ms, 8 rows 34 / 78 (48), 16 rows 68 / 92 (56); bfloat16 1 row 12 / 23, 4 rows 16 / 25,
# 8 rows 26 / 27.
FEW_ROWS = {torch.float32: 8, torch.bfloat16: 4}
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ROWS_MULTIPLE = 16
_MAX_CHUNK = 1024  # output channels that a thread takes at a time, at most


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [rows, n], `weight` [out, n] and `bias` [out] or None of one dtype in FEW_ROWS, contiguous, on the CPU.

    Returns [rows, out] of the same dtype. No gradients are recorded.
    """
    if has_kernel() and 0 < x.shape[0] <= FEW_ROWS[x.dtype]:
        return few_rows(x, weight, bias)
    if x.dtype == torch.float32 and onednn_is_faster():
        return onednn(x, weight, bias)
    return functional.linear(x, weight, bias)


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is numbers in this machine's memory, on a call that records no gradients and is not under autocast.

    Tensors of classes of their own (quantised, distributed, fake) are not.
    """
    ordinary = type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.numel() > 0
    return ordinary and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by the kernel. Sums are float32 whatever the dtype, rounded once."""
    dtype, (rows, n), out = x.dtype, x.shape, weight.shape[0]
    x, bias = x.float(), None if bias is None else bias.float().contiguous()
    y = torch.empty(rows, out, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    chunk = min(_MAX_CHUNK, -(-out // (2 * torch.get_num_threads())))
    addresses = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
    call(_NAMES[dtype], (0, 0, chunk, rows, n, out, *addresses, 0))
    return y.to(dtype)


def call(name: str, fields: tuple[int, ...], *, alone: bool = False) -> None:
    """Run an entry point of the kernels with ``fields`` (`kernels.FIELDS`), on every thread or ``alone``."""
    arguments = array("q", fields)  # of this call only: calls must not share a counter
    arguments[1] = address = arguments.buffer_info()[0]
    (run_alone if alone else run_team)(_entry_point(name), address)


@lru_cache(maxsize=1)
def has_kernel() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


@lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Whether torch multiplies by MKL on a processor of another maker, and its oneDNN operation does what we expect.

    The operation is torch's own but private (its compiler uses it), so it is tried before it is trusted.
    """
    if not torch.backends.mkl.is_available() or _vendor() in ("", "GenuineIntel"):
        return False
    x, weight, bias = (
        torch.linspace(-2, 1, n, dtype=torch.float32, device="cpu").view(*shape)
        for n, shape in ((96, (12, 8)), (40, (5, 8)), (5, (5,)))
    )
    try:
        return all(
            torch.allclose(onednn(x, weight, b), functional.linear(x, weight, b), atol=1e-5) for b in (bias, None)
        )
    except (AttributeError, RuntimeError, TypeError):
        return False


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by oneDNN, which compiles and keeps code for every number of rows: so rows are filled up."""
    rows = x.shape[0]
    padding = -rows % _ROWS_MULTIPLE
    padded = functional.pad(x, (0, 0, 0, padding)) if padding else x
    y: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return y[:rows]


@lru_cache(maxsize=8)
def _entry_point(name: str) -> int:
    from gsm.linear.kernels import entry_points

    return int(entry_points()[name].address)


def _vendor() -> str:
    """The processor's maker as Linux names it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
