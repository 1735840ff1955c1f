"""Rotary position embedding (arXiv:2104.09864), halves layout: channel i turns together with channel i + d/2."""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.errors import ConfigError


def rope_frequencies(rotary_dim: int, theta: float = 10000.0) -> Tensor:
    """Radians per position, float32 `[rotary_dim / 2]`. Raises ConfigError for an odd or empty size."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"rotary_dim is {rotary_dim}; rotation works on pairs of channels, give an even number >= 2")
    return theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim).float()


def apply_rope(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn the first `2 * len(frequencies)` channels of `x [B, heads, T, d]` by their `positions [T]` or `[B, T]`.

    Angles are float32 whatever the dtype of `x`; the remaining channels pass through.
    """
    angles = positions.float().unsqueeze(-1) * frequencies  # [(B,) T, rotary_dim / 2]
    angles = angles.unsqueeze(0) if angles.dim() == 2 else angles.unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    half = frequencies.shape[0]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
