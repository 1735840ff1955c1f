"""The arithmetic of window smoothing over block tables. Pure tensor functions; no vLLM needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gsm.config.smoothing import SmoothingConfig


@dataclass(frozen=True, slots=True)
class WindowIndex:
    """Where the tokens of a step and those before them lie; the same for every smoothed module.

    History rows `[N]` are tokens of earlier steps: `history_block`, `history_slot` say where the state keeps them. The
    window of token t is rows `source[t, 0..reach]` of (history, this step's tokens), itself first.
    """

    position: Tensor  # int64 [T]
    source: Tensor  # int64 [T, reach + 1]
    history_block: Tensor  # int64 [N]
    history_slot: Tensor  # int64 [N]
    kept: Tensor  # int64 [M]: tokens of this step that the state will keep
    kept_block: Tensor  # int64 [M]
    kept_slot: Tensor  # int64 [M]

    @classmethod
    def of_step(cls, step: Any, ring: int, device: torch.device) -> WindowIndex:
        """From a `Step`; `ring` is the number of inputs kept per block."""
        return cls.build(step.lengths, step.starts, step.tables, step.block_size, ring, device)

    @classmethod
    def build(
        cls, lengths: list[int], starts: list[int], tables: Tensor, block_size: int, ring: int, device: torch.device
    ) -> WindowIndex:
        """Rows with `lengths` tokens in all, new ones at `starts[i]..starts[i + 1]`, blocks `tables [B, P]`."""
        first = torch.tensor([n - (b - a) for n, a, b in zip(lengths, starts, starts[1:], strict=False)])
        count = torch.tensor(starts).diff()
        row = torch.arange(len(lengths)).repeat_interleave(count)
        token = torch.arange(starts[-1])
        position = token - torch.tensor(starts[:-1])[row] + first[row]
        # history: the `ring` positions before each row's first new token; those before position 0 are never used
        back = torch.arange(ring, 0, -1)
        past = (first.view(-1, 1) - back).clamp_min(0)
        table = tables.cpu().long()
        history_block = table.gather(1, past // block_size)
        num_history = len(lengths) * ring
        reach = torch.arange(ring + 1)
        wanted = position.view(-1, 1) - reach  # [T, reach + 1]
        in_step = wanted >= first[row].view(-1, 1)
        from_history = row.view(-1, 1) * ring + ring - (first[row].view(-1, 1) - wanted)
        source = torch.where(in_step, num_history + token.view(-1, 1) - reach, from_history)
        source = torch.where(wanted >= 0, source, num_history + token.view(-1, 1)).clamp_min(0)
        # a block keeps its last `ring` inputs; of what this step adds, only those survive
        offset = position % block_size
        last = torch.minimum(position - offset + block_size, torch.tensor(lengths)[row])  # end of the block so far
        keep = position >= last - ring
        kept = keep.nonzero().flatten()
        kept_block = table[row[kept], position[kept] // block_size]
        slots = (past % block_size % ring).flatten(), (offset % ring)[kept]
        parts = (position, source, history_block.flatten(), slots[0], kept, kept_block, slots[1])
        return cls(*(part.to(device) for part in parts))


def smooth(x: Tensor, state: Tensor, index: WindowIndex, config: SmoothingConfig) -> Tensor:
    """Smoothed `x [>= T, channels]`, rows beyond T as they are; `state [blocks, ring, channels]` takes in new inputs.

    Inputs are rounded to the dtype of the state, sums are float32: what was cached and what was not must not differ.
    """
    tokens = len(index.position)
    rows = x[:tokens].to(state.dtype)
    line = torch.cat((state[index.history_block, index.history_slot], rows)).float()
    state[index.kept_block, index.kept_slot] = rows[index.kept]
    window, strength = _parameters(index.position, config)
    skip = 1 if config.skip_sink else 0
    total = torch.zeros(tokens, x.shape[1], device=x.device)
    count = torch.zeros(tokens, device=x.device)
    for back in range(index.source.shape[1]):
        used = ((back < window) & (index.position - back >= skip)).float()
        total += line[index.source[:, back]] * used.unsqueeze(1)
        count += used
    active = (index.position >= skip) & ((count >= window) if config.warmup == "skip" else (count > 0))
    a = (strength * active).unsqueeze(1)
    smoothed = (1 - a) * line[-tokens:] + a * total / count.clamp_min(1).unsqueeze(1)
    out = x.clone()
    out[:tokens] = torch.where(a > 0, smoothed.to(x.dtype), x[:tokens])
    return out


def _parameters(position: Tensor, config: SmoothingConfig) -> tuple[Tensor, Tensor]:
    """Window and strength of tokens at `position [T]`."""
    short = config.short_request
    early = position < short.max_tokens
    window = torch.where(early, short.window_size, config.window_for(1 << 20))
    own = short.smooth_strength if short.action == "own" else 0.0
    return window, torch.where(early, own, config.smooth_strength)
