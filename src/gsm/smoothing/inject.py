"""Put int8 modules in the place of a model's linear layers. Every change is journalled, so it can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from gsm.errors import AttachError, UnsupportedModel
from gsm.smoothing import int8_ops
from gsm.smoothing.edits import Edits
from gsm.smoothing.int8 import (
    FusedNorm,
    GroupedProjection,
    Int8GatedMLP,
    Int8Linear,
    Mode,
    ProjectionGroup,
    RotatedLinear,
    gated_activation,
    int8_modules,
)
from gsm.smoothing.int8_ops import Int8Weight
from gsm.smoothing.sites import Block, find_sites, norm_kind

_MIN_CHANNELS = 8  # narrower products (gates of one number, tiny routers) gain nothing and have no CUDA kernel


def refuse_quantised(model: Any, what: str) -> None:
    """Raise AttachError when ``model``'s weights are quantised already, by us or by its framework."""
    if int8_modules(model) or any(isinstance(module, RotatedLinear) for module in model.modules()):
        raise AttachError(
            f"{what} needs the original weights, but smoothing is already applied; leave that context first"
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise AttachError(
                f"{what} needs floating-point weights, but {name} is {parameter.dtype}: the model is quantised "
                "already, and rounding twice loses quality; load the unquantised checkpoint, or use method window"
            )


def install_int8(
    edits: Edits,
    model: Any,
    mode: Mode,
    leave: Callable[[str], bool],
    *,
    head: bool = True,
    separate: Collection[str] = (),
) -> list[str]:
    """Replace linear layers by int8 ones; ``leave(name)`` keeps a module as it is. Returns the names replaced.

    Projections of the same tensor share one product, and gated MLPs become one module, unless a part is left or named
    in ``separate`` (because its own input must stay reachable). The language-model head keeps its activations: it sees
    one row per request, where reading its weights is all that costs, and rounding its input costs as much quality as a
    third of all other layers together.
    """
    installed: list[str] = []
    try:
        blocks = list(find_sites(model))
    except UnsupportedModel:
        blocks = []  # an unknown layout is quantised layer by layer
    for block in blocks:
        if not any(block.path(part) in separate for part in block.layout.mlp_out):
            installed += _install_mlp(edits, model, block, mode, leave)
        installed += _install_group(edits, block, mode, leave)
    done = set(installed)
    output = model.get_output_embeddings()
    for name, module in _linears(model):
        if name in done or leave(name) or (module is output and not head):
            continue
        edits.set_module(name, _int8(module, "weight_only" if module is output else mode))
        installed.append(name)
    _install_norms(edits, model)
    return installed


def _install_norms(edits: Edits, model: Any) -> None:
    """Replace every RMSNorm of the residual stream whose function the fused kernel reproduces."""
    if int8_ops.kernels() is None or next(model.parameters()).device.type != "cpu":
        return
    width = model.get_input_embeddings().weight.shape[1]
    for name, norm in list(model.named_modules()):
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor) or weight.dtype != torch.float32 or weight.shape != (width,) or _hooked(norm):
            continue
        fused = _fused_norm(norm, weight)
        if fused is not None:
            edits.set_module(name, fused)


def _fused_norm(norm: nn.Module, weight: Tensor) -> FusedNorm | None:
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    kind = norm_kind(norm)
    if kind not in ("plain", "one_plus") or not isinstance(epsilon, float):
        return None
    fused = FusedNorm(norm, weight + 1 if kind == "one_plus" else weight, epsilon)
    x = 1e-2 * torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return fused if torch.allclose(fused(x), norm(x), rtol=1e-5, atol=1e-6) else None


def int8_candidates(model: nn.Module) -> list[str]:
    """Names of all linear layers that int8 would replace."""
    return [name for name, _ in _linears(model)]


def _linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Linear layers wide enough to gain, those with a run-time rotation included, in the order of the model."""
    rotated = {f"{name}.linear" for name, module in model.named_modules() if isinstance(module, RotatedLinear)}
    return [
        (name, module)
        for name, module in model.named_modules()
        if _is_plain_linear(module) and name not in rotated and min(_linear(module).weight.shape) >= _MIN_CHANNELS
    ]


def _install_mlp(edits: Edits, model: nn.Module, block: Block, mode: Mode, leave: Callable[[str], bool]) -> list[str]:
    """Replace a whole gated MLP when every part of it is known and its function is what we compute."""
    layout = block.layout
    parent = layout.mlp_out[0].rpartition(".")[0]
    names = [block.path(part) for part in (*layout.mlp_in, layout.mlp_out[0])]
    parts = [model.get_submodule(name) for name in names] if not layout.experts else []
    if not parts or any(leave(name) for name in names) or not all(_is_plain_linear(part) for part in parts):
        return []
    if any(_linear(part).bias is not None for part in parts) or any(_hooked(part) for part in parts):
        return []
    mlp = block.part(parent)
    activation = _activation_of(mlp)
    if activation is None or not _is_gated_mlp(mlp, parts, activation):
        return []
    gate_up = Int8Linear(Int8Weight.concatenate([_weight(part, mode) for part in parts[:-1]]), mode)
    edits.set_module(block.path(parent), Int8GatedMLP(gate_up, _int8(parts[-1], mode), activation))
    return names


def _install_group(edits: Edits, block: Block, mode: Mode, leave: Callable[[str], bool]) -> list[str]:
    names = [block.path(part) for part in block.layout.attn_in]
    parts = [block.part(part) for part in block.layout.attn_in]
    if len(parts) < 2 or any(leave(name) for name in names) or not all(_is_plain_linear(part) for part in parts):
        return []
    if len({_linear(part).bias is None for part in parts}) != 1:
        return []
    fused = Int8Linear(Int8Weight.concatenate([_weight(part, mode) for part in parts]), mode)
    group = ProjectionGroup(fused, [_linear(part).weight.shape[0] for part in parts])
    for index, name in enumerate(names):
        edits.set_module(name, GroupedProjection(group, index))
    return names


def _is_gated_mlp(mlp: nn.Module, parts: list[nn.Module], activation: str) -> bool:
    """Whether ``mlp`` computes down(act(gate(x)) * up(x)) of its parts, tried on random input."""
    first = _linear(parts[0]).weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, first.shape[1], generator=generator).to(first)
    act = nn.functional.silu if activation == "silu" else _gelu_tanh
    with torch.no_grad():
        expected = mlp(x)
        gate, up = torch.cat([part(x) for part in parts[:-1]], -1).chunk(2, -1)
        computed = parts[-1](act(gate) * up)
    return torch.allclose(expected.float(), computed.float(), rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def _activation_of(mlp: nn.Module) -> str | None:
    for name in ("act_fn", "activation_fn", "act"):
        activation = getattr(mlp, name, None)
        if isinstance(activation, nn.Module):
            return gated_activation(activation)
    return None


def _gelu_tanh(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def _int8(module: nn.Module, mode: Mode) -> Int8Linear:
    return Int8Linear(_weight(module, mode), mode, module.rotation_block if isinstance(module, RotatedLinear) else 1)


def _weight(module: nn.Module, mode: Mode) -> Int8Weight:
    linear = _linear(module)
    return Int8Weight.quantise(linear.weight, linear.bias, int8_ops.GROUP if mode == "weight_only" else None)


def _linear(module: nn.Module) -> Any:
    return module.linear if isinstance(module, RotatedLinear) else module


def _is_plain_linear(module: nn.Module) -> bool:
    return type(_linear(module)) is nn.Linear


def _hooked(module: nn.Module) -> Collection[Any]:
    """Hooks on a module would no longer be called if it were fused away."""
    return [*module._forward_hooks, *module._forward_pre_hooks]
