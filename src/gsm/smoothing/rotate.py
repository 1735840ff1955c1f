"""`rotate`: spread outlier channels over all channels by orthogonal rotations that cancel inside the model.

After QuaRot (Ashkboos et al., 2024). The residual stream is rotated as a whole: what writes into it gets the rotation,
what reads from it the inverse, and RMSNorm commutes with it once its gain is folded into its readers. Values are
rotated inside each head, between the value and the output projection. The MLP's inner activation is rotated at run
time by a fast block-Hadamard transform, because a gated non-linearity lies between its producer and its reader.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from gsm.errors import UnsupportedModel
from gsm.smoothing.fold import Change, Fold
from gsm.smoothing.orthogonal import largest_power_of_two, spreading_matrix, sylvester
from gsm.smoothing.sites import Block, Sites, norm_kind

ONLINE_BLOCK = 128  # a larger block spreads no better here and costs more
_SMALLEST_BLOCK = 16


def rotate_fold(model: Any, sites: Sites, online: Collection[str] = (), seed: int = 0) -> Fold:
    """The fold that rotates the whole model; ``online`` names the MLP outputs that get the run-time transform.

    Raises UnsupportedModel when some path through the residual stream cannot be rotated.
    """
    _require_rotatable(model, sites)
    fold = Fold(untie=bool(getattr(model.config, "tie_word_embeddings", False)))
    rotation = spreading_matrix(model.get_parameter(f"{sites.embedding}.weight").shape[1], seed)
    fold.change(f"{sites.embedding}.weight", _columns(rotation))
    for block in sites:
        _fold_gain(
            fold, block.part(block.layout.attn_norm), block.path(block.layout.attn_norm), _readers(block, "attn")
        )
        _fold_gain(fold, block.part(block.layout.mlp_norm), block.path(block.layout.mlp_norm), _readers(block, "mlp"))
        for path in (*_readers(block, "attn"), *_readers(block, "mlp")):
            fold.change(path, _columns(rotation))
        _rotate_heads(fold, block)
        _rotate_inner(fold, block, online)
        for part in (block.layout.attn_out, *block.layout.mlp_out):
            fold.change(block.weight_path(part), _rows(rotation))
            if getattr(block.part(part), "bias", None) is not None:
                fold.change(block.path(part) + ".bias", _columns(rotation))
    _fold_gain(fold, model.get_submodule(sites.final_norm), sites.final_norm, [f"{sites.head}.weight"])
    fold.change(f"{sites.head}.weight", _columns(rotation))
    fold.sites = [name for block in sites for name in _site_names(block)]
    return fold


def online_block(num_channels: int) -> int:
    """Size of the run-time transform for an MLP of ``num_channels``; 1 means that none fits."""
    block = min(ONLINE_BLOCK, largest_power_of_two(num_channels))
    return block if block >= _SMALLEST_BLOCK else 1


def _require_rotatable(model: nn.Module, sites: Sites) -> None:
    if sites.skipped:
        name, reason = next(iter(sites.skipped.items()))
        raise UnsupportedModel(f"rotate needs to know every block, but {name} is unknown ({reason}); use channel")
    if not (sites.final_norm and sites.embedding and sites.head):
        raise UnsupportedModel("rotate needs an embedding, a final norm and a language-model head; use channel")
    norms = {sites.final_norm: model.get_submodule(sites.final_norm)}
    for block in sites:
        if block.layout.post_norms:
            raise UnsupportedModel(
                f"rotate cannot pass the norm after each sub-layer ({block.path(block.layout.post_norms[0])}), whose "
                "gain would have to be rotated; use channel"
            )
        norms |= {block.path(part): block.part(part) for part in (block.layout.attn_norm, block.layout.mlp_norm)}
    for name, norm in norms.items():
        if norm_kind(norm) not in ("plain", "one_plus"):
            raise UnsupportedModel(f"rotate needs RMSNorm, but {name} is a {type(norm).__name__}; use channel")


def _fold_gain(fold: Fold, norm: nn.Module, path: str, readers: list[str]) -> None:
    """Move a norm's gain into the weights that read its output."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    one_plus = norm_kind(norm) == "one_plus"
    gain = weight.detach().double() + (1.0 if one_plus else 0.0)
    for reader in readers:
        fold.change(reader, lambda w: w * gain.to(w))
    neutral = torch.zeros_like if one_plus else torch.ones_like
    fold.change(f"{path}.weight", lambda w: neutral(w))


def _rotate_heads(fold: Fold, block: Block) -> None:
    head = spreading_matrix(block.head_dim) if block.head_dim & (block.head_dim - 1) else sylvester(block.head_dim)
    rows = block.value_slice()
    value = block.weight_path(block.layout.value)

    def per_head_rows(w: Tensor) -> Tensor:
        new, h = w.clone(), head.to(w)
        part = new[rows].reshape(block.num_kv_heads, block.head_dim, -1)
        new[rows] = (h.T @ part).reshape(new[rows].shape)
        return new

    def per_head_columns(w: Tensor) -> Tensor:
        return (w.reshape(w.shape[0], -1, block.head_dim) @ head.to(w)).reshape(w.shape)

    fold.change(value, per_head_rows)
    if getattr(block.part(block.layout.value), "bias", None) is not None:
        fold.change(block.path(block.layout.value) + ".bias", per_head_rows)
    fold.change(block.weight_path(block.layout.attn_out), per_head_columns)


def _rotate_inner(fold: Fold, block: Block, online: Collection[str]) -> None:
    for part in block.layout.mlp_out:
        path = block.path(part)
        if path not in online or not isinstance(block.part(part), nn.Module):
            continue
        size = online_block(block.part(part).weight.shape[1])
        if size == 1:
            fold.left_out[path] = "its width has no power of two to transform by"
            continue
        matrix = sylvester(size)
        fold.change(f"{path}.weight", _block_columns(matrix))
        fold.online[path] = size


def _readers(block: Block, which: str) -> list[str]:
    parts = block.layout.attn_in if which == "attn" else block.layout.mlp_in
    return [block.weight_path(part) for part in parts]


def _site_names(block: Block) -> list[str]:
    layout = block.layout
    return [block.path(part) for part in (layout.attn_norm, layout.attn_out, layout.mlp_norm, layout.mlp_out[0])]


def _columns(matrix: Tensor) -> Change:
    """w @ matrix over the last dimension: for readers [..., out, in], embeddings [tokens, width] and biases [width]."""
    return lambda w: w @ matrix.to(w)


def _rows(matrix: Tensor) -> Change:
    """matrix^T @ w over the second last dimension: for writers [..., out, in]."""
    return lambda w: matrix.to(w).T @ w


def _block_columns(matrix: Tensor) -> Change:
    """The inverse of the run-time rotation, on a reader's input columns seen as [block, n / block]."""
    return lambda w: (matrix.to(w).T @ w.reshape(*w.shape[:-1], len(matrix), -1)).reshape(w.shape)
