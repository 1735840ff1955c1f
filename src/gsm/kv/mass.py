"""Attention mass per page, with bounded memory.

The *mass* of a page in one step is the largest sum of softmax weights on its tokens over the query heads of its kv
head. A page keeps its last `window` observations, or a decayed average. A page that was not read was not observed and
keeps its value; a page that was never observed has no mass (NaN).

Sources: SPEC K3; the decayed average follows the measurements in KV_QUALITY.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsm.core.codec import Fields, FieldSpec


@dataclass(frozen=True, slots=True)
class MassStatistics:
    """How observations of a page are kept in its record: float16 values and a count that never overflows."""

    window: int  # observations that are averaged
    decay: float | None = None  # weight of the past in a decayed average, which then replaces the window

    @property
    def fields(self) -> FieldSpec:
        """Record fields: "mass" is a ring of the last observations, or one decayed average."""
        width = self.window if self.decay is None else 1
        return {"mass": ((width,), torch.float16), "observed": ((), torch.uint8)}

    @property
    def nbytes(self) -> int:
        """Bytes per page."""
        return 2 * self.fields["mass"][0][0] + 1

    def record(self, records: Fields, ids: Tensor, mass: Tensor) -> None:
        """One more observation `mass [N]` for pages `ids [N]` (distinct)."""
        observed = records["observed"][ids].long()
        if self.decay is None:
            records["mass"][ids, observed % self.window] = mass.half()
            # counts run 0 .. 2 * window - 1 and then fall back by one window, which keeps count % window going round
            grown = observed + 1
            grown = torch.where(grown >= 2 * self.window, grown - self.window, grown)
        else:
            past = records["mass"][ids, 0].float()
            blend = self.decay * past + (1.0 - self.decay) * mass.float()
            records["mass"][ids, 0] = torch.where(observed == 0, mass.float(), blend).half()
            grown = torch.ones_like(observed)
        records["observed"][ids] = grown.to(torch.uint8)

    def mean(self, records: Fields, ids: Tensor) -> Tensor:
        """float32 mass of pages `ids [...]`; NaN where the id is negative or nothing was observed."""
        present = ids.clamp_min(0).long()
        observed = records["observed"][present].long()
        width = records["mass"].shape[1]
        valid = torch.arange(width, device=ids.device) < observed.unsqueeze(-1)
        total = records["mass"][present].float().masked_fill(~valid, 0.0).sum(-1)
        mean = total / observed.clamp(1, width)
        return mean.masked_fill((ids < 0) | (observed == 0), torch.nan)
