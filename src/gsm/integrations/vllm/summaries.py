"""Page summaries of one layer, by physical block: prefix hits and copies find theirs where they find the block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsm.core.codec import Fields
from gsm.core.scorers import Scorer


class Summaries:
    """`fields[name]` is `[blocks, kv_heads, ...]` as the scorer stores it."""

    def __init__(self, scorer: Scorer, num_blocks: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        self.scorer = scorer
        self.fields: Fields = {
            name: torch.zeros((num_blocks, num_heads, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in scorer.fields(head_dim).items()
        }

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self.fields.values())

    def store(self, blocks: Tensor, keys: Tensor) -> None:
        """Summarise complete `blocks [N]` from their `keys [N, kv_heads, block_size, head_dim]`."""
        num_heads = keys.shape[1]
        encoded = self.scorer.encode(self.scorer.summarise(keys.flatten(0, 1)))
        for name, value in encoded.items():
            self.fields[name][blocks] = value.unflatten(0, (-1, num_heads))

    def read(self, blocks: Tensor) -> Any:
        """Summaries `[B, H, P]` of `blocks [B, P]`."""
        return self.scorer.decode({name: field[blocks].transpose(1, 2) for name, field in self.fields.items()})


class KnownBlocks:
    """Which physical blocks have a summary of what they hold now; shared by the layers of a metadata builder."""

    def __init__(self, num_blocks: int, device: torch.device, of: object = None) -> None:
        self.known = torch.zeros(num_blocks, dtype=torch.bool, device=device)
        self.of = of  # what kind of summaries

    def forget(self, blocks: Tensor) -> None:
        """What `blocks` int64 `[N]` hold has changed behind our back."""
        self.known[blocks] = False

    def update(
        self, slots: Tensor, block_size: int, tables: Tensor | None = None, complete: Tensor | None = None
    ) -> Tensor:
        """Blocks to summarise in this step, int64 `[N]`.

        `slots` are those written in this step (negative = none); `tables [B, P]` and the number of `complete [B]`
        blocks of each row are those of rows that will be scored. Blocks that are being filled become unknown, and
        blocks somebody else filled (before selection was switched on) are noticed when they are first needed.
        """
        slots = slots[slots >= 0]
        written = slots // block_size
        self.known[written] = False
        done = written[slots % block_size == block_size - 1]
        if tables is not None and complete is not None:
            column = torch.arange(tables.shape[1], device=tables.device)
            wanted = (column < complete.unsqueeze(1)) & ~self.known[tables]
            done = torch.cat((done, tables[wanted])).unique()
        self.known[done] = True
        return done
