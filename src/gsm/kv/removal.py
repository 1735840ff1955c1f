"""Why and when a page went, told by the place it left empty in the page table.

A table entry >= 0 is a page id, -1 means that nothing was ever there, and any other negative number is a removal: the
sequence's length at that moment and the reason. This costs no memory beside the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The order is part of the code; append only.
REASONS = ("recent", "threshold", "budget", "warm_size", "window", "reasoning", "history")
_BITS = 3  # room for 8 reasons; int32 then counts 268 million tokens


def removal_code(num_tokens: int, reason: str) -> int:
    """The table entry for a page removed at a sequence length of `num_tokens`."""
    return -2 - ((num_tokens << _BITS) | REASONS.index(reason))


def removed_at(entries: Tensor) -> Tensor:
    """Sequence lengths at the removal, int64; -1 where an entry is not a removal."""
    return torch.where(entries < -1, (-2 - entries.long()) >> _BITS, -1)


def removed_by(entries: Tensor) -> Tensor:
    """Indices into REASONS, int64; -1 where an entry is not a removal."""
    return torch.where(entries < -1, (-2 - entries.long()) & ((1 << _BITS) - 1), -1)
