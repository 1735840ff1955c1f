"""Layers that see only a bounded stretch of the past give pages back as the sequence moves on.

A page goes when no later token can see any of it. That happens at the *beginning* of a step, for what the tokens before
it left behind: a draft that is cropped right after its step finds everything it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gsm.errors import KVError
from gsm.kv.compact import num_cut_tokens
from gsm.kv.removal import removal_code

if TYPE_CHECKING:
    from gsm.kv.group import StreamGroup
    from gsm.kv.manager import SequenceState


def forget_unseen(group: StreamGroup, slot: int, state: SequenceState) -> None:
    """Give back the pages of a windowed group that the next token of a sequence cannot see any more."""
    window, page_size = group.geometry.window, group.page_size
    if window is None:
        return
    first = window.first_visible(state.num_unwindowed) // page_size
    last = window.first_visible(state.num_tokens) // page_size
    if last <= first:
        return
    entries = group.table[slot, : len(group.rows), :, first:last]
    before = entries.clone()
    group.release(slot, first, last, state.demoted)
    code = removal_code(state.num_tokens + num_cut_tokens(state, page_size), "window")
    entries.copy_(torch.where(before >= 0, code, before))
    group.has_holes = True


def check_crop(group: StreamGroup, state: SequenceState, num_tokens: int) -> None:
    """Refuse a crop to where the window of a layer would reach pages that are gone. Raises KVError."""
    window = group.geometry.window
    if window is None or num_tokens == 0:
        return
    gone = window.first_visible(state.num_unwindowed) // group.page_size
    if window.first_visible(num_tokens) // group.page_size < gone:
        raise KVError(
            f"cannot crop to {num_tokens} tokens: layers with a window of {window.size} tokens gave back what that "
            f"position would see when the sequence had {state.num_unwindowed}; fork the cache before going on, or "
            "feed the tokens anew"
        )
