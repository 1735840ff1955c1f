"""Which norm feeds which weights, in every decoder block: a table of layouts, and a finder that matches it to a model.

Names are relative to a block. A weight is named by its parameter, because routers and stacked experts are parameters
without a `Linear` around them; all weights are [..., out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from gsm.errors import UnsupportedModel

NormKind = Literal["plain", "one_plus", "layer"]


@dataclass(frozen=True)
class Layout:
    """Names of the parts of one decoder block. ``*_rows`` says which output rows of a fused weight are meant."""

    attn_norm: str = "input_layernorm"
    attn_in: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    value: str = "self_attn.v_proj"
    value_rows: Literal["all", "last"] = "all"
    attn_out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str | None = "mlp.up_proj"
    up_rows: Literal["all", "last_half"] = "all"
    mlp_out: tuple[str, ...] = ("mlp.down_proj",)
    experts: tuple[str, ...] = ()  # stacked weights [experts, out, in]: never a Linear, not observable in between
    post_norms: tuple[str, ...] = ()


_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

# The first layout whose every name exists in a block describes it, so the more particular ones come first.
LAYOUTS: dict[str, Layout] = {
    "gemma2": Layout(
        mlp_norm="pre_feedforward_layernorm", post_norms=("post_attention_layernorm", "post_feedforward_layernorm")
    ),
    "qwen_moe_shared": Layout(
        mlp_in=(
            "mlp.gate",
            "mlp.shared_expert_gate",
            "mlp.shared_expert.gate_proj",
            "mlp.shared_expert.up_proj",
            "mlp.experts.gate_up_proj",
        ),
        up="mlp.shared_expert.up_proj",
        mlp_out=("mlp.shared_expert.down_proj", "mlp.experts.down_proj"),
        experts=_EXPERTS,
    ),
    "mixtral": Layout(
        mlp_in=("mlp.gate", "mlp.experts.gate_up_proj"), up=None, mlp_out=("mlp.experts.down_proj",), experts=_EXPERTS
    ),
    "phi3": Layout(
        attn_in=("self_attn.qkv_proj",),
        value="self_attn.qkv_proj",
        value_rows="last",
        mlp_in=("mlp.gate_up_proj",),
        up="mlp.gate_up_proj",
        up_rows="last_half",
    ),
    "llama": Layout(),
}


@dataclass(frozen=True)
class Block:
    """One decoder block of a model: its layout, its full name and its attention shape."""

    index: int
    name: str
    module: nn.Module
    layout: Layout
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def path(self, part: str) -> str:
        return f"{self.name}.{part}"

    def part(self, name: str) -> Any:
        return _get(self.module, name)

    def weight_path(self, part: str) -> str:
        """The full name of the parameter behind ``part`` (a module with a weight, or a parameter itself)."""
        return self.path(part) if isinstance(self.part(part), nn.Parameter) else f"{self.path(part)}.weight"

    def value_slice(self) -> slice:
        """Output rows of `layout.value` that hold values."""
        rows = self.num_kv_heads * self.head_dim
        return slice(-rows, None) if self.layout.value_rows == "last" else slice(0, rows)

    def up_slice(self) -> slice:
        """Output rows of `layout.up` that hold the linear branch of the gated MLP."""
        if self.layout.up is None:
            raise UnsupportedModel(f"block {self.name} has no MLP branch that can be scaled")
        rows = self.part(self.layout.up).weight.shape[0]
        return slice(rows // 2, rows) if self.layout.up_rows == "last_half" else slice(0, rows)


@dataclass(frozen=True)
class Sites:
    """All blocks of a model that a layout describes, and what surrounds them."""

    blocks: tuple[Block, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # block name -> why it is left alone
    final_norm: str = ""
    embedding: str = ""
    head: str = ""

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)


def find_sites(model: nn.Module) -> Sites:
    """Match ``model``'s decoder blocks to the table; raises UnsupportedModel when none matches."""
    get_decoder = getattr(model, "get_decoder", None)
    decoder: Any = get_decoder() if callable(get_decoder) else model
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModel(f"{type(model).__name__} has no list of decoder layers, so there is nothing to smooth")
    names = {id(module): name for name, module in model.named_modules()}
    blocks, skipped = [], {}
    for index, layer in enumerate(layers):
        layout = next((layout for layout in LAYOUTS.values() if _fits(layer, layout)), None)
        if layout is None:
            skipped[names[id(layer)]] = "its parts have none of the known names"
            continue
        blocks.append(_block(index, names[id(layer)], layer, layout))
    if not blocks:
        known = ", ".join(LAYOUTS)
        raise UnsupportedModel(
            f"{type(model).__name__} has no decoder block of a known layout ({known}); smoothing leaves it alone"
        )
    head = getattr(model, "lm_head", None)
    return Sites(
        tuple(blocks),
        skipped,
        final_norm=names.get(id(getattr(decoder, "norm", None)), ""),
        embedding=names.get(id(decoder.get_input_embeddings()), ""),
        head=names.get(id(head), ""),
    )


def norm_kind(norm: nn.Module) -> NormKind | None:
    """How a norm applies its weight, found by probing it: x̂ w, x̂ (1 + w), or with the mean removed (LayerNorm).

    None for anything else. Probing instead of naming classes makes new families safe by default.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 1, weight.numel(), generator=generator) + 0.5).to(weight)
    with torch.no_grad():
        y = norm(x).float()
        rms = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        centred = torch.nn.functional.layer_norm(
            x.float(), (weight.numel(),), weight.float(), getattr(norm, "bias", None)
        )
        candidates: dict[NormKind, torch.Tensor] = {
            "plain": rms * weight.float(),
            "one_plus": rms * (1 + weight.float()),
            "layer": centred,
        }
        tolerance = 0.02 * float(y.abs().max()) + 1e-6
        for kind, expected in candidates.items():
            if float((y - expected).abs().max()) <= tolerance:
                return kind
    return None


def _block(index: int, name: str, layer: nn.Module, layout: Layout) -> Block:
    attention = _get(layer, layout.attn_out.rpartition(".")[0])
    head_dim = int(attention.head_dim)
    columns = _get(layer, layout.attn_out).weight.shape[1]
    rows = _get(layer, layout.value).weight.shape[0]
    if layout.value_rows == "last":
        rows = (rows - columns) // 2
    return Block(index, name, layer, layout, columns // head_dim, rows // head_dim, head_dim)


def _fits(layer: nn.Module, layout: Layout) -> bool:
    up = (layout.up,) if layout.up else ()
    names = (
        layout.attn_norm,
        *layout.attn_in,
        layout.attn_out,
        layout.mlp_norm,
        *layout.mlp_in,
        *up,
        *layout.mlp_out,
        *layout.post_norms,
    )
    return all(_get(layer, name) is not None for name in names)


def _get(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
        if module is None:
            return None
    return module
