"""What one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence inside the model's input `[rows, length]`."""

    slot: int  # the sequence, as the KV store knows it
    row: int  # row of the input
    start: int  # first column of the input
    num_tokens: int
    is_draft: bool = False  # its tokens attend one by one, exactly as decode steps would, and may be cropped again
