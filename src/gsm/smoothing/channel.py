"""`channel`: move the range of outlier channels from activations into weights, where rounding hurts less.

After SmoothQuant (Xiao et al., 2023): each input channel j of a product is divided by
s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) and the weight's column is multiplied by it. The division costs nothing,
because it is folded into what produces the channel: the norm before q/k/v and before the MLP, the value projection
before the attention's output, and the linear branch before the MLP's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gsm.smoothing.calibration import Calibration
from gsm.smoothing.fold import Change, Fold
from gsm.smoothing.observe import capture_rows, int8_error
from gsm.smoothing.sites import Block, NormKind, Sites, norm_kind

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
DEFAULT_ALPHA = 0.5
_SMALLEST = 1e-5


@dataclass(frozen=True)
class ChannelSite:
    """One place where a scale can be moved. ``producers`` are divided and ``readers`` multiplied by it.

    A producer is (parameter, rows, norm kind or None); ``groups`` is how often the scale repeats along the readers'
    input (query heads per kv head), so that one producer channel serves several reader channels.
    """

    name: str
    observed: str
    producers: tuple[tuple[str, slice, NormKind | None], ...]
    readers: tuple[str, ...]
    num_kv_heads: int = 1
    groups: int = 1


def channel_sites(sites: Sites) -> tuple[list[ChannelSite], dict[str, str]]:
    """Every site of a model, and the reason for each that cannot be used."""
    found: list[ChannelSite] = []
    left_out: dict[str, str] = {}
    for block in sites:
        layout = block.layout
        _add_norm_site(found, left_out, block, layout.attn_norm, layout.attn_in)
        found.append(_value_site(block))
        _add_norm_site(found, left_out, block, layout.mlp_norm, layout.mlp_in)
        if layout.up is None:
            left_out[block.path(layout.mlp_out[0])] = "what happens inside stacked experts cannot be observed"
        else:
            found.append(_up_site(block))
    return found, left_out


def channel_fold(
    model: nn.Module,
    sites: Sites,
    calibration: Calibration,
    chosen: Sequence[str],
    alpha: float | str,
    samples: Tensor | None,
    skip_sink: bool = True,
) -> Fold:
    """The fold for the sites named in ``chosen``. ``alpha`` "search" tries `ALPHAS` per site on rows of ``samples``."""
    found, left_out = channel_sites(sites)
    fold = Fold(left_out=left_out)
    wanted = [site for site in found if site.name in set(chosen)]
    rows: Mapping[str, Tensor] = {}
    if alpha == "search" and samples is not None:
        rows = capture_rows(model, samples, [site.observed for site in wanted])
    for site in wanted:
        stats = calibration.sites[site.observed]
        top = stats.channel_max_body if skip_sink else stats.channel_max
        activation = torch.tensor(top, dtype=torch.float64)
        weights = [model.get_parameter(path).detach() for path in site.readers]
        if alpha != "search":
            scale = _scale(site, activation, weights, float(alpha))
        elif site.observed in rows:
            scale = _search(site, activation, weights, rows[site.observed])
        else:
            scale = _scale(site, activation, weights, DEFAULT_ALPHA)
        _add(fold, site, scale)
        fold.sites.append(site.name)
    return fold


def _scale(site: ChannelSite, activation: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """Scale per producer channel, float64; a channel that is always zero keeps its size."""
    columns = torch.stack([weight.double().abs().flatten(0, -2).amax(0) for weight in weights]).amax(0).cpu()
    top_x, top_w = _per_producer(site, activation), _per_producer(site, columns)
    scale = top_x.clamp_min(_SMALLEST) ** alpha / top_w.clamp_min(_SMALLEST) ** (1 - alpha)
    return torch.where((top_x > _SMALLEST) & (top_w > _SMALLEST), scale.clamp_min(_SMALLEST), 1.0)


def _search(site: ChannelSite, activation: Tensor, weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    """The scale of the alpha with the smallest error of the int8 product on ``rows``; no scaling competes too."""
    weight = torch.cat([weight.float().flatten(0, -2) for weight in weights])
    x = rows.to(weight)
    exact = x @ weight.T
    norm = exact.pow(2).sum(1).clamp_min(1e-12)  # errors count relative to their row: sinks would drown all others
    candidates = [torch.ones_like(_per_producer(site, activation))]
    candidates += [_scale(site, activation, weights, alpha) for alpha in ALPHAS]

    def error(scale: Tensor) -> float:
        s = _per_reader(site, scale).to(weight)
        xs, ws = x / s, weight * s
        delta = (xs + int8_error(xs)) @ (ws + int8_error(ws)).T - exact
        return float((delta.pow(2).sum(1) / norm).mean())

    return min(candidates, key=error)


def _add(fold: Fold, site: ChannelSite, scale: Tensor) -> None:
    for parameter, rows, kind in site.producers:
        fold.change(parameter, _divide(scale, rows, kind))
    columns = _per_reader(site, scale)
    for parameter in site.readers:
        fold.change(parameter, lambda weight, s=columns: weight * s.to(weight))  # type: ignore[misc]


def _divide(scale: Tensor, rows: slice, kind: NormKind | None) -> Change:
    def change(parameter: Tensor) -> Tensor:
        s = scale.to(parameter)
        if kind == "one_plus":
            return (1 + parameter) / s - 1
        new = parameter.clone()
        new[rows] = new[rows] / (s if parameter.dim() == 1 else s[:, None])
        return new

    return change


def _per_producer(site: ChannelSite, values: Tensor) -> Tensor:
    """Largest value over the readers' channels that one producer channel serves."""
    return values.double().reshape(site.num_kv_heads, site.groups, -1).amax(1).flatten()


def _per_reader(site: ChannelSite, scale: Tensor) -> Tensor:
    heads = scale.reshape(site.num_kv_heads, 1, -1)
    return heads.expand(-1, site.groups, -1).flatten()


def _add_norm_site(
    found: list[ChannelSite], left_out: dict[str, str], block: Block, norm: str, readers: tuple[str, ...]
) -> None:
    module, path = block.part(norm), block.path(norm)
    kind = norm_kind(module)
    if kind is None:
        left_out[path] = "its norm applies its weight in an unknown way"
        return
    producers = [(block.weight_path(norm), slice(None), kind)]
    if getattr(module, "bias", None) is not None:
        producers.append((f"{path}.bias", slice(None), kind))
    read = tuple(block.weight_path(reader) for reader in readers)
    found.append(ChannelSite(path, f"{path}:output", tuple(producers), read))


def _value_site(block: Block) -> ChannelSite:
    out = block.path(block.layout.attn_out)
    return ChannelSite(
        out,
        f"{out}:input",
        _linear_producers(block, block.layout.value, block.value_slice()),
        (f"{out}.weight",),
        num_kv_heads=block.num_kv_heads,
        groups=block.num_heads // block.num_kv_heads,
    )


def _up_site(block: Block) -> ChannelSite:
    assert block.layout.up is not None
    out = block.path(block.layout.mlp_out[0])
    producers = _linear_producers(block, block.layout.up, block.up_slice())
    return ChannelSite(out, f"{out}:input", producers, (f"{out}.weight",))


def _linear_producers(block: Block, part: str, rows: slice) -> tuple[tuple[str, slice, NormKind | None], ...]:
    producers: list[tuple[str, slice, NormKind | None]] = [(block.weight_path(part), rows, None)]
    if getattr(block.part(part), "bias", None) is not None:
        producers.append((block.path(part) + ".bias", rows, None))
    return tuple(producers)
