"""Give a model's linear layers and norms another way to compute, for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gsm.config.linear import LinearBackend
from gsm.linear.norms import norm_forward
from gsm.linear.products import FEW_ROWS, has_kernel, is_plain, multiply, onednn_is_faster


@contextmanager
def fast_linears(model: nn.Module, backend: LinearBackend = "auto") -> Iterator[int]:
    """Inside the block plain `nn.Linear` layers of ``model`` in float32 or bfloat16 on a CPU multiply by faster code.

    So do norms (float32). Yields how many modules are served: none with ``backend`` "torch", or where nothing faster is
    known. Modules and weights stay the objects they are, only `forward` is shadowed; modules whose `forward` somebody
    else replaced (offloading hooks, quantisers) are left alone. Calls that record gradients, other dtypes and other
    devices take torch's own way.
    """
    served = _servable(model) if backend == "auto" else []
    if served and has_kernel():
        threading.Thread(target=_compile, daemon=True).start()  # beside the prompt
    try:
        for module, forward in served:
            module.forward = forward
        yield len(served)
    finally:
        for module, _ in served:
            module.__dict__.pop("forward", None)


def _servable(model: nn.Module) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    found = []
    for module in model.modules():
        forward = None
        if "forward" in module.__dict__:
            continue
        if type(module) is nn.Linear:
            forward = _forward(module) if _is_faster(module.weight) else None
        elif "weight" in module._parameters:
            forward = norm_forward(module)
        if forward is not None:
            found.append((module, forward))
    return found


def _is_faster(weight: Any) -> bool:
    return _is_matrix(weight) and (has_kernel() or (weight.dtype == torch.float32 and onednn_is_faster()))


def _is_matrix(weight: Any) -> bool:
    """Whether ``weight`` is a matrix of numbers in this machine's memory, not a tensor of a quantiser's own class."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype in FEW_ROWS
    return bool(plain and weight.device.type == "cpu" and weight.is_contiguous())


def _forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    return MethodType(_linear, module)  # bound, so that a deep copy of the model has one of its own


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    """`nn.Linear.forward`. Weights are looked up at every call: a fold may replace them."""
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    if x.dtype != weight.dtype or not _is_matrix(weight) or not is_plain(x):
        return functional.linear(x, weight, bias)
    y = multiply(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias)
    return y.view(*x.shape[:-1], -1)


def _compile() -> None:
    from gsm.linear.kernels import entry_points

    entry_points()
