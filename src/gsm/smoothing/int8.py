"""Modules that take the place of `Linear` layers and gated MLPs and multiply in int8.

Projections that read the same tensor (q, k, v; gate, up) are computed in one product. Which module asks first does not
matter: the group keeps the last input's result, recognises the input by identity, and forgets it after the last part
was taken.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from gsm.linear.norms import rms_norm
from gsm.smoothing import int8_ops
from gsm.smoothing.int8_ops import Int8Weight

Mode = Literal["weight_only", "dynamic", "static"]

_SUITED = 0.99


@dataclass
class InputScale:
    """The static scale of one input; 0 means "take each row's own". While ``recording``, rows are observed.

    The scale suits `_SUITED` of the rows; larger ones take their own at run time, so that nothing is clipped. A scale
    for the largest row of the calibration text would be too coarse for nearly all others. ``num_exempt`` tokens at the
    start of each recorded sample are left out (attention sinks).
    """

    value: float = 0.0
    recording: bool = False
    num_exempt: int = 0
    seen: list[Tensor] = field(default_factory=list)  # largest element of every row

    def see(self, x: Tensor) -> None:
        """Record ``x`` [..., tokens, channels]."""
        if self.recording and x.shape[-2] > self.num_exempt:
            self.seen.append(x[..., self.num_exempt :, :].abs().amax(-1).flatten())

    def freeze(self) -> None:
        rows = torch.cat(self.seen).sort().values if self.seen else torch.zeros(1)
        self.value = float(rows[int(_SUITED * (len(rows) - 1))]) / 127
        self.recording, self.seen = False, []


class Int8Linear(nn.Module):
    """y = x w^T + b with int8 weights; activations rounded per row ("dynamic", "static") or not ("weight_only").

    ``rotation_block`` > 1: the input is rotated (`int8_ops.hadamard`) first, as the folded weight expects.
    """

    def __init__(self, weight: Int8Weight, mode: Mode, rotation_block: int = 1) -> None:
        super().__init__()
        self.int8, self.mode, self.rotation_block = weight, mode, rotation_block
        self.input_scale = InputScale()

    @property
    def out_features(self) -> int:
        return self.int8.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.int8.codes.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = _rows(x)
        if self.input_scale.recording:
            self.input_scale.see(_rotated(x.float(), self.rotation_block))
        if self.mode == "weight_only":
            y = int8_ops.weight_only(_rotated(rows, self.rotation_block), self.int8)
        else:
            y = int8_ops.linear(rows, self.int8, static_scale=self.input_scale.value, block=self.rotation_block)
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.mode}"


class ProjectionGroup:
    """One product for several projections of the same tensor. Every thread has its own last input."""

    def __init__(self, linear: Int8Linear, sizes: list[int]) -> None:
        self.linear, self.sizes = linear, sizes
        self._last = threading.local()

    def part(self, x: Tensor, index: int) -> Tensor:
        outputs: dict[int, Tensor] = getattr(self._last, "outputs", {})
        if getattr(self._last, "x", None) is not x or index not in outputs:
            outputs = dict(enumerate(self.linear(x).split(self.sizes, -1)))
            self._last.x, self._last.outputs = x, outputs
        y = outputs.pop(index)
        if not outputs:
            self._last.x = None
        return y


class GroupedProjection(nn.Module):
    """One of the projections of a group, in the place of the original `Linear`. Only the first owns the weights."""

    def __init__(self, group: ProjectionGroup, index: int) -> None:
        super().__init__()
        self.group, self.index = group, index
        if index == 0:
            self.fused = group.linear

    @property
    def out_features(self) -> int:
        return self.group.sizes[self.index]

    @property
    def in_features(self) -> int:
        return self.group.linear.in_features

    def forward(self, x: Tensor) -> Tensor:
        return self.group.part(x, self.index)


class Int8GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with both products in int8 and nothing but int8 codes between them in memory."""

    def __init__(self, gate_up: Int8Linear, down: Int8Linear, activation: str) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up.input_scale.recording or self.gate_up.mode == "weight_only":
            gate, up = self.gate_up(x).chunk(2, -1)
            return self.down(_activate(gate, self.activation) * up)
        y = int8_ops.gated_mlp(
            _rows(x),
            self.gate_up.int8,
            self.down.int8,
            self.activation,
            static_scales=(self.gate_up.input_scale.value, self.down.input_scale.value),
            block=self.down.rotation_block,
        )
        return y.view(*x.shape[:-1], -1).to(x.dtype)


class FusedNorm(nn.Module):
    """RMSNorm in one kernel call instead of six small operations; float32 on the CPU only.

    Not int8 itself, but beside int8 products the small operations of a decode step are what is left to save.
    """

    def __init__(self, norm: nn.Module, gain: Tensor, epsilon: float) -> None:
        super().__init__()
        self.norm, self.epsilon = norm, epsilon
        self._gain = gain.detach().float().contiguous()

    @property
    def weight(self) -> Tensor:
        return self.norm.get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            y: Tensor = self.norm(x)
            return y
        return rms_norm(x, self._gain, self.epsilon)


class RotatedLinear(nn.Module):
    """A full-precision `Linear` whose weight expects a block-Hadamard rotation of its input."""

    def __init__(self, linear: nn.Module, rotation_block: int) -> None:
        super().__init__()
        self.linear, self.rotation_block = linear, rotation_block

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.linear.get_parameter("weight")
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(_rotated(x, self.rotation_block))
        return y


def gated_activation(module: nn.Module) -> str | None:
    """ "silu" or "gelu_tanh" when ``module`` computes that function, found by probing it; None otherwise."""
    x = torch.linspace(-6, 6, 101)
    with torch.no_grad():
        y = module(x.clone())
    for name in ("silu", "gelu_tanh"):
        if torch.allclose(y, _activate(x, name), atol=1e-5):
            return name
    return None


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).float().contiguous()


def _rotated(x: Tensor, block: int) -> Tensor:
    return int8_ops.hadamard(x, block) if block > 1 else x


def _activate(x: Tensor, name: str) -> Tensor:
    return functional.silu(x) if name == "silu" else functional.gelu(x, approximate="tanh")


def int8_modules(model: nn.Module) -> list[Any]:
    """Every `Int8Linear` of ``model``, those inside groups and MLPs included."""
    return [module for module in model.modules() if isinstance(module, Int8Linear)]
