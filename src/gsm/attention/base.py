"""The contract of a decode attention back end.

One query token per sequence attends the pages of its sequence: all of them, or those a `Selection` chooses. A back end
reads the view, changes nothing, and returns exact softmax attention over the tokens of the pages it read. Slots of a
page beyond the sequence's length are never used, whatever they contain. A query none of whose keys may be seen gets
zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from gsm.core.view import AttentionSpec, KVView, Selection
from gsm.errors import KVError


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """`out [B, num_query_heads, v_dim]`; the logical pages read, int64 `[B, H, S]` (-1 = padding); and their mass.

    `mass [B, H, S]` is the largest sum of softmax weights on the page's tokens over the group's query heads.
    """

    out: Tensor
    pages: Tensor
    mass: Tensor


class DecodeAttention(ABC):
    """One implementation of decode attention."""

    name: str

    @abstractmethod
    def decode(self, query: Tensor, view: KVView, spec: AttentionSpec, selection: Selection | None) -> DecodeResult:
        """`query [B, num_query_heads, k_dim]`; `selection` None reads every page. Raises KVError on a bad shape."""


def check_query(query: Tensor, view: KVView) -> int:
    """Validate a query against a view once, at the boundary; returns the query heads per kv head."""
    num_kv_heads, k_dim = view.table.shape[1], view.hot["k"].shape[-1]
    batch, heads, dim = query.shape
    if batch != len(view.slots) or dim != k_dim or heads % num_kv_heads:
        raise KVError(
            f"query of shape {tuple(query.shape)} does not fit {len(view.slots)} sequences with {num_kv_heads} kv "
            f"heads of {k_dim} channels; expected [batch, a multiple of the kv heads, channels]"
        )
    if query.device != view.hot["k"].device:
        raise KVError(f"query is on {query.device} but its pages are on {view.hot['k'].device}; move one of them")
    return heads // num_kv_heads
