"""Moving keys to other positions: one more rotation of keys that are rotated already."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """Radians per position of every channel pair, and how pairs lie (`gsm.arch.rotary.RotaryLayout`)."""

    frequencies: tuple[float, ...]
    pairs: bool = False

    def moved(self, keys: Tensor, distance: Tensor) -> Tensor:
        """`keys [N, tokens, d]` as if their positions were larger by `distance [N]` (int64, may be negative).

        Angles are computed in float64, so that a move by any distance is as exact as the keys' own dtype; the product
        is float32.
        """
        which, row = distance.unique(return_inverse=True)
        turns = torch.tensor(self.frequencies, dtype=torch.float64, device=keys.device)
        angles = which.double().unsqueeze(-1) * turns
        cos, sin = (f(angles).float()[row].unsqueeze(1) for f in (torch.cos, torch.sin))
        width = 2 * len(self.frequencies)
        turned, rest = keys[..., :width].float(), keys[..., width:]
        if self.pairs:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        both = (first * cos - second * sin, second * cos + first * sin)
        new = torch.stack(both, dim=-1).flatten(-2) if self.pairs else torch.cat(both, dim=-1)
        return torch.cat((new.to(keys.dtype), rest), dim=-1)
