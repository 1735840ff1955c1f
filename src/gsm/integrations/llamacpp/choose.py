"""Which token ranges a full window forgets. Pure functions of positions and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gsm.errors import InputError
from gsm.integrations.llamacpp.state import SavedKeys

Range = tuple[int, int]  # [first, last) positions


@dataclass(frozen=True)
class Protected:
    """What is never forgotten: the first tokens (sinks, system prompt), other ranges, and the most recent tokens."""

    num_first: int
    num_recent: int
    ranges: tuple[Range, ...] = ()

    def mask(self, num_tokens: int) -> NDArray[np.bool_]:
        """True where a position must stay."""
        keep = np.zeros(num_tokens, dtype=bool)
        keep[: self.num_first] = True
        keep[max(0, num_tokens - self.num_recent) :] = True
        for first, last in self.ranges:
            keep[max(0, first) : max(0, last)] = True
        return keep


def choose_ranges(
    num_tokens: int, num_to_free: int, protected: Protected, keys: SavedKeys | None, block: int = 32
) -> list[Range]:
    """Ranges to forget, ascending and disjoint, of exactly `num_to_free` tokens together.

    With keys: whole blocks of the tokens that are most like the rest (`sameness`) go first. Without: the oldest. Raises
    InputError where less than that is left unprotected.
    """
    free = ~protected.mask(num_tokens)
    if int(free.sum()) < num_to_free:
        raise InputError(
            f"{num_to_free} of {num_tokens} tokens must be forgotten but all except {int(free.sum())} are protected; "
            "use a larger window, a shorter system prompt or a smaller recent zone"
        )
    going = np.zeros(num_tokens, dtype=bool)
    if keys is None:
        going[np.flatnonzero(free)[:num_to_free]] = True
        return _ranges(going)
    scores = sameness(keys)
    starts = range(0, num_tokens, block)
    order = sorted(starts, key=lambda first: _block_score(scores, free, slice(first, first + block)))
    left = num_to_free
    for first in order:
        inside = first + np.flatnonzero(free[first : first + block])
        going[inside[:left]] = True
        left -= min(left, len(inside))
    return _ranges(going)


def sameness(keys: SavedKeys) -> NDArray[np.float32]:
    """How like the average key each token's keys are, -1 to 1: mean cosine over the layers (KeyDiff, arXiv:2504.15364).

    A token whose keys point where most do is told apart least by queries; distinctive tokens score low and stay.
    """
    total = np.zeros(len(keys.positions), dtype=np.float32)
    for layer in keys.layers:
        unit = layer / np.maximum(np.linalg.norm(layer, axis=1, keepdims=True), 1e-6)
        anchor = unit.mean(axis=0)
        total += unit @ (anchor / max(float(np.linalg.norm(anchor)), 1e-6))
    return total / np.float32(len(keys.layers))


def _block_score(scores: NDArray[np.float32], free: NDArray[np.bool_], where: slice) -> float:
    """Blocks with the smallest value go first; a block without free tokens last."""
    inside = scores[where][free[where]]
    return -float(inside.mean()) if len(inside) else np.inf


def _ranges(going: NDArray[np.bool_]) -> list[Range]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], going.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def shifted(ranges: Sequence[Range], gone: Sequence[Range]) -> tuple[Range, ...]:
    """Where `ranges` lie after the tokens of `gone` were removed and the rest moved up."""

    def new(position: int) -> int:
        return position - sum(max(0, min(position, last) - first) for first, last in gone)

    return tuple((new(first), new(last)) for first, last in ranges)
