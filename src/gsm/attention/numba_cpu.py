"""Decode attention on CPU: compiled code that reads pages in place (`numba_kernels`), on torch's own threads."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsm.attention import numba_kernels as kernels
from gsm.attention.base import DecodeAttention, DecodeResult, check_query
from gsm.attention.torch_ops import TorchAttention
from gsm.core.codec import Fields
from gsm.core.scorers import NUM_CLUSTERS
from gsm.core.team import run_team
from gsm.core.view import AttentionSpec, KVView, Selection

MODES = {
    "clusters": kernels.CLUSTERS,
    "anchor": kernels.ANCHOR,
    "mean_sigma": kernels.MEAN_SIGMA,
    "minmax": kernels.MINMAX,
}
PARTS = {"clusters": NUM_CLUSTERS, "anchor": 2}  # logits that make up a page's score; 1 elsewhere
_CODECS = {"none": kernels.NONE, "int8": kernels.INT8, "int4": kernels.INT4}


class NumbaAttention(DecodeAttention):
    """Fused selection and attention. What the kernel does not know (see `serves`) goes to `TorchAttention`."""

    name = "numba"

    def __init__(self) -> None:
        self._general = TorchAttention()
        # the compiler takes half a minute on a new machine: let it run beside the prompt
        threading.Thread(target=kernels.entry_point, daemon=True).start()

    @staticmethod
    def serves(view: KVView, spec: AttentionSpec) -> bool:
        """float32 and bfloat16 pages without windows, soft-caps, sink logits or gaps, K and V stored."""
        plain = spec.most_visible is None and spec.softcap is None and spec.sink_logits is None
        plain = plain and spec.value_dims is None and not view.has_skips and view.cold is None
        return plain and view.hot["k"].dtype in (torch.float32, torch.bfloat16) and view.scorer.name in MODES

    def decode(self, query: Tensor, view: KVView, spec: AttentionSpec, selection: Selection | None) -> DecodeResult:
        plan = view.scratch.get("numba_plan")
        if plan is None or not plan.fits(query, view, selection, spec) or view.cold is not None or view.has_skips:
            if not self.serves(view, spec):
                return self._general.decode(query, view, spec, selection)
            plan = view.scratch["numba_plan"] = _Plan(view, selection, spec, check_query(query, view))
        result: DecodeResult = plan.run(query, view.table)
        return result


class _Plan:
    """The arguments of one decode step. Layers differ in their table, query and result only.

    Converting and describing forty arrays for every layer would cost as much as the kernel.
    """

    def __init__(self, view: KVView, selection: Selection | None, spec: AttentionSpec, group: int) -> None:
        # kept, so that `fits` may compare identities
        self.seq_lens, self.slots, self.selection, self.spec = view.seq_lens, view.slots, selection, spec
        self.pools = self._pools(view)
        batch, num_kv_heads = len(view.slots), view.table.shape[1]
        budgets = [view.max_pages] * batch if selection is None else list(selection.budget_pages)
        width = min(max(budgets), view.max_pages)
        self.budgets = torch.tensor(budgets)
        num_chunks = _num_chunks(batch * num_kv_heads)
        self.block = np.zeros(1, kernels.ARGUMENTS)
        self._set(
            batch=batch,
            num_kv_heads=num_kv_heads,
            group=group,
            page_size=view.page_size,
            max_pages=view.max_pages,
            width=width,
            num_chunks=num_chunks,
            mode=MODES[view.scorer.name] if selection is not None else kernels.ALL,
            num_parts=PARTS.get(view.scorer.name, 1),
            num_sinks=selection.num_sink_pages if selection is not None else 0,
            recent_tokens=selection.recent_tokens if selection is not None else 0,
            sigma=view.scorer.sigma,
            slots=self.slots.data_ptr(),
            seq_lens=self.seq_lens.data_ptr(),
            budgets=self.budgets.data_ptr(),
            table_slot_stride=view.table.stride(0),
            table_head_stride=view.table.stride(1),
            **_addresses(view),
            scale=spec.scale,
            **_warm_sizes(view),
            is_bfloat16=view.hot["k"].dtype == torch.bfloat16,
            k_dim=view.hot["k"].shape[-1],
            v_dim=view.hot["v"].shape[-1],
        )
        self._make_room(batch * num_kv_heads, group, num_chunks, width)
        self.query_shape = torch.Size((batch, num_kv_heads * group, view.hot["k"].shape[-1]))
        self.shapes = (batch, num_kv_heads * group, view.hot["v"].shape[-1]), (batch, num_kv_heads, width)
        self.function = kernels.entry_point().address
        self.block_address = self.block.ctypes.data
        self._of_layer = [self.block[name] for name in ("table", "query", "out", "pages", "mass")]

    def fits(self, query: Tensor, view: KVView, selection: Selection | None, spec: AttentionSpec) -> bool:
        """Whether this is another layer of the same step, over the same pools (a pool that grows moves)."""
        same = self.seq_lens is view.seq_lens and self.slots is view.slots and self.selection is selection
        same = same and self.pools == self._pools(view) and self.spec == spec
        return same and query.shape == self.query_shape

    @staticmethod
    def _pools(view: KVView) -> tuple[int, int, int]:
        """Where the pools lie. Addresses, not tensors: a plan outlives its step and must not keep old pools alive."""
        warm = view.warm["k"].data_ptr() if view.warm is not None else 0
        return view.records["hot"].data_ptr(), view.hot["k"].data_ptr(), warm

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            self.block[name] = value

    def _make_room(self, num_streams: int, group: int, num_chunks: int, width: int) -> None:
        v_dim, max_pages, num_parts = (int(self.block[name][0]) for name in ("v_dim", "max_pages", "num_parts"))
        items = num_streams * num_chunks
        self.start = np.array([0] + [num_chunks] * 2 * num_streams, np.int64)
        self.counters = self.start.copy()
        scores = num_streams * num_parts * group * max_pages if self.selection is not None else 1
        floats = {"scores": scores, "partial": items * group * v_dim, "state": items * group * 2}
        floats["sums"] = num_streams * group * width
        self.work = {name: torch.empty(size, dtype=torch.float32, device="cpu") for name, size in floats.items()}
        self.work["counts"] = torch.empty(num_streams, dtype=torch.long, device="cpu")
        self._set(counters=self.counters.ctypes.data, **{name: x.data_ptr() for name, x in self.work.items()})

    def run(self, query: Tensor, table: Tensor) -> DecodeResult:
        """One layer: `query [B, Hq, k_dim]`, `table` of the layer."""
        heads = query if query.dtype == torch.float32 and query.is_contiguous() else query.float().contiguous()
        out = torch.empty(self.shapes[0], dtype=torch.float32, device="cpu")  # whatever torch's defaults are
        pages = torch.empty(self.shapes[1], dtype=torch.long, device="cpu")
        mass = torch.empty(self.shapes[1], dtype=torch.float32, device="cpu")
        for field, tensor in zip(self._of_layer, (table, heads, out, pages, mass), strict=True):
            field[0] = tensor.data_ptr()
        self.counters[:] = self.start
        run_team(self.function, self.block_address)
        return DecodeResult(out if query.dtype == torch.float32 else out.to(query.dtype), pages, mass)


def _num_chunks(num_streams: int) -> int:
    """Pieces of a head's pages, so that every thread has work: a model may have three kv heads, a machine two cores."""
    threads = torch.get_num_threads()
    if num_streams % threads == 0:
        return 1
    return threads if num_streams < 4 * threads else 1


def _addresses(view: KVView) -> dict[str, int]:
    """Where records and pools lie."""
    records, warm = view.records, view.warm if view.warm is not None else {}
    found = {name: records[name].data_ptr() for name in view.scorer.fields(view.hot["k"].shape[-1])}
    found |= {"hot_row": records["hot"].data_ptr(), "warm_row": records["warm"].data_ptr()}
    found |= {f"hot_{name}": view.hot[name].data_ptr() for name in ("k", "v")}
    found |= {f"warm_{name}": warm[name].data_ptr() for name in ("k", "v") if name in warm}
    names = ("k_scale", "k_offset", "v_scale", "v_offset")
    return found | {name: warm[name].data_ptr() for name in names if name in warm}


def _warm_sizes(view: KVView) -> dict[str, int]:
    """Codec number and the shape of a warm page's codes and scales."""
    warm = view.warm
    if warm is None:
        return {"codec": kernels.NONE}
    return {
        "codec": _CODECS[view.codec.name],
        "k_bytes": warm["k"].shape[-1],
        "v_bytes": warm["v"].shape[-1],
        "k_scales": _per_page(warm, "k_scale"),
        "v_scales": _per_page(warm, "v_scale"),
        "v_groups": warm["v_scale"].shape[-1],
    }


def _per_page(fields: Fields, name: str) -> int:
    return math.prod(fields[name].shape[1:])
